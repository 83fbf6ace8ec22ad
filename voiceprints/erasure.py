"""The use case: erase a voice. Everything of it goes in one transaction, a tombstone stays, and the log says so.

Gone are the sealed rows, every version of the wrapped key, the voice's row with its name, and the sealed details of the log's
entries about it. What stays names nobody: the tombstone, the entries themselves (keyed pseudonyms, salted commitments), and
the consent as evidence of what was allowed. An old copy of the database opens the voice until it is shredded
(`keyvault.tombstones`). Nothing is opened here, and no row that was changed or is missing can stop an erasure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from keyvault.database import Transaction
from keyvault.errors import RecordTampered
from keyvault.events import KeyEvent, Recorder
from keyvault.records import Tombstone
from keyvault.tombstones import ERASED, Outlook, Tombstones, facts
from policies.audit.details import Details
from policies.authority import Voice
from policies.consent import ConsentState
from policies.errors import AuthorityRowTampered, VoiceUnknown
from policies.registry import Registry
from policies.store import PolicyStore
from voiceprints.store import VoiceprintStore


@dataclass(frozen=True)
class Remains:
    """What there is of a voice now. `findings`: what is not as it was written, in words."""

    voice: UUID
    tenant: str | None
    name: str | None
    keys: int
    sealed_rows: int
    tombstone: Tombstone | None
    outlook: Outlook | None
    findings: tuple[str, ...]

    @property
    def any(self) -> bool:
        """Whether there is anything to erase."""
        return bool(self.keys or self.sealed_rows or self.name is not None)


@dataclass(frozen=True)
class Erased:
    """An erasure that will stand once the transaction commits. `changed` is False where nothing was left to erase."""

    tombstone: Tombstone
    outlook: Outlook | None
    keys: int
    sealed_rows: int
    details: int
    changed: bool
    findings: tuple[str, ...]


class Erasure:
    """Erases voices in the caller's transaction. `alone`: this installation has no other site that keeps copies."""

    def __init__(
        self,
        *,
        tombstones: Tombstones,
        policies: PolicyStore,
        registry: Registry,
        details: Details,
        recorder: Recorder,
        alone: bool,
        clock: Callable[[], float],
    ) -> None:
        self._tombstones, self._policies, self._registry = tombstones, policies, registry
        self._details, self._recorder, self._alone, self._clock = details, recorder, alone, clock
        self._voiceprints = VoiceprintStore()

    def remains(self, transaction: Transaction, voice: UUID) -> Remains:
        """Look, and change nothing. A voice that never was has no remains and no tombstone."""
        keys, findings = self._tombstones.keys_of(transaction, voice)
        rows = self._voiceprints.rows(transaction, voice)
        found: Voice | None = None
        name = None
        try:
            found = self._policies.voice_anywhere(transaction, voice)
            name = found.name if found else None
        except AuthorityRowTampered:
            findings, name = [*findings, "the voice's row does not carry its MAC"], ""
        stone, outlook = None, None
        try:
            stone = self._tombstones.of(transaction, voice)
            outlook = self._outlook(transaction, stone) if stone else None
        except RecordTampered:
            findings.append("the tombstone does not carry its MAC")
        known = [found.tenant] if found else [key.tenant for key in keys] + [row.tenant for row in rows]
        if stone is None and (keys or rows or name is not None):
            findings += [f"the {kind} is missing" for kind, there in _parts(keys, rows, name) if not there]
        tenant = next(iter(known), stone.tenant if stone else None)
        return Remains(voice, tenant, name, len(keys), len(rows), stone, outlook, tuple(findings))

    def erase(self, transaction: Transaction, voice: UUID, *, tenant: str | None = None) -> Erased:
        """Erase the voice, whatever state its rows are in; idempotent. With `tenant`, only if the voice is that tenant's.

        Raises VoiceUnknown where nothing of such a voice was ever here, and what the log raises where it cannot be recorded.
        """
        self._tombstones.lock(transaction, voice)
        before = self.remains(transaction, voice)
        if tenant is not None and before.tenant != tenant:
            raise VoiceUnknown()
        # Before anything is recorded: it reads the whole log, and recording keeps this process's other entries waiting.
        details = self._details.erase(transaction, voice)
        self._policies.forget_voice(transaction, voice)
        if before.tombstone is not None and not before.any:
            return Erased(before.tombstone, before.outlook, 0, 0, details, False, before.findings)
        if before.tenant is None and not before.findings:
            raise VoiceUnknown()
        now = datetime.fromtimestamp(self._clock(), UTC)
        self._voiceprints.replace(transaction, voice, ())
        stone, findings = self._tombstones.bury(
            transaction, voice, before.tenant or "", now=now, peer_erased_at=now if self._alone else None
        )
        findings = tuple(dict.fromkeys(before.findings + findings))
        said = facts(stone) | {"sealed_rows": before.sealed_rows, "details": details, "findings": "; ".join(findings)}
        self._recorder.record(transaction, KeyEvent(ERASED, said))
        outlook = self._outlook(transaction, stone)
        return Erased(stone, outlook, before.keys, before.sealed_rows, details, True, findings)

    def withdraw(self, transaction: Transaction, consent_id: UUID) -> tuple[Erased, ...]:
        """The speaker withdrew: the consent ends, and every voice under it is erased, all at once. Idempotent.

        A consent's row that was changed outside allows nothing as it is; its voices are erased all the same. Raises
        ConsentUnknown, RowChanged.
        """
        try:
            consent = self._policies.consent(transaction, consent_id)
            if consent is None or consent.state is ConsentState.ACTIVE:
                self._registry.withdraw_consent(transaction, consent_id)
        except AuthorityRowTampered:
            pass
        voices = sorted(self._policies.voice_ids(transaction, consent_id=consent_id))
        return tuple(self.erase(transaction, voice) for voice in voices)

    def _outlook(self, transaction: Transaction, stone: Tombstone) -> Outlook | None:
        """None where the ring's rows do not carry their MACs: nothing can be said then."""
        try:
            return self._tombstones.outlook(transaction, stone)
        except RecordTampered:
            return None


def _parts(keys: object, rows: tuple[object, ...], name: str | None) -> list[tuple[str, bool]]:
    return [
        ("key", bool(keys)),
        ("voice's row", name is not None),
        ("second sealed row", len(rows) != 1),
        ("voiceprint", bool(rows)),
    ]
