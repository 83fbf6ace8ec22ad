"""What the sites send each other beside the protocol: batches of keys and tombstones, and the answers. Only their own form."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Self
from uuid import UUID

from keyvault.records import KeyRef, Tombstone, WrappedKey, canonical
from keyvault.states import KeyState
from keyvault.sync.statement import DekRecord
from keyvault.sync.wire import Statement, require

MOST = 100
"""Keys, or tombstones, of one batch."""


@dataclass(frozen=True)
class KeyRow(Statement):
    """One voice's wrapped key as the writing site holds it. `tag` is the CMAC that its HSM computed under the unwrapped key, for
    this batch alone; `rows` are whatever else of the voice travels with it."""

    DOMAIN = "hsm-sync/1/key-row"
    dek_id: UUID
    tenant: str
    voice: UUID
    version: int
    ring: str
    ring_version: int
    state: KeyState
    blob: bytes
    created_at: datetime
    first_ring_version: int
    row_version: int
    tag: bytes
    rows: bytes

    def __post_init__(self) -> None:
        require(len(self.tag) == 16, "a CMAC has 16 bytes")
        require(min(self.version, self.ring_version, self.first_ring_version, self.row_version) > 0, "versions count from 1")

    @classmethod
    def of(cls, key: WrappedKey, tag: bytes, rows: bytes) -> Self:
        ref = key.ref
        identity = (ref.id, key.tenant, key.voice, ref.version, ref.ring, ref.ring_version)
        return cls(*identity, key.state, key.blob, key.created_at, key.first_ring_version, key.row_version, tag, rows)

    @property
    def key(self) -> WrappedKey:
        """The row for a store, still without a MAC; no site's receipt is said to stand."""
        ref = KeyRef(self.dek_id, self.version, self.ring, self.ring_version)
        rest = (self.blob, self.created_at, self.first_ring_version, 0, self.row_version)
        return WrappedKey(ref, self.tenant, self.voice, self.state, *rest)

    @property
    def record(self) -> DekRecord:
        """What the receipts say of it."""
        return dek_record(self.key)


@dataclass(frozen=True)
class StoneRow(Statement):
    """What stays of an erased voice, as one site knows it."""

    DOMAIN = "hsm-sync/1/tombstone"
    voice: UUID
    tenant: str
    dek_ids: tuple[UUID, ...]
    ring: str
    first_ring_version: int
    last_ring_version: int
    erased_at: datetime

    @classmethod
    def of(cls, stone: Tombstone) -> Self:
        covered = (stone.ring, stone.first_ring_version, stone.last_ring_version)
        return cls(stone.voice, stone.tenant, stone.dek_ids, *covered, stone.erased_at)

    @property
    def stone(self) -> Tombstone:
        """The tombstone, still without a MAC."""
        covered = (self.ring, self.first_ring_version, self.last_ring_version)
        return Tombstone(self.voice, self.tenant, self.dek_ids, *covered, self.erased_at)


@dataclass(frozen=True)
class Batch(Statement):
    """Keys in the order of their ids, or tombstones in the order of their voices; signed as a whole by the site that sends it."""

    DOMAIN = "hsm-sync/1/batch"
    cluster: str
    site: str
    batch: UUID
    keys: tuple[KeyRow, ...]
    stones: tuple[StoneRow, ...]

    def __post_init__(self) -> None:
        keys = [row.dek_id for row in self.keys]
        voices = [row.voice for row in self.stones]
        require(keys == sorted(set(keys)) and voices == sorted(set(voices)), "a batch is sorted, each row once")
        require(len(keys) <= MOST and len(voices) <= MOST, f"a batch has at most {MOST} rows of a kind")


@dataclass(frozen=True)
class RefusedRow(Statement):
    """A row that the receiving site did not take, and the code of the reason."""

    DOMAIN = "hsm-sync/1/refused-row"
    row: UUID
    code: str


@dataclass(frozen=True)
class Taken(Statement):
    """The receiving site's word, signed, once everything but `refused` is durable there: its receipt for the keys (empty if it
    took none), and its own tombstones for the voices that it has erased."""

    DOMAIN = "hsm-sync/1/taken"
    cluster: str
    site: str
    batch: UUID
    receipt: bytes
    stones: tuple[StoneRow, ...]
    refused: tuple[RefusedRow, ...]


@dataclass(frozen=True)
class SyncedRow(Statement):
    """A key and the version of its row that both sites hold."""

    DOMAIN = "hsm-sync/1/synced-row"
    record: DekRecord
    row_version: int


@dataclass(frozen=True)
class Closing(Statement):
    """The writing site's last word on a batch of keys, signed: what both receipts vouch for."""

    DOMAIN = "hsm-sync/1/closing"
    cluster: str
    site: str
    batch: UUID
    rows: tuple[SyncedRow, ...]
    receipts: tuple[bytes, ...]

    @property
    def records(self) -> tuple[DekRecord, ...]:
        return tuple(row.record for row in self.rows)


@dataclass(frozen=True)
class RowChange(Statement):
    """A row of a higher package that travels by itself: of which kind, under which key, in which version, and its exact bytes."""

    DOMAIN = "hsm-sync/1/row-change"
    kind: str
    key: str
    row_version: int
    row: bytes


@dataclass(frozen=True)
class RowChanges(Statement):
    """Rows in the order of their kinds and keys; signed as a whole by the site that sends them."""

    DOMAIN = "hsm-sync/1/row-changes"
    cluster: str
    site: str
    batch: UUID
    changes: tuple[RowChange, ...]

    def __post_init__(self) -> None:
        named = [(change.kind, change.key) for change in self.changes]
        require(named == sorted(set(named)), "rows are sorted, each once")
        require(len(named) <= MOST, f"at most {MOST} rows are sent at once")


@dataclass(frozen=True)
class RefusedChange(Statement):
    """A row that the other site did not take, and the code of the reason."""

    DOMAIN = "hsm-sync/1/refused-change"
    kind: str
    key: str
    code: str


@dataclass(frozen=True)
class RowsTaken(Statement):
    """The receiving site's word, signed, once everything but `refused` is durable there."""

    DOMAIN = "hsm-sync/1/rows-taken"
    cluster: str
    site: str
    batch: UUID
    refused: tuple[RefusedChange, ...]


@dataclass(frozen=True)
class RowsHeld(Statement):
    """What a site holds of each kind of such rows, as digests; signed by it."""

    DOMAIN = "hsm-sync/1/rows-held"
    cluster: str
    site: str
    kinds: tuple[str, ...]
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.kinds) == len(self.digests), "each kind has a digest")


@dataclass(frozen=True)
class Summary(Statement):
    """What a site holds that both have signed for: how many, and a digest of which, whatever their order."""

    DOMAIN = "hsm-sync/1/summary"
    keys: int
    keys_digest: str
    stones: int
    stones_digest: str


def dek_record(key: WrappedKey) -> DekRecord:
    """A stored key as a receipt names it: its ring as the table of both sites does."""
    ref = key.ref
    return DekRecord(ref.id, ref.version, f"ring/{ref.ring}", ref.ring_version, sha256(key.blob).digest())


def dek_proof(batch: UUID, site: str, key: WrappedKey) -> bytes:
    """What `site`'s HSM computes the CMAC of under the unwrapped key: for one key version in one batch."""
    return canonical("hsm-sync/1/dek-proof", batch, site, key.ref.id, key.ref.version)
