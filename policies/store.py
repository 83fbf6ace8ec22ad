"""Tables of clients, consents and voices, and of what was used up. The only file here that speaks SQL.

Authority rows carry a MAC made in the HSM over every column, so that writing the database is not enough to change who may
do what. Every change is a compare-and-swap on `row_version`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    bindparam,
    delete,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from keyvault.database import Database, Rows, Statement, Transaction, metadata, send
from keyvault.errors import RecordTampered
from keyvault.records import Field, RecordMac, canonical
from policies.authority import Authority, Client, ClientState, Voice, VoiceState
from policies.consent import Consent, ConsentState
from policies.errors import AuditUnavailable, AuthorityRowTampered, RowChanged
from policies.grants import CLOCK_TOLERANCE_S, VerifiedProof, VerifiedToken
from policies.proofs import PROOF_AGE_S

AuthorityRow = TypeVar("AuthorityRow", Client, Consent, Voice)


def _row_guard() -> tuple[Column[int], Column[bytes]]:
    return Column("row_version", Integer, nullable=False), Column("mac", LargeBinary, nullable=False)


client = Table(
    "client",
    metadata,
    Column("client_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("cert_sha256", Text, nullable=False, unique=True),
    Column("jkt", Text, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("state", Text, nullable=False),
    *_row_guard(),
)
consent = Table(
    "consent",
    metadata,
    Column("consent_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("purposes", ARRAY(Text), nullable=False),
    Column("territory", ARRAY(Text), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("evidence_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    *_row_guard(),
)
voice = Table(
    "voice",
    metadata,
    Column("voice_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("consent_id", Uuid, ForeignKey(consent.c.consent_id), nullable=False, index=True),
    Column("state", Text, nullable=False),
    Column("dek_id", Uuid, nullable=False),
    Column("key_version", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    *_row_guard(),
    CheckConstraint("key_version >= 1", name="key_version"),
)
used_token = Table(
    "used_token",
    metadata,
    Column("iss", Text, primary_key=True),
    Column("jti", Text, primary_key=True),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
)
used_proof = Table(
    "used_proof",
    metadata,
    Column("jkt", Text, primary_key=True),
    Column("jti", Text, primary_key=True),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
)

MAC_BYTES = 16
RETENTION_S = 2 * CLOCK_TOLERANCE_S
"""How long a used token or proof is remembered beyond the last moment at which some clock would accept it.

Clocks agree with the true time to CLOCK_TOLERANCE_S, so two of them agree to twice that: a purger whose clock says
`expires_at + RETENTION_S` knows that every verifier's clock has passed `expires_at`. The gate reads its clock after it has
consumed, so a request that was held up in between is refused rather than accepted without its guard.
"""

# Built once: putting the statement together would cost more than the database takes to answer it.
_AUTHORITY = (
    select(client, voice, consent)
    .select_from(client)
    .outerjoin(voice, voice.c.voice_id == bindparam("voice_id"))
    .outerjoin(consent, consent.c.consent_id == func.coalesce(voice.c.consent_id, bindparam("consent_id", type_=Uuid)))
    .where(client.c.cert_sha256 == bindparam("x5t_s256"))
)
_CONSUME_TOKEN = (
    insert(used_token)
    .values(iss=bindparam("iss"), jti=bindparam("token_jti"), expires_at=bindparam("token_expires_at"))
    .on_conflict_do_nothing()
    .returning(used_token.c.jti)
)
_CONSUME_PROOF = (
    insert(used_proof)
    .values(jkt=bindparam("jkt"), jti=bindparam("proof_jti"), expires_at=bindparam("proof_expires_at"))
    .on_conflict_do_nothing()
    .returning(used_proof.c.jti)
)
# Of two at once the second waits for the first to commit or not; the scalar queries run in this order, always.
_CONSUME = select(
    *(
        select(func.count()).select_from(consumed.cte(name)).scalar_subquery()
        for name, consumed in {"token_guard": _CONSUME_TOKEN, "proof_guard": _CONSUME_PROOF}.items()
    )
)
# A gate that cannot finish while the token lives has no reason to hold its locks.
_DURABLE = text("SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '5s', true)")
_ROWS_REMEMBERED = 4096


@contextmanager
def durable(database: Database) -> Iterator[Transaction]:
    """A transaction that is on disk when the block ends. Raises AuditUnavailable where the database cannot promise that.

    If the connection is lost while it commits, the outcome is unknown: the token may have been used up all the same.
    """
    with deciding(database) as transaction:
        transaction.execute(_DURABLE)
        yield transaction


@contextmanager
def deciding(database: Database) -> Iterator[Transaction]:
    """The same for a transaction that begins with `PolicyStore.open`, which makes it durable in its own first round trip."""
    try:
        with database.begin() as transaction:
            yield transaction
    except (DBAPIError, PoolTimeout) as problem:
        # The driver's message may quote the statement's values: its kind says enough.
        raise AuditUnavailable(type(problem).__name__) from None


@dataclass(frozen=True)
class Request:
    """Who asks for what: the rows that a decision needs, and what it uses up. The token endpoint has no token yet."""

    x5t_s256: str
    proof: VerifiedProof
    token: VerifiedToken | None = None
    voice: UUID | None = None
    consent: UUID | None = None


@dataclass(frozen=True)
class Opening:
    """What the first round trip of a decision found: the client, whether token and proof were fresh, the answers to `then`."""

    client: Client | None
    authority: Callable[[], Authority]
    """The client's row with the others, each checked when this is called. Raises AuthorityRowTampered."""
    fresh_token: bool
    fresh_proof: bool
    rows: Sequence[Rows]


