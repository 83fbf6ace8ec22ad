"""What a site keeps durably for hsm-sync/1, and its schedules. Every function works in the caller's transaction.

`sync_state` is one value a site, replaced by compare-and-swap; certificates and evidence are only ever added. A batch is what
one site sends the other: wrapped keys or tombstones, and the receipts that both signed over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    LargeBinary,
    Row,
    Select,
    Table,
    Text,
    Uuid,
    delete,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from keyvault.database import Database, Transaction, metadata
from keyvault.errors import RecordTampered, RowChanged
from keyvault.records import Field, RecordMac
from keyvault.sync.errors import SitesDiverged, SyncStoreUnavailable
from keyvault.sync.statement import Certificate

sync_state = Table(
    "sync_state",
    metadata,
    Column("site", Text, primary_key=True),
    Column("state", LargeBinary, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)

sync_certificate = Table(
    "sync_certificate",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("certificate", LargeBinary, nullable=False),
)

sync_evidence = Table(
    "sync_evidence",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("site", Text, nullable=False),
    Column("evidence", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

sync_batch = Table(
    "sync_batch",
    metadata,
    Column("batch", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("records", LargeBinary, nullable=False),
    Column("own_receipt", LargeBinary),
    Column("peer_receipt", LargeBinary),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("mac", LargeBinary, nullable=False),
)

key_schedule = Table(
    "key_schedule",
    metadata,
    Column("name", Text, primary_key=True),
    Column("plan", LargeBinary, nullable=False),
    Column("last_run_at", DateTime(timezone=True)),
    Column("last_reminder_at", DateTime(timezone=True)),
    Column("mac", LargeBinary, nullable=False),
)
"""`plan` is canonical JSON; the MAC covers every column."""


HEARD = UUID(int=0)
"""The one row of `sync_batch` that is no batch: the other site's newest signed status, and when it came."""


_DURABLE = text("SET LOCAL synchronous_commit = on")


@contextmanager
def lasting(database: Database) -> Iterator[Transaction]:
    """A transaction that is on disk when the block ends. Raises SyncStoreUnavailable; the outcome is unknown if that was COMMIT."""
    with reading(database) as transaction:
        transaction.execute(_DURABLE)
        yield transaction


@contextmanager
def reading(database: Database) -> Iterator[Transaction]:
    """A transaction for reading. Raises SyncStoreUnavailable."""
    try:
        with database.begin() as transaction:
            yield transaction
    except (DBAPIError, PoolTimeout) as problem:
        # The driver's message may quote the statement's values: its kind says enough.
        raise SyncStoreUnavailable(type(problem).__name__) from None


@contextmanager
def snapshot(database: Database) -> Iterator[Transaction]:
    """As `reading`: every query sees the database as it was at the first one."""
    with reading(database) as transaction:
        transaction.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        yield transaction


def summarized(transaction: Transaction) -> tuple[int, str, int, str]:
    """Keys and tombstones that both sites signed for: how many of each, and a digest of which, whatever their order."""
    keys = "SELECT count(*), bit_xor(hashtextextended(dek_id::text, row_version)) FROM wrapped_key"
    keys += " WHERE synced = row_version AND state <> 'destroyed'"
    stones = "SELECT count(*), bit_xor(hashtextextended(voice_id::text, 0)) FROM tombstone WHERE peer_erased_at IS NOT NULL"
    (held, which), (erased, voices) = (transaction.execute(text(query)).one() for query in (keys, stones))
    return held, str(which), erased, str(voices)


