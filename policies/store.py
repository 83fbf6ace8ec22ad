"""Tables of clients, consents and voices, and of what was used up. The only file here that speaks SQL.

Authority rows carry a MAC made in the HSM over every column, so that writing the database is not enough to change who may
do what. Every change is a compare-and-swap on `row_version`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Table, and_, delete, select, update
from sqlalchemy.dialects.postgresql import insert

from keyvault.database import Rows, Statement, Transaction, send
from keyvault.errors import RecordTampered
from keyvault.records import Field, RecordMac, canonical
from policies.authority import Authority, Client, ClientState, Voice, VoiceState
from policies.consent import Consent, ConsentState
from policies.errors import AuditUnavailable, AuthorityRowTampered, RowChanged
from policies.grants import CLOCK_TOLERANCE_S, VerifiedProof
from policies.one_time import BrowserInvitation, UploadTicket
from policies.quotas import EVERYONE, Left, Limits, Quota, Scope, Used, left, windows
from policies.requests import Request, moment, proof_guard, uses_up
from policies.tables import (
    AUTHORITY,
    CALLED_BY,
    CONSUME_PROOF,
    DURABLE_AS,
    LIMITS,
    SPEND,
    WITH_NEWEST,
    authority_change,
    browser_invitation,
    client,
    consent,
    quota,
    upload_ticket,
    usage,
    used_proof,
    used_recording,
    used_token,
    voice,
)
from policies.unsent import store as unsent
from policies.writing.store import deciding as deciding
from policies.writing.store import durable as durable
from policies.writing.store import kept, list_change, new, require_one_use, within
from policies.writing.store import site_wide as site_wide

AuthorityRow = TypeVar("AuthorityRow", Client, Consent, Voice, Quota, UploadTicket, BrowserInvitation)
OneTime = TypeVar("OneTime", UploadTicket, BrowserInvitation)
Value = Client | Consent | Voice | Quota | UploadTicket | BrowserInvitation
_NOTHING_LEFT = Left(0, 0, 0, 0)
_FORGOTTEN = 2**31 - 1
"""The row version of a row that is not to come back."""
APPROVAL = "approval"
"""How a used word of a second client stands in the list that only grows."""
MAC_BYTES = 16
RETENTION_S = 2 * CLOCK_TOLERANCE_S
"""How long a used token or proof is remembered beyond the last moment at which some clock would accept it.

