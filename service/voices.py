"""Voices as the operator sees them: who there is, erase, give a new key, certify. In a step process, under the vault's user.

Only `rekey` opens anything, voice by voice, inside one locked buffer, in a process that was hardened first. Every call is on
record in the audit log before it answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

from keyvault.approvals import Operation
from keyvault.database import Database, Transaction
from keyvault.errors import KeyVaultError, RecordTampered
from keyvault.hsm import Hsm, KeyName, SiteHsm
from keyvault.inbox import Inbox
from keyvault.key_uses import Place
from keyvault.keys import VoiceKeys
from keyvault.lifecycle import APPROVALS_LAST
from keyvault.records import RecordMac, RingVersion, Tombstone
from keyvault.rings import Rings
from keyvault.schedules import DOMAIN as SCHEDULE_DOMAIN
from keyvault.schedules import Schedule
from keyvault.store import KeyStore
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.store import ScheduleStore, SyncStore
from keyvault.tombstones import Tombstones
from policies.audit.details import Details
from policies.audit.store import AuditStore
from policies.authority import Voice, VoiceTerm
from policies.errors import AuthorityRowTampered, PolicyError, VoiceUnknown
from policies.grants import REKEY, MaintenanceGrant, rekey_description
from policies.hours import Hours
from policies.intents import Facts, Intent
from policies.registry import Registry
from policies.store import PolicyStore, durable
from service.broken_glass import BrokenGlass
from service.inboxes import inbox_of, roster_in_force
from service.key_events import KeyEventRecorder
from service.masters import connect, serving_token
from service.settings import Settings
from service.shredding import forecast
from voiceprints import erasure_certificate
from voiceprints.erasure import Erased, Erasure, Remains
from voiceprints.errors import NotErased, VoiceprintError
from voiceprints.memory import LockedMemory
from voiceprints.resealing import Resealing

Answer = dict[str, Any]
_OPERATOR = "glottis"
_BEGINS = {VoiceTerm.BEARER: "allowed", VoiceTerm.LIVENESS: "demanded", VoiceTerm.DUAL_CONTROL: "demanded"}
"""What the log calls it when a term begins to hold."""


@dataclass(frozen=True)
class Voices:
    """The operator's use cases over one site's token and database."""

    settings: Settings
    database: Database
    hsm: SiteHsm
    policies: PolicyStore
    audit: AuditStore
    tombstones: Tombstones
    erasure: Erasure
    roster: Roster

    def listed(self, tenant: str | None, limit: int) -> Answer:
        """Voices, newest first, at most `limit`; rows that do not carry their MAC are named by their ids."""
        with durable(self.database) as transaction:
            ids = self.policies.voice_ids(transaction, limit=limit + 1, **({"tenant": tenant} if tenant else {}))
            found, tampered = [], []
            for voice in ids[:limit]:
                try:
                    row = self.policies.voice_anywhere(transaction, voice)
                except AuthorityRowTampered:
                    tampered.append(str(voice))
                else:
                    found += [_voice(row)] if row else []
            self._record(transaction, "voice.listed", tenant, None, {"voices": len(found)})
        return {"voices": found, "tampered": tampered, "more": len(ids) > limit}

    def shown(self, voice: UUID) -> Answer:
        """What there is of one voice, what it demands, and how far its erasure is. Raises VoiceUnknown."""
        with durable(self.database) as transaction:
            remains = self.erasure.remains(transaction, voice)
            if remains.tombstone is None and not remains.any:
                raise VoiceUnknown()
            try:
                row = self.policies.voice_anywhere(transaction, voice)
            except AuthorityRowTampered:  # among the findings; what it says is not believed
                row = None
            self._record(transaction, "voice.shown", remains.tenant, voice, {})
        return self._remains(remains) | _demands(row)

    def erase(self, voice: UUID, *, dry_run: bool) -> Answer:
        """Erase one voice, or say what would go. Raises VoiceUnknown."""
        if dry_run:
            return self.shown(voice) | {"changed": False}
        with durable(self.database) as transaction:
            done = self.erasure.erase(transaction, voice)
        return self._erased(done)

    def withdraw(self, consent: UUID, *, dry_run: bool) -> Answer:
        """End a consent and erase every voice under it, or say which would go. Raises ConsentUnknown."""
        with durable(self.database) as transaction:
            if dry_run:
                voices = sorted(self.policies.voice_ids(transaction, consent_id=consent))
                self._record(transaction, "consent.shown", None, None, {"consent": str(consent)})
                return {"consent": str(consent), "changed": False, "voices": [str(voice) for voice in voices]}
            done = self.erasure.withdraw(transaction, consent)
            self._record(transaction, "consent.withdrawn", None, None, {"consent": str(consent), "voices": len(done)})
        return {"consent": str(consent), "changed": True, "voices": [self._erased(erased) for erased in done]}

    def term(self, voice: UUID, term: VoiceTerm, *, on: bool, dry_run: bool) -> Answer:
        """Let a term hold for a voice at this site, or no longer. Raises VoiceUnknown, RowChanged."""
        with durable(self.database) as transaction:
            row = self.policies.voice_anywhere(transaction, voice)
            if row is None:
                raise VoiceUnknown()
            terms = {VoiceTerm(known) for known in row.terms} - {term} | ({term} if on else set())
            changes = terms != set(row.terms)
            if changes and not dry_run:
                Registry(self.policies, time.time).set_voice_terms(transaction, voice, terms)
            action = "voice.shown" if dry_run else f"voice.{term}-{_BEGINS[term] if on else 'ended'}"
            self._record(transaction, action, row.tenant, voice, {"changed": int(changes and not dry_run)})
        told = {"changed": False, "would_change": changes} if dry_run else {"changed": changes}
        return {"voice": str(voice), "tenant": row.tenant, term.value: on, **told}

    def hours(self, voice: UUID, hours: Hours | None, *, change: bool) -> Answer:
        """In which hours a voice opens at this site (None: always), set first with `change`. Raises VoiceUnknown, RowChanged."""
        with durable(self.database) as transaction:
            row = self.policies.voice_anywhere(transaction, voice)
            if row is None:
                raise VoiceUnknown()
            if change:
                row = Registry(self.policies, time.time).limit_voice(transaction, voice, hours)
            facts: Facts = {"hours": row.hours or "always"}
            self._record(transaction, "voice.hours_set" if change else "voice.shown", row.tenant, voice, facts)
        return {"voice": str(voice), "tenant": row.tenant, "hours": row.hours}

    def rekey(self, voices: Sequence[UUID]) -> Answer:
        """Give each voice a new key; one that fails is named, and the others go on.

        One under a compromised version opens only while officers have broken the glass for that version, besides.
        With two sites officers approve exactly these voices: where they have not, their request is filed, and its digest is
        the answer. Raises what ends the whole batch: AuditUnavailable, HsmUnavailable, GrantExpired.
        """
        now, inbox = datetime.now(UTC), self._inbox()
        operation: Operation | None = None
        if self.roster.development:
            grant = MaintenanceGrant.development(self.roster, str(uuid4()), voices, now=now)
        else:
            subject = sha256(rekey_description(self.roster.cluster, voices)).digest()
            found = inbox.approved(REKEY, subject, now)
            if found is None or found.operation is None:
                said = {"voices": " ".join(sorted({str(voice) for voice in voices}))}
                return {"request": inbox.request(REKEY, subject, said, now + APPROVALS_LAST), "voices": []}
            operation = found.operation
            grant = MaintenanceGrant.approved(self.roster, operation, found.approvals, voices, now=now, verify=verify_p256)
        done = [self._rekeyed(voice, grant) for voice in sorted(grant.voices)]
        if operation is not None and all(one["code"] is None for one in done):
            inbox.done(operation)
        return {"request": None, "job": grant.job, "approved_by": list(grant.approved_by), "voices": done}

    def _rekeyed(self, voice: UUID, grant: MaintenanceGrant) -> Answer:
        recorder, mac = KeyEventRecorder(self.audit), RecordMac(self.hsm)
        receipts, site = not self.roster.development, self.settings.site
        resealing = Resealing(
            database=self.database,
            keys=VoiceKeys(self.hsm, KeyStore(), recorder, mac, receipts=receipts, site=site),
            tombstones=self.tombstones,
            policies=self.policies,
            recorder=recorder,
            memory=LockedMemory(),
            clock=time.time,
            break_glass=BrokenGlass(self.settings, self.database, self.hsm, self.audit).to_open,
        )
        try:
            return {"voice": str(voice), "key_version": resealing.reseal(voice, grant).version, "code": None}
        except (KeyVaultError, PolicyError, VoiceprintError) as error:
            if error.code in _ENDS:
                raise
            return {"voice": str(voice), "key_version": None, "code": error.code}

    def _inbox(self) -> Inbox:
        """Where officers' approvals of this site are."""
        return inbox_of(self.settings, self.database, self.hsm, self.audit, self.roster)

    def certificate(self, voice: UUID, document: str | None) -> Answer:
        """This site's certificate of the voice's erasure; with `document`, the other site's with this site's signature too.

        Raises NotErased, RecordTampered, ErasureCertificateInvalid.
        """
        with durable(self.database) as transaction:
            stone = self.tombstones.of(transaction, voice)
            if stone is None:
                raise NotErased
            history = SyncStore(RecordMac(self.hsm)).certificates(transaction)
            versions = self._versions(transaction, stone.ring)
            closed = {
                int(str(said["epoch"])): at for at, said in Details(self.hsm).of(transaction, "sync.closed") if "epoch" in said
            }
            self._record(transaction, "voice.certified", stone.tenant, voice, {"stage": _stage(stone)})
        fields = erasure_certificate.fields_of(stone, versions, history, closed, self.roster)
        site = self.settings.site
        if document is None:
            return erasure_certificate.issue(fields, site, datetime.now(UTC), self._sign)
        return erasure_certificate.countersign(document.encode(), fields, site, self.roster, self._sign)

    def _sign(self, data: bytes) -> bytes:
        return self.hsm.sign(KeyName.SITE_IDENTITY, data)

    def _record(self, transaction: Transaction, action: str, tenant: str | None, voice: UUID | None, facts: Facts) -> None:
        intent = Intent(action, "allowed", tenant or _OPERATOR, _OPERATOR, voice, "voices", facts)
        self.audit.append(transaction, intent)

    def _erased(self, done: Erased) -> Answer:
        gone = {"keys": done.keys, "sealed_rows": done.sealed_rows, "log_details": done.details}
        told = {**_stone(done.tombstone), "changed": done.changed, **gone, "findings": list(done.findings)}
        return told | {"shredding": self._shredding(done.tombstone)}

    def _remains(self, remains: Remains) -> Answer:
        told = _stone(remains.tombstone) if remains.tombstone else {"stage": "stored"}
        told |= {"voice": str(remains.voice), "tenant": remains.tenant, "name": remains.name}
        told |= {"keys": remains.keys, "sealed_rows": remains.sealed_rows, "findings": list(remains.findings)}
        return told | ({"shredding": self._shredding(remains.tombstone)} if remains.tombstone else {})

    def _shredding(self, stone: Tombstone) -> Answer | None:
        """When the voice will be shredded; None where the rows that say so do not carry their MACs."""
        mac, rows = RecordMac(self.hsm), ScheduleStore()
        try:
            with durable(self.database) as transaction:
                versions = self._versions(transaction, stone.ring)
                plans = rows.schedules(transaction)
            for plan in plans:
                mac.check(plan.mac, SCHEDULE_DOMAIN, *plan.fields)
            found = forecast(stone, versions, [Schedule.of(plan) for plan in plans])
        except RecordTampered:
            return None
        at = found.at.isoformat(timespec="seconds") if found.at else None
        return {"waits_for": list(found.waits_for), "at": at, "by": found.by}

    def _versions(self, transaction: Transaction, ring: str) -> list[RingVersion]:
        rings = Rings(self.hsm, KeyStore(), KeyEventRecorder(self.audit), RecordMac(self.hsm))
        return rings.versions(transaction, ring)