class PolicyStore:
    """Reads and writes in the caller's transaction; checks every authority row's MAC before anybody sees it."""

    def __init__(self, mac: RecordMac) -> None:
        self._mac = mac
        self._checked: set[bytes] = set()

    def open(self, transaction: Transaction, request: Request, *then: Statement) -> Opening:
        """The whole first half of a decision in one round trip: durable from here on, authority rows, guards, and `then`.

        Authority is one query: the client with this certificate, the voice, and the voice's consent or else the one named.
        Raises AuthorityRowTampered. A transaction that is rolled back used up neither token nor proof.
        """
        named = {"x5t_s256": request.x5t_s256, "voice_id": request.voice, "consent_id": request.consent}
        guard = _proof_guard(request.proof)
        if request.token is None:
            consume: Statement = (_CONSUME_PROOF, guard)
        else:
            consume = (_CONSUME, guard | _token_guard(request.token))
        _, authority, consumed, *rows = send(transaction, (_DURABLE, {}), (_AUTHORITY, named), consume, *then)
        fresh = (True, bool(consumed)) if request.token is None else (bool(consumed[0][0]), bool(consumed[0][1]))
        if not authority:
            return Opening(None, lambda: Authority(None, None, None), *fresh, rows)
        [row], voices, consents = authority, len(client.c), len(client.c) + len(voice.c)
        caller = self._read(row[:voices], Client)
        return Opening(
            caller,
            lambda: Authority(caller, self._read(row[voices:consents], Voice), self._read(row[consents:], Consent)),
            *fresh,
            rows,
        )

    def client(self, transaction: Transaction, client_id: str) -> Client | None:
        """The client of this name. Raises AuthorityRowTampered."""
        row = transaction.execute(select(client).where(client.c.client_id == client_id)).one_or_none()
        return None if row is None else self._read(row, Client)

    def clients(self, transaction: Transaction) -> tuple[Client, ...]:
        """Every client, by name. Raises AuthorityRowTampered."""
        rows = transaction.execute(select(client).order_by(client.c.client_id))
        return tuple(found for row in rows if (found := self._read(row, Client)))

    def consent(self, transaction: Transaction, consent_id: UUID) -> Consent | None:
        """This consent. Raises AuthorityRowTampered."""
        row = transaction.execute(select(consent).where(consent.c.consent_id == consent_id)).one_or_none()
        return None if row is None else self._read(row, Consent)

    def voice(self, transaction: Transaction, tenant: str, voice_id: UUID) -> Voice | None:
        """This voice, if it is the tenant's. Raises AuthorityRowTampered."""
        row = transaction.execute(select(voice).where(voice.c.voice_id == voice_id, voice.c.tenant == tenant)).one_or_none()
        return None if row is None else self._read(row, Voice)

    def voices(self, transaction: Transaction, tenant: str, limit: int = 1000) -> tuple[Voice, ...]:
        """The tenant's voices, newest first. Raises AuthorityRowTampered."""
        rows = transaction.execute(
            select(voice).where(voice.c.tenant == tenant).order_by(voice.c.created_at.desc(), voice.c.voice_id).limit(limit)
        )
        return tuple(found for row in rows if (found := self._read(row, Voice)))

    def voice_ids(self, transaction: Transaction, *, limit: int | None = None, **of: object) -> tuple[UUID, ...]:
        """Ids of voices whose rows say so (`tenant=`, `consent_id=`), MACs unchecked: newest first; who erases misses none."""
        rows = select(voice.c.voice_id).filter_by(**of).order_by(voice.c.created_at.desc(), voice.c.voice_id)
        return tuple(transaction.scalars(rows.limit(limit)))

    def insert(self, transaction: Transaction, value: Client | Consent | Voice) -> None:
        """Write a new row. Raises RowChanged if there is one with this key."""
        table = _KINDS[type(value)][0]
        if not _new(transaction, table, self._columns(value)):
            raise RowChanged(f"{table.name}: exists")

    def swap(self, transaction: Transaction, old: AuthorityRow, new: AuthorityRow) -> AuthorityRow:
        """Replace `old` by `new`, with the next row version; returns what was written.

        Raises RowChanged if `old` is not the row of now.
        """
        new = replace(new, row_version=old.row_version + 1)
        table, key, _ = _KINDS[type(old)]
        current = (table.c[key] == getattr(old, key)) & (table.c.row_version == old.row_version)
        try:
            written = transaction.execute(update(table).where(current).values(**self._columns(new)))
        except IntegrityError:
            raise RowChanged(f"{table.name}: taken by another row") from None
        if written.rowcount != 1:
            raise RowChanged(f"{table.name}: changed meanwhile")
        return new

    def voice_anywhere(self, transaction: Transaction, voice_id: UUID) -> Voice | None:
        """This voice, whoever's it is: for the other site, which asks by key. Raises AuthorityRowTampered."""
        row = transaction.execute(select(voice).where(voice.c.voice_id == voice_id)).one_or_none()
        return None if row is None else self._read(row, Voice)

    def take(self, transaction: Transaction, value: Consent | Voice) -> None:
        """Write a row as another site has it, under this site's MAC, at the row version that it has there.

        The caller read the present row in this transaction and found it older. Raises RowChanged if it was changed meanwhile.
        """
        table, key, _ = _KINDS[type(value)]
        row = self._columns(value)
        older = table.c.row_version <= value.row_version
        statement = insert(table).values(row).on_conflict_do_update(index_elements=[key], set_=row, where=older)
        if transaction.execute(statement.returning(table.c[key])).first() is None:
            raise RowChanged(f"{table.name}: changed meanwhile")

    def forget_voice(self, transaction: Transaction, voice_id: UUID) -> None:
        """Delete the row of a voice that was erased. Idempotent."""
        transaction.execute(delete(voice).where(voice.c.voice_id == voice_id))

    def consume_proof(self, transaction: Transaction, proof: VerifiedProof) -> bool:
        """Use the proof up; False if it was used before."""
        return transaction.execute(_CONSUME_PROOF, _proof_guard(proof)).first() is not None

    def purge(self, transaction: Transaction, now: float) -> int:
        """Forget used tokens and proofs that no clock would accept any more; returns how many."""
        before = _time(now - RETENTION_S)
        return sum(
            transaction.execute(delete(table).where(table.c.expires_at < before)).rowcount for table in (used_token, used_proof)
        )

    def _read(self, row: Sequence[Any], kind: type[AuthorityRow]) -> AuthorityRow | None:
        """The value in these columns, in the table's order; None where an outer join found no row. Raises AuthorityRowTampered."""
        table, key, state = _KINDS[kind]
        values: dict[str, Any] = dict(zip(table.c.keys(), row, strict=True))
        if values[key] is None:
            return None
        mac = bytes(values.pop("mac"))
        columns: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        try:
            found = kind(**columns | {"state": state(columns["state"])})
            self._check(mac, table.name, *found.fields())
        except (RecordTampered, ValueError):
            raise AuthorityRowTampered(table.name) from None
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

    def _columns(self, value: Client | Consent | Voice) -> dict[str, Any]:
        """The row of a value, with its MAC."""
        table = _KINDS[type(value)][0]
        columns = {field.name: getattr(value, field.name) for field in fields(value)}
        columns = {name: list(item) if isinstance(item, tuple) else item for name, item in columns.items()}
        return columns | {"state": value.state.value, "mac": self._mac.make(table.name, *value.fields())}


_KINDS: dict[type, tuple[Table, str, type[StrEnum]]] = {
    Client: (client, "client_id", ClientState),
    Consent: (consent, "consent_id", ConsentState),
    Voice: (voice, "voice_id", VoiceState),
}


def _new(transaction: Transaction, table: Table, row: dict[str, Any]) -> bool:
    """Insert; False if the row was there. One statement: of two at once, the second waits for the first to commit or not."""
    statement = insert(table).values(row).on_conflict_do_nothing().returning(*table.primary_key.columns)
    return transaction.execute(statement).first() is not None


def _token_guard(token: VerifiedToken) -> dict[str, Any]:
    return {"iss": token.issuer, "token_jti": token.jti, "token_expires_at": _time(token.expires_at)}


def _proof_guard(proof: VerifiedProof) -> dict[str, Any]:
    return {"jkt": proof.jkt, "proof_jti": proof.jti, "proof_expires_at": _time(proof.issued_at + PROOF_AGE_S)}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