Clocks agree with the true time to CLOCK_TOLERANCE_S, so two of them agree to twice that: a purger whose clock says
`expires_at + RETENTION_S` knows that every verifier's clock has passed `expires_at`. The gate reads its clock after it has
consumed, so a request that was held up in between is refused rather than accepted without its guard.
"""

_ROWS_REMEMBERED = 4096


@dataclass(frozen=True)
class Opening:
    """What the first round trip of a decision found: the client, whether token and proof were fresh, the answers to `then`."""

    client: Client | None
    authority: Callable[[], tuple[Authority, Left]]
    """All rows, each checked when this is called, and what is left of the quotas. Raises AuthorityRowTampered."""
    fresh_token: bool
    fresh_proof: bool
    rows: Sequence[Rows]
    policies: int = 0
    """Which activation of a set of policies is the newest; 0 for none."""


class PolicyStore:
    """Reads and writes in the caller's transaction; checks every authority row's MAC before anybody sees it."""

    def __init__(self, mac: RecordMac, limits: Limits | None = None) -> None:
        """`limits`: those of clients and voices for which no others are set."""
        self._mac = mac
        self._limits = limits or Limits()
        self._checked: set[bytes] = set()

    def open(self, transaction: Transaction, request: Request, *then: Statement) -> Opening:
        """The whole first half of a decision in one round trip: durable from here on, authority rows, guards, use, and `then`.

        Authority is one query: the client with this certificate, the voice, and the voice's consent or else the one named.
        Raises AuthorityRowTampered. A transaction that is rolled back used up neither token nor proof nor quota.
        """
        named = {"x5t_s256": request.caller, "voice_id": request.voice, "consent_id": request.consent}
        limited = named | {"everyone": EVERYONE, "voice_name": None if request.voice is None else str(request.voice)}
        spend = self.spend(request.caller, request.voice, request.now, requests=1, characters=request.characters)
        begin: list[Statement] = [(CALLED_BY, named), (DURABLE_AS, named)]
        if request.token is not None:
            begin = [within(request.token.tenant)]
        answers = send(transaction, *begin, (AUTHORITY, named), uses_up(request), (LIMITS, limited), spend, *then)
        authority, [consumed], limits, used, *rows = answers[len(begin) :]
        fresh = (bool(consumed[0]), bool(consumed[1]))
        if not authority:
            return Opening(None, lambda: (Authority(None, None, None), _NOTHING_LEFT), *fresh, rows)
        [row], voices, consents = authority, len(client.c), len(client.c) + len(voice.c)
        *newest, policies = row[-4:]
        caller = self._read(row[:voices], Client, newest[0])

        def rest() -> tuple[Authority, Left]:
            found = Authority(
                caller, self._read(row[voices:consents], Voice, newest[1]), self._read(row[consents:-4], Consent, newest[2])
            )
            names = {Scope.CLIENT: (EVERYONE, row[0]), Scope.VOICE: (EVERYONE, str(request.voice))}
            return found, self._left(limits, used, names)

        return Opening(caller, rest, *fresh, rows, policies)

    def _left(self, limits: Rows, used: Rows, names: Mapping[Scope, tuple[str, str]]) -> Left:
        """What is left. Raises AuditUnavailable where the database counted nothing, AuthorityRowTampered."""
        if not used or used[0][0] != Scope.CLIENT:
            raise AuditUnavailable("usage")
        spent = {Scope(scope): Used(*counts) for scope, *counts in used}
        quotas = [found for row in limits if (found := self._read(row[:-1], Quota, row[-1])) and found.name in names[found.scope]]
        own = sorted(quotas, key=lambda found: found.name != EVERYONE)  # an own limit counts before everyone's
        return left(dict.fromkeys(Scope, self._limits) | {found.scope: found.limits for found in own}, spent)

    def spend(self, caller: str, voice_id: UUID | None, now: float, **amounts: int) -> Statement:
        """The statement that counts use by the client that is found by `caller`, and of this voice, in the windows of now."""
        minute, day = windows(now)
        counted = dict.fromkeys(("requests", "attempts", "characters", "milliseconds"), 0) | amounts
        return SPEND, counted | {"x5t_s256": caller, "voice_id": voice_id, "minute": minute, "day": day}

    def quota(self, transaction: Transaction, scope: Scope, name: str) -> Quota | None:
        """The limits set under this name. Raises AuthorityRowTampered."""
        return self._one(transaction, Quota, quota.c.scope == scope.value, quota.c.name == name)

    def client(self, transaction: Transaction, client_id: str) -> Client | None:
        """The client of this name. Raises AuthorityRowTampered."""
        return self._one(transaction, Client, client.c.client_id == client_id)

    def clients(self, transaction: Transaction) -> tuple[Client, ...]:
        """Every client, by name. Raises AuthorityRowTampered."""
        rows = transaction.execute(WITH_NEWEST[client].order_by(client.c.client_id))
        return tuple(found for row in rows if (found := self._read(row[:-1], Client, row[-1])))

    def consent(self, transaction: Transaction, consent_id: UUID) -> Consent | None:
        """This consent. Raises AuthorityRowTampered."""
        return self._one(transaction, Consent, consent.c.consent_id == consent_id)

    def voice(self, transaction: Transaction, tenant: str, voice_id: UUID) -> Voice | None:
        """This voice, if it is the tenant's. Raises AuthorityRowTampered."""
        return self._one(transaction, Voice, voice.c.voice_id == voice_id, voice.c.tenant == tenant)

    def voices(self, transaction: Transaction, tenant: str, limit: int = 1000) -> tuple[Voice, ...]:
        """The tenant's voices, newest first. Raises AuthorityRowTampered."""
        rows = transaction.execute(
            WITH_NEWEST[voice].where(voice.c.tenant == tenant).order_by(voice.c.created_at.desc(), voice.c.voice_id).limit(limit)
        )
        return tuple(found for row in rows if (found := self._read(row[:-1], Voice, row[-1])))

    def voice_ids(self, transaction: Transaction, *, limit: int | None = None, **of: object) -> tuple[UUID, ...]:
        """Ids of voices whose rows say so (`tenant=`, `consent_id=`), MACs unchecked: newest first; who erases misses none."""
        rows = select(voice.c.voice_id).filter_by(**of).order_by(voice.c.created_at.desc(), voice.c.voice_id)
        return tuple(transaction.scalars(rows.limit(limit)))

    def insert(self, transaction: Transaction, value: Value) -> None:
        """Write a new row. Raises RowChanged if there is one with this key, KeyUsedOtherwise."""
        table, key, _ = _KINDS[type(value)]
        if isinstance(value, Client):
            require_one_use(transaction, value)
        if not new(transaction, table, self._columns(value)):
            raise RowChanged(f"{table.name}: exists")
        if isinstance(value, Client | Consent):  # a voice goes with its key
            unsent.note(transaction, table.name, str(getattr(value, key[0])), value.row_version)

    def swap(self, transaction: Transaction, old: AuthorityRow, new: AuthorityRow) -> AuthorityRow:
        """Replace `old` by `new`, with the next row version; returns what was written.

        Raises RowChanged if `old` is not the row of now, KeyUsedOtherwise, and AuthorityRowTampered for one put back: to write upon
        it would make it the newest.
        """
        new = replace(new, row_version=old.row_version + 1)
        if isinstance(old, Client) and isinstance(new, Client) and new.jkt != old.jkt:
            require_one_use(transaction, new)
        table, key, _ = _KINDS[type(old)]
        current = and_(*(table.c[name] == getattr(old, name) for name in key), table.c.row_version == old.row_version)
        written = update(table).where(current).values(**self._columns(new)).returning(table.c[key[0]])
        if kept(transaction, written, table) is None:
            raise RowChanged(f"{table.name}: changed meanwhile")
        names = [str(getattr(old, name)) for name in key]
        # Looked up after the row is ours: whoever changed it before us has committed by then.
        if unsent.newest(transaction, table.name, "/".join(names)) > old.row_version:
            raise AuthorityRowTampered(f"{table.name}: put back")
        list_change(transaction, table, names, new.row_version)
        if table.name in unsent.TABLES:
            unsent.note(transaction, table.name, str(getattr(old, key[0])), new.row_version)
        return new

    def voice_anywhere(self, transaction: Transaction, voice_id: UUID) -> Voice | None:
        """This voice, whoever's it is: for the other site, which asks by key. Raises AuthorityRowTampered."""
        return self._one(transaction, Voice, voice.c.voice_id == voice_id)

    def take(self, transaction: Transaction, value: Client | Consent | Voice) -> None:
        """Write a row as another site has it, at the row version that it has there, under this site's MAC. The caller read the
        present row in this transaction and found it older. Raises RowChanged if it was changed meanwhile, KeyUsedOtherwise."""
        if isinstance(value, Client):
            require_one_use(transaction, value)
        table, key, _ = _KINDS[type(value)]
        row = self._columns(value)
        older = table.c.row_version <= value.row_version
        statement = insert(table).values(row).on_conflict_do_update(index_elements=key, set_=row, where=older)
        if kept(transaction, statement.returning(table.c[key[0]]), table) is None:
            raise RowChanged(f"{table.name}: changed meanwhile")
        list_change(transaction, table, [str(getattr(value, name)) for name in key], value.row_version)

    def forget_voice(self, transaction: Transaction, voice_id: UUID) -> None:
        """Delete the row of a voice that was erased. Idempotent."""
        transaction.execute(delete(voice).where(voice.c.voice_id == voice_id))
        for counted in (usage, quota):
            transaction.execute(delete(counted).where(counted.c.scope == Scope.VOICE.value, counted.c.name == str(voice_id)))
        transaction.execute(delete(used_recording).where(used_recording.c.voice_id == voice_id))
        list_change(transaction, voice, [str(voice_id)], _FORGOTTEN)

    def use_nonce(self, transaction: Transaction, kind: str, nonce: UUID, *, until: float) -> bool:
        """Use the liveness nonce up as what `kind` says, and remember that `until` then; False if it was used before."""
        return new(transaction, used_token, {"iss": kind, "jti": str(nonce), "expires_at": moment(until)})

    def use_approval(self, transaction: Transaction, approval: UUID) -> bool:
        """Use a second client's word up, for ever; False if it was used before."""
        return new(transaction, authority_change, {"kind": APPROVAL, "key": str(approval), "row_version": _FORGOTTEN})

    def use_recording(self, transaction: Transaction, voice_id: UUID, digest: bytes) -> bool:
        """Use the recording with this SHA-256 up for the voice, for as long as there is the voice; False if it was used before.

        What is kept is a MAC: who has the database and a recording cannot tell whether it was sent.
        """
        fingerprint = self._mac.make(used_recording.name, voice_id, digest)
        return new(transaction, used_recording, {"voice_id": voice_id, "fingerprint": fingerprint})

    def consume_proof(self, transaction: Transaction, proof: VerifiedProof) -> bool:
        """Use the proof up; False if it was used before."""
        return transaction.execute(CONSUME_PROOF, proof_guard(proof)).first() is not None

    def one_time(self, transaction: Transaction, kind: type[OneTime], digest: str) -> OneTime | None:
        """What the one-time secret with this SHA-256 is good for. Raises AuthorityRowTampered."""
        table = _KINDS[kind][0]
        row = transaction.execute(select(table).where(table.c.secret_sha256 == digest)).one_or_none()
        return None if row is None else self._read(row, kind)

    def use_up(self, transaction: Transaction, value: OneTime) -> bool:
        """Use a one-time secret up, for ever; False if it was used before."""
        return new(transaction, authority_change, _used_row(value))

    def used(self, transaction: Transaction, value: OneTime) -> bool:
        """Whether a one-time secret was used."""
        return transaction.scalar(select(authority_change.c.row_version).filter_by(**_used_row(value))) is not None

    def purge(self, transaction: Transaction, now: float) -> int:
        """Forget used tokens and proofs, and one-time secrets, that no clock would accept any more; returns how many."""
        before, guards = moment(now - RETENTION_S), (used_token, used_proof, upload_ticket, browser_invitation)
        return sum(transaction.execute(delete(table).where(table.c.expires_at < before)).rowcount for table in guards)

    def _one(self, transaction: Transaction, kind: type[AuthorityRow], *where: ColumnElement[bool]) -> AuthorityRow | None:
        """The row that this is true of, compared with its newest version. Raises AuthorityRowTampered."""
        row = transaction.execute(WITH_NEWEST[_KINDS[kind][0]].where(*where)).one_or_none()
        return None if row is None else self._read(row[:-1], kind, row[-1])

    def _read(self, row: Sequence[Any], kind: type[AuthorityRow], newest: int | None = None) -> AuthorityRow | None:
        """The value in these columns, in the table's order; None where an outer join found no row.

        Raises AuthorityRowTampered, also for a row that is older than `newest`: an earlier one was put back, MAC and all.
        """
        table, key, named = _KINDS[kind]
        values: dict[str, Any] = dict(zip(table.c.keys(), row, strict=True))
        if values[key[0]] is None:
            return None
        mac = bytes(values.pop("mac"))
        columns: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        try:
            found = kind(**columns | {name: words(columns[name]) for name, words in named.items()})
            self._check(mac, table.name, *found.fields())
        except (RecordTampered, ValueError):
            raise AuthorityRowTampered(table.name) from None
        if newest is not None and found.row_version < newest:
            raise AuthorityRowTampered(f"{table.name}: put back")
        return found

    def _check(self, mac: bytes, domain: str, *fields: Field) -> None:
        """Raise RecordTampered unless the MAC is the row's. One that held for exactly these bytes holds for ever, so the token is
        not asked twice; what is remembered is a digest, no part of a row."""
        digest = hashlib.sha256(mac + canonical(domain, *fields)).digest()
        if len(mac) == MAC_BYTES and digest in self._checked:
            return
        self._mac.check(mac, domain, *fields)
        if len(self._checked) >= _ROWS_REMEMBERED:
            self._checked.clear()
        self._checked.add(digest)

    def _columns(self, value: Value) -> dict[str, Any]:
        """The row of a value, with its MAC."""
        table = _KINDS[type(value)][0]
        columns = {field.name: getattr(value, field.name) for field in fields(value)}
        columns = {name: list(item) if isinstance(item, tuple) else item for name, item in columns.items()}
        columns = {name: item.value if isinstance(item, StrEnum) else item for name, item in columns.items()}
        return columns | {"mac": self._mac.make(table.name, *value.fields())}


_KINDS: dict[type, tuple[Table, tuple[str, ...], dict[str, type[StrEnum]]]] = {
    Client: (client, ("client_id",), {"state": ClientState}),
    Consent: (consent, ("consent_id",), {"state": ConsentState}),
    Voice: (voice, ("voice_id",), {"state": VoiceState}),
    Quota: (quota, ("scope", "name"), {"scope": Scope}),
    UploadTicket: (upload_ticket, ("secret_sha256",), {}),
    BrowserInvitation: (browser_invitation, ("secret_sha256",), {}),
}


def _used_row(value: UploadTicket | BrowserInvitation) -> dict[str, Any]:
    """The list's entry that says that a one-time secret was used: its row is never written again, so this is no version of it."""
    return {"kind": _KINDS[type(value)][0].name, "key": value.secret_sha256, "row_version": _FORGOTTEN}