_ENDS = frozenset(
    {"audit_unavailable", "hsm_unavailable", "grant_mismatch", "token_expired", "pin_rejected", "locked_memory_exhausted"}
)
"""What ends a whole batch, because the next voice would meet it too."""


@contextmanager
def voices(settings: Settings, home: Place = Place.VOICES) -> Iterator[Voices]:
    """This site's voices, with the serving token and the vault's database role."""
    database = connect(settings.role_url("vault"), site_wide=True)
    try:
        with serving_token(settings, database, home) as hsm:
            yield _voices(settings, database, hsm)
    finally:
        database.dispose()


def erasure_of(hsm: Hsm, policies: PolicyStore, audit: AuditStore, *, alone: bool) -> Erasure:
    """The erasure of one site, as every process that may erase joins it."""
    recorder = KeyEventRecorder(audit)
    return Erasure(
        tombstones=Tombstones(RecordMac(hsm), recorder),
        policies=policies,
        registry=Registry(policies, time.time),
        details=Details(hsm),
        recorder=recorder,
        alone=alone,
        clock=time.time,
    )


def _voices(settings: Settings, database: Database, hsm: SiteHsm) -> Voices:
    policies, audit = PolicyStore(RecordMac(hsm)), AuditStore(database, hsm)
    roster = roster_in_force(settings, database, hsm)
    erasure = erasure_of(hsm, policies, audit, alone=roster.development)
    tombstones = Tombstones(RecordMac(hsm), KeyEventRecorder(audit))
    return Voices(settings, database, hsm, policies, audit, tombstones, erasure, roster)


