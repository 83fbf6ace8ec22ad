"""The tables of the key vault. Every function works inside the caller's transaction, and none commits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    Row,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    cast,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import IntegrityError

from keyvault.database import Transaction, metadata
from keyvault.errors import RecordTampered, RowChanged
from keyvault.hsm import RingMaster
from keyvault.records import KeyRef, Move, RingVersion, Tombstone, WrappedKey, canonical
from keyvault.states import KeyState

ring_version = Table(
    "ring_version",
    metadata,
    Column("ring", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("destroy_at", DateTime(timezone=True)),
    Column("reason", Text, nullable=False),
    Column("row_version", Integer, nullable=False),
    Column("mac", LargeBinary, nullable=False),
    Column("peer_destroy_at", DateTime(timezone=True)),
)

wrapped_key = Table(
    "wrapped_key",
    metadata,
    Column("dek_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("voice_id", Uuid, nullable=False),
    Column("version", Integer, nullable=False),
    Column("ring", Text, nullable=False),
    Column("ring_version", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("first_ring_version", Integer, nullable=False),
    Column("synced", Integer, nullable=False),
    Column("row_version", Integer, nullable=False),
    Column("mac", LargeBinary, nullable=False),
    UniqueConstraint("voice_id", "version"),
)
# What a re-wrap still has to do, page by page; and what no other site has vouched for yet.
Index("ix_wrapped_key_ring", wrapped_key.c.ring, wrapped_key.c.ring_version, wrapped_key.c.dek_id)
Index("ix_wrapped_key_unsynced", wrapped_key.c.dek_id, postgresql_where=wrapped_key.c.synced != wrapped_key.c.row_version)

tombstone = Table(
    "tombstone",
    metadata,
    Column("voice_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("dek_ids", ARRAY(Uuid), nullable=False),
    Column("ring", Text, nullable=False),
    Column("first_ring_version", Integer, nullable=False),
    Column("last_ring_version", Integer, nullable=False),
    Column("erased_at", DateTime(timezone=True), nullable=False),
    Column("peer_erased_at", DateTime(timezone=True)),
    Column("shredded_at", DateTime(timezone=True)),
    Column("row_version", Integer, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)


class KeyStore:
    """Wrapped keys and ring versions. Rows go out as they lie: whoever uses one checks its MAC first."""

    def add_key(self, transaction: Transaction, key: WrappedKey) -> None:
        """Insert a new version. Raises RowChanged if this voice has one of that number: the transaction is then void."""
        _insert(transaction, wrapped_key, _key_row(key))

    def key(self, transaction: Transaction, dek_id: UUID) -> WrappedKey | None:
        """The key of this id."""
        row = transaction.execute(select(wrapped_key).where(wrapped_key.c.dek_id == dek_id)).one_or_none()
        return None if row is None else _key(row)

    def newest_key(self, transaction: Transaction, voice: UUID) -> WrappedKey | None:
        """The voice's highest version, in whatever state it is."""
        query = select(wrapped_key).where(wrapped_key.c.voice_id == voice).order_by(wrapped_key.c.version.desc()).limit(1)
        row = transaction.execute(query).one_or_none()
        return None if row is None else _key(row)

    def key_and_ring(
        self, transaction: Transaction, *, dek_id: UUID | None = None, voice: UUID | None = None
    ) -> tuple[WrappedKey, RingVersion | None] | None:
        """In one query: the key of this id, or the voice's highest version, and the ring version that wraps it."""
        c = wrapped_key.c
        wanted = c.dek_id == dek_id if voice is None else c.voice_id == voice
        query = _KEY_AND_RING.where(wanted).order_by(c.version.desc()).limit(1)
        row = transaction.execute(query).one_or_none()
        return None if row is None else (_key(row), None if row.of_ring is None else _ring(row, "of_"))

    def replace_key(self, transaction: Transaction, old: WrappedKey, new: WrappedKey) -> None:
        """Compare and swap: `new` stands only if the row is still `old`. Raises RowChanged; nothing is written then."""
        c = wrapped_key.c
        unchanged = (c.dek_id == old.ref.id) & (c.row_version == old.row_version) & (c.mac == old.mac)
        if transaction.execute(update(wrapped_key).where(unchanged).values(_key_row(new))).rowcount != 1:
            raise RowChanged(f"key {old.ref.id} was changed by another transaction")

    def keys_under(self, transaction: Transaction, master: RingMaster, first: UUID, last: UUID, limit: int) -> list[WrappedKey]:
        """A page of the keys that this master wraps, by id from `first` to `last`, both in it.

        A state that is none reads as DESTROYED: its MAC does not hold.
        """
        c = wrapped_key.c
        under = (c.ring == master.ring) & (c.ring_version == master.version) & c.dek_id.between(first, last)
        return [
            _key(row, lenient=True) for row in transaction.execute(select(wrapped_key).where(under).order_by(c.dek_id).limit(limit))
        ]

    def move_keys(self, transaction: Transaction, target: RingMaster, moves: Sequence[Move]) -> int:
        """Compare and swap of many in one statement: only what wraps a key changes, and nothing of whom it is.

        Returns how many still carried the MAC of `old`, which covers all of the row; the others stay as somebody left them.
        """
        values = {
            "target": target.version,
            "ids": "{" + ",".join([str(move.old.ref.id) for move in moves]) + "}",
            "old_macs": _bytea_array([move.old.mac for move in moves]),
            "blobs": _bytea_array([move.blob for move in moves]),
            "macs": _bytea_array([move.mac for move in moves]),
        }
        return transaction.execute(_MOVE_KEYS, values).rowcount

    def references(self, transaction: Transaction, ring: str) -> dict[int, int]:
        """How many stored keys each of the ring's versions wraps, without those that wrap none."""
        c = wrapped_key.c
        counted = select(c.ring_version, func.count().label("held")).where(c.ring == ring).group_by(c.ring_version)
        return {row.ring_version: row.held for row in transaction.execute(counted)}

    def key_page(self, transaction: Transaction, limit: int, *, after: UUID, unsynced: bool = False) -> list[WrappedKey]:
        """At most `limit` keys in the order of their ids, above that one; `unsynced` are those that wait for a receipt."""
        c = wrapped_key.c
        query = select(wrapped_key).where(c.dek_id > after).order_by(c.dek_id).limit(limit)
        return [_key(row) for row in transaction.execute(query.where(c.synced != c.row_version) if unsynced else query)]

    def rings(self, transaction: Transaction) -> list[str]:
        """The names of every ring that has a version."""
        return list(transaction.scalars(select(ring_version.c.ring).distinct().order_by(ring_version.c.ring)))

    def masters(self, transaction: Transaction) -> list[RingMaster]:
        """Every master that is not destroyed, by its row alone: what a token may hold before anything can check a MAC."""
        query = select(ring_version.c.ring, ring_version.c.version).where(ring_version.c.state != KeyState.DESTROYED.value)
        return sorted(RingMaster(row.ring, row.version) for row in transaction.execute(query))

    def hold_ring_version(self, transaction: Transaction, master: RingMaster) -> RingVersion | None:
        """This version; until `transaction` ends, nobody else changes it."""
        c = ring_version.c
        query = select(ring_version).where((c.ring == master.ring) & (c.version == master.version)).with_for_update(read=True)
        row = transaction.execute(query).one_or_none()
        return None if row is None else _ring(row)

    def add_ring_version(self, transaction: Transaction, version: RingVersion) -> bool:
        """Insert a new ring version; False, and nothing is written, if its number was used before.

        It waits for another transaction that is writing the same number: afterwards `ring_versions` shows what that one wrote.
        """
        written = upsert(ring_version).values(_ring_row(version)).on_conflict_do_nothing().returning(ring_version.c.version)
        return transaction.execute(written).one_or_none() is not None

    def ring_versions(self, transaction: Transaction, ring: str) -> list[RingVersion]:
        """Every version of the ring, oldest first."""
        query = select(ring_version).where(ring_version.c.ring == ring).order_by(ring_version.c.version)
        return [_ring(row) for row in transaction.execute(query)]

    def replace_ring_version(self, transaction: Transaction, old: RingVersion, new: RingVersion) -> None:
        """Compare and swap: `new` stands only if the row is still `old`. Raises RowChanged; nothing is written then."""
        c = ring_version.c
        unchanged = (c.ring == old.ring) & (c.version == old.version) & (c.row_version == old.row_version) & (c.mac == old.mac)
        if transaction.execute(update(ring_version).where(unchanged).values(_ring_row(new))).rowcount != 1:
            raise RowChanged(f"ring {old.ring} version {old.version} was changed by another transaction")