@dataclass(frozen=True)
class StoredBatch:
    """A batch that both sites signed. `kind` is `keys` or `tombstones`, with `-told` once the other site has our signature."""

    batch: UUID
    kind: str
    records: bytes
    own_receipt: bytes | None
    peer_receipt: bytes | None
    created_at: datetime
    mac: bytes = b""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What the MAC covers."""
        return (self.batch, self.kind, self.records, self.own_receipt, self.peer_receipt, self.created_at)


class SyncStore:
    """A site's sync state, its certificates and batches. What carries a MAC is checked before anybody sees it."""

    def __init__(self, mac: RecordMac) -> None:
        self._mac = mac

    def unchecked_state(self, transaction: Transaction, site: str) -> bytes | None:
        """The state as it lies, for naming a foreign token: never to act on."""
        row = self._state_row(transaction, site)
        return None if row is None else bytes(row.state)

    def state(self, transaction: Transaction, site: str) -> bytes | None:
        """The site's state. Raises RecordTampered."""
        row = self._state_row(transaction, site)
        if row is None:
            return None
        self._mac.check(bytes(row.mac), "sync_state", site, bytes(row.state))
        return bytes(row.state)

    def save_state(self, transaction: Transaction, site: str, state: bytes, replaces: bytes) -> None:
        """Compare and swap, by the SHA-256 of what stands there (empty: nothing). Raises RowChanged."""
        values = {"site": site, "state": state, "mac": self._mac.make("sync_state", site, state)}
        c = sync_state.c
        first = upsert(sync_state).values(values).on_conflict_do_nothing().returning(c.site)
        unchanged = (c.site == site) & (func.sha256(c.state) == replaces)
        following = update(sync_state).where(unchanged).values(values).returning(c.site)
        if transaction.execute(following if replaces else first).one_or_none() is None:
            raise RowChanged(f"site {site}'s sync state was changed by another process")

    def file_certificate(self, transaction: Transaction, epoch: int, certificate: bytes, head: bytes) -> None:
        """Keep an epoch's certificate for ever; the first one stays. Raises SitesDiverged where the filed one has another head."""
        values = {"epoch": epoch, "certificate": certificate}
        transaction.execute(upsert(sync_certificate).values(values).on_conflict_do_nothing())
        filed = self.certificates(transaction, epoch - 1)[0]
        if filed != certificate and Certificate.decode(filed).head != head:
            raise SitesDiverged(f"another certificate of epoch {epoch} is filed here")

    def certificates(self, transaction: Transaction, after: int = 0) -> list[bytes]:
        """Every certificate of the epochs above `after`, in order."""
        c = sync_certificate.c
        query = select(c.certificate).where(c.epoch > after).order_by(c.epoch)
        return [bytes(row) for row in transaction.scalars(query)]

    def file_evidence(self, transaction: Transaction, site: str, evidence: bytes, now: datetime) -> None:
        """Keep proof that a site's HSM signed two histories. Idempotent."""
        values = {"digest": sha256(evidence).digest(), "site": site, "evidence": evidence, "created_at": now}
        transaction.execute(upsert(sync_evidence).values(values).on_conflict_do_nothing())

    def evidence(self, transaction: Transaction) -> list[bytes]:
        """Every proof that is filed here, oldest first."""
        return [bytes(row) for row in transaction.scalars(select(sync_evidence.c.evidence).order_by(sync_evidence.c.created_at))]

    def keep_heard(self, transaction: Transaction, status: bytes, now: datetime) -> None:
        """Remember the other site's signed status and when it was heard."""
        transaction.execute(delete(sync_batch).where(sync_batch.c.batch == HEARD))
        self.add_batch(transaction, StoredBatch(HEARD, "heard", status, None, None, now))

    def heard(self, transaction: Transaction) -> tuple[bytes, datetime] | None:
        """The other site's newest signed status and when it was heard; None for never. Raises RecordTampered."""
        found = self.batch(transaction, HEARD)
        return None if found is None else (found.records, found.created_at)

    def add_batch(self, transaction: Transaction, batch: StoredBatch) -> None:
        """Keep it, with its MAC; one that is there stays."""
        transaction.execute(upsert(sync_batch).values(self._sealed(batch)).on_conflict_do_nothing())

    def batch(self, transaction: Transaction, batch: UUID) -> StoredBatch | None:
        """Raises RecordTampered."""
        row = transaction.execute(select(sync_batch).where(sync_batch.c.batch == batch)).one_or_none()
        return None if row is None else self._batch(row)

    def untold_batches(self, transaction: Transaction) -> dict[UUID, StoredBatch | None]:
        """Batches that this site signed last and whose signature the other site has not confirmed, oldest first; None for one
        that does not carry its MAC."""
        return self._readable(transaction, select(sync_batch).where(sync_batch.c.kind == "keys").order_by(sync_batch.c.created_at))

    def told_batch(self, transaction: Transaction, batch: StoredBatch) -> None:
        """The other site has our signature."""
        told = replace(batch, kind=f"{batch.kind}-told")
        transaction.execute(update(sync_batch).where(sync_batch.c.batch == batch.batch).values(self._sealed(told)))

    def told_keys(self, transaction: Transaction, most: int, *, after: UUID) -> dict[UUID, StoredBatch | None]:
        """At most `most` batches of keys whose signatures both sites have, in the order of their ids, above that one; None for one
        that does not carry its MAC."""
        c = sync_batch.c
        return self._readable(
            transaction, select(sync_batch).where((c.kind == "keys-told") & (c.batch > after)).order_by(c.batch).limit(most)
        )

    def _readable(self, transaction: Transaction, query: Select[Any]) -> dict[UUID, StoredBatch | None]:
        found: dict[UUID, StoredBatch | None] = {}
        for row in transaction.execute(query):
            try:
                found[row.batch] = self._batch(row)
            except RecordTampered:
                found[row.batch] = None
        return found

    def remove_batches(self, transaction: Transaction, batches: Sequence[UUID]) -> None:
        """Forget these batches and their receipts."""
        transaction.execute(delete(sync_batch).where(sync_batch.c.batch.in_(batches)))

    def _state_row(self, transaction: Transaction, site: str) -> Row[Any] | None:
        return transaction.execute(select(sync_state).where(sync_state.c.site == site)).one_or_none()

    def _sealed(self, batch: StoredBatch) -> dict[str, Any]:
        return {**vars(batch), "mac": self._mac.make("sync_batch", *batch.fields)}

    def _batch(self, row: Row[Any]) -> StoredBatch:
        own, peer = (None if value is None else bytes(value) for value in (row.own_receipt, row.peer_receipt))
        batch = StoredBatch(row.batch, row.kind, bytes(row.records), own, peer, row.created_at, bytes(row.mac))
        self._mac.check(batch.mac, "sync_batch", *batch.fields)
        return batch