def _voice(voice: Voice) -> Answer:
    facts = {"voice": str(voice.voice_id), "tenant": voice.tenant, "name": voice.name, "state": voice.state.value}
    return facts | {
        "terms": list(voice.terms),
        "hours": voice.hours,
        "key_version": voice.key_version,
        "created_at": voice.created_at.isoformat(timespec="seconds"),
    }


def _demands(row: Voice | None) -> Answer:
    """The row's state, terms and hours; None of each where there is no row to believe."""
    if row is None:
        return {"state": None, "terms": None, "hours": None}
    return {"state": row.state.value, "terms": list(row.terms), "hours": row.hours}


def _stage(stone: Tombstone) -> str:
    return "shredded" if stone.shredded_at else "erased"


def _stone(stone: Tombstone) -> Answer:
    times = {"erased_at": stone.erased_at, "peer_erased_at": stone.peer_erased_at, "shredded_at": stone.shredded_at}
    covered = [f"{stone.ring}/{number}" for number in range(stone.first_ring_version, stone.last_ring_version + 1)]
    told = {name: at.isoformat(timespec="seconds") if at else None for name, at in times.items()}
    return {"voice": str(stone.voice), "tenant": stone.tenant, "stage": _stage(stone), **told, "ring_versions": covered}


def run(settings: Settings, call: str, request: Mapping[str, Any]) -> Answer:
    """One call of the command line, by its name; ids and bytes come as text."""
    with voices(settings, Place.REKEY if call == "rekey" else Place.VOICES) as known:
        match call:
            case "list":
                return known.listed(request["tenant"], request["limit"])
            case "show":
                return known.shown(UUID(request["voice"]))
            case "erase":
                return known.erase(UUID(request["voice"]), dry_run=request["dry_run"])
            case "withdraw":
                return known.withdraw(UUID(request["consent"]), dry_run=request["dry_run"])
            case VoiceTerm.BEARER | VoiceTerm.LIVENESS | VoiceTerm.DUAL_CONTROL:
                on = request["allowed" if call == VoiceTerm.BEARER else "demanded"]
                return known.term(UUID(request["voice"]), VoiceTerm(call), on=on, dry_run=request["dry_run"])
            case "hours":
                hours = Hours.parse(request["hours"]) if request["hours"] else None
                return known.hours(UUID(request["voice"]), hours, change=request["change"])
            case "rekey":
                return known.rekey([UUID(voice) for voice in request["voices"]])
            case "certificate":
                return known.certificate(UUID(request["voice"]), request["document"])
    raise ValueError(call)