class TombstoneStore:
    """What is left of erased voices, and the removal of their keys. Rows go out as they lie: check a tombstone's MAC first."""

    def lock_voice(self, transaction: Transaction, voice: UUID) -> None:
        """Wait for whoever erases, seals again or takes over this voice, and keep others waiting until `transaction` ends. What
        they committed is visible to the next statement, also where no row of the voice is left to lock."""
        number = int.from_bytes(sha256(canonical("voice-lock", voice)).digest()[:8], "big", signed=True)
        transaction.execute(select(func.pg_advisory_xact_lock(number)))

    def keys_of(self, transaction: Transaction, voice: UUID) -> list[WrappedKey]:
        """Every version of the voice's key, oldest first. A state that is none reads as DESTROYED: its MAC does not hold."""
        rows = transaction.execute(select(wrapped_key).where(wrapped_key.c.voice_id == voice).order_by(wrapped_key.c.version))
        return [_key(row, lenient=True) for row in rows]

    def erase_keys(self, transaction: Transaction, voice: UUID) -> int:
        """Delete every version of the voice's key, whatever its row says; returns how many there were."""
        return transaction.execute(delete(wrapped_key).where(wrapped_key.c.voice_id == voice)).rowcount

    def tombstone(self, transaction: Transaction, voice: UUID) -> Tombstone | None:
        """The voice's tombstone; None for a voice that was not erased here."""
        row = transaction.execute(select(tombstone).where(tombstone.c.voice_id == voice)).one_or_none()
        return None if row is None else _tombstone(row)

    def untold(self, transaction: Transaction, limit: int = 500) -> list[Tombstone]:
        """Tombstones that the other site has not confirmed, oldest first."""
        query = select(tombstone).where(tombstone.c.peer_erased_at.is_(None)).order_by(tombstone.c.erased_at).limit(limit)
        return [_tombstone(row) for row in transaction.execute(query)]

    def page(self, transaction: Transaction, limit: int, *, after: UUID) -> list[Tombstone]:
        """At most `limit` tombstones in the order of their voices, above that one."""
        query = select(tombstone).where(tombstone.c.voice_id > after).order_by(tombstone.c.voice_id).limit(limit)
        return [_tombstone(row) for row in transaction.execute(query)]

    def coverages(self, transaction: Transaction) -> list[tuple[str, int, int]]:
        """Which ring and versions, first to last, keep voices from being shredded: each once, as the rows say it."""
        c = tombstone.c
        query = select(c.ring, c.first_ring_version, c.last_ring_version).filter_by(shredded_at=None).distinct()
        return [(row[0], row[1], row[2]) for row in transaction.execute(query)]

    def unshredded(self, transaction: Transaction, ring: str, first: int, last: int) -> list[Tombstone]:
        """Tombstones with this coverage of voices that are not shredded."""
        covered = {"ring": ring, "first_ring_version": first, "last_ring_version": last}
        return [_tombstone(row) for row in transaction.execute(select(tombstone).filter_by(shredded_at=None, **covered))]

    def tombstones_of(self, transaction: Transaction, deks: Sequence[UUID]) -> list[Tombstone]:
        """Tombstones of the voices that had one of these key versions."""
        found = transaction.execute(select(tombstone).where(tombstone.c.dek_ids.bool_op("&&")(cast(deks, ARRAY(Uuid)))))
        return [_tombstone(row) for row in found]

    def add_tombstone(self, transaction: Transaction, stone: Tombstone) -> None:
        """Insert. Raises RowChanged if this voice has one: the transaction is then void."""
        _insert(transaction, tombstone, _tombstone_row(stone))

    def replace_tombstone(self, transaction: Transaction, old: Tombstone, new: Tombstone) -> None:
        """Compare and swap: `new` stands only if the row is still `old`. Raises RowChanged; nothing is written then."""
        c = tombstone.c
        unchanged = (c.voice_id == old.voice) & (c.row_version == old.row_version) & (c.mac == old.mac)
        if transaction.execute(update(tombstone).where(unchanged).values(_tombstone_row(new))).rowcount != 1:
            raise RowChanged(f"the tombstone of {old.voice} was changed by another transaction")