class ScheduleStore:
    """The schedules of keys, by name. Rows go out as they lie: whoever uses one checks its MAC first."""

    def schedules(self, transaction: Transaction) -> list[ScheduleRow]:
        """Every schedule, by name."""
        return [_schedule(row) for row in transaction.execute(select(key_schedule).order_by(key_schedule.c.name))]

    def put_schedule(self, transaction: Transaction, row: ScheduleRow, replaces: ScheduleRow | None) -> None:
        """Insert, or compare and swap what `replaces` is. Raises RowChanged; nothing is written then."""
        c, values = key_schedule.c, vars(row)
        first = upsert(key_schedule).values(values).on_conflict_do_nothing().returning(c.name)
        following = update(key_schedule).where(c.name == row.name).values(values).returning(c.name)
        if replaces is not None:
            following = following.where(c.mac == replaces.mac)
        if transaction.execute(first if replaces is None else following).one_or_none() is None:
            raise RowChanged(f"the schedule {row.name!r} was changed by another transaction")

    def remove_schedule(self, transaction: Transaction, name: str) -> bool:
        """Delete it; False if there is none."""
        return transaction.execute(delete(key_schedule).where(key_schedule.c.name == name)).rowcount == 1


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule as stored; `plan` is canonical JSON."""

    name: str
    plan: bytes
    last_run_at: datetime | None = None
    last_reminder_at: datetime | None = None
    mac: bytes = b""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What the MAC covers."""
        return (self.name, self.plan, self.last_run_at, self.last_reminder_at)


def _schedule(row: Row[Any]) -> ScheduleRow:
    return ScheduleRow(row.name, bytes(row.plan), row.last_run_at, row.last_reminder_at, bytes(row.mac))