def _insert(transaction: Transaction, table: Table, row: dict[str, Any]) -> None:
    try:
        kept = transaction.execute(insert(table).values(row).returning(*table.primary_key.columns)).all()
    except IntegrityError as error:
        raise RowChanged(f"{table.name} already has this version") from error
    if len(kept) != 1:  # a trigger or rule dropped it
        raise RowChanged(f"{table.name}: the database did not keep the new row")


def _key_row(key: WrappedKey) -> dict[str, Any]:
    return {
        "dek_id": key.ref.id,
        "tenant": key.tenant,
        "voice_id": key.voice,
        "version": key.ref.version,
        "ring": key.ref.ring,
        "ring_version": key.ref.ring_version,
        "state": key.state.value,
        "blob": key.blob,
        "created_at": key.created_at,
        "first_ring_version": key.first_ring_version,
        "synced": key.synced,
        "row_version": key.row_version,
        "mac": key.mac,
    }


def _key(row: Row[Any], *, lenient: bool = False) -> WrappedKey:
    return WrappedKey(
        ref=KeyRef(row.dek_id, row.version, row.ring, row.ring_version),
        tenant=row.tenant,
        voice=row.voice_id,
        state=KeyState.DESTROYED if lenient and row.state not in set(KeyState) else _state(row.state),
        blob=bytes(row.blob),
        created_at=row.created_at,
        first_ring_version=row.first_ring_version,
        synced=row.synced,
        row_version=row.row_version,
        mac=bytes(row.mac),
    )


# Arrays as their text: what the driver does for each value of a list costs more than the statement.
_MOVE_KEYS = text("""
    UPDATE wrapped_key AS k
    SET ring_version = :target, blob = new.blob, row_version = k.row_version + 1, mac = new.mac
    FROM unnest(CAST(:ids AS uuid[]), CAST(:old_macs AS bytea[]), CAST(:blobs AS bytea[]), CAST(:macs AS bytea[]))
        AS new(dek_id, old_mac, blob, mac)
    WHERE k.dek_id = new.dek_id AND k.mac = new.old_mac
""")


def _bytea_array(values: Sequence[bytes]) -> str:
    return "{" + ",".join([f'"\\\\x{value.hex()}"' for value in values]) + "}"


def _state(name: str) -> KeyState:
    try:
        return KeyState(name)
    except ValueError:
        raise RecordTampered("a stored key state is none that Glottis writes") from None


def _ring(row: Row[Any], prefix: str = "") -> RingVersion:
    value = {name: getattr(row, prefix + name) for name in (part.name for part in ring_version.c)}
    return RingVersion(**value | {"state": _state(value["state"]), "mac": bytes(value["mac"])})


_UNDER = (wrapped_key.c.ring == ring_version.c.ring) & (wrapped_key.c.ring_version == ring_version.c.version)
_KEY_AND_RING = select(wrapped_key, *(part.label(f"of_{part.name}") for part in ring_version.c)).select_from(
    wrapped_key.outerjoin(ring_version, _UNDER)
)


def _ring_row(version: RingVersion) -> dict[str, Any]:
    return vars(version) | {"state": version.state.value}


def _tombstone(row: Row[Any]) -> Tombstone:
    values = dict(row._mapping) | {"dek_ids": tuple(row.dek_ids), "mac": bytes(row.mac)}
    return Tombstone(voice=values.pop("voice_id"), **values)


def _tombstone_row(stone: Tombstone) -> dict[str, Any]:
    values = {field.name: getattr(stone, field.name) for field in fields(stone)}
    return values | {"voice_id": values.pop("voice"), "dek_ids": list(stone.dek_ids)}
