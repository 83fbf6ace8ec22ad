"""Receipts that later ones replaced: they go, so that what a site keeps grows with its voices and not with its re-wraps.

A batch's receipts are both HSMs' word that both stores held exactly these keys. They stand for as long as anything rests on
them. A batch goes once each of its keys was signed for again by both sites, was followed by a newer version of the voice's key
that both signed for, or belongs to a voice that both sites erased; each by a row under this site's MAC. A key that is gone for
no such reason keeps its receipt, as evidence that it was there. Batches of tombstones stay for ever: they prove erasures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from keyvault.database import Transaction
from keyvault.errors import RecordTampered
from keyvault.events import KeyEvent
from keyvault.records import RecordMac, Tombstone, WrappedKey
from keyvault.states import KeyState
from keyvault.store import KeyStore, TombstoneStore
from keyvault.sync.durable import SiteParts
from keyvault.sync.messages import Closing, SyncedRow
from keyvault.sync.store import StoredBatch, SyncStore, lasting

FIRST = UUID(int=0)
PAGE = 200


@dataclass(frozen=True)
class Pruned:
    """What one look found: how many batches went, which do not carry their MAC (those stay), and where to go on; None at the
    end."""

    removed: int
    tampered: tuple[UUID, ...]
    after: UUID | None


class Pruning:
    """One site's pruning, page by page. May be stopped anywhere, and run while keys are sent and taken."""

    def __init__(self, parts: SiteParts) -> None:
        self._parts, self._mac = parts, RecordMac(parts.hsm)
        self._keys, self._stones, self._store = KeyStore(), TombstoneStore(), SyncStore(self._mac)

    def prune(self, after: UUID = FIRST, most: int = PAGE) -> Pruned:
        """Look at the next batches above that id. On record, or nothing goes. Raises SyncStoreUnavailable, HsmUnavailable."""
        with lasting(self._parts.database) as transaction:
            page = self._store.told_keys(transaction, most, after=after)
            replaced = self._replaced(transaction, [stored for stored in page.values() if stored is not None])
            if replaced:
                self._store.remove_batches(transaction, replaced)
                facts: dict[str, str | int] = {"site": self._parts.name, "batches": len(replaced)}
                self._parts.recorder.record(transaction, KeyEvent("sync.receipts_pruned", facts))
        tampered = tuple(batch for batch, stored in page.items() if stored is None)
        return Pruned(len(replaced), tampered, max(page) if len(page) == most else None)

    def _replaced(self, transaction: Transaction, page: Sequence[StoredBatch]) -> list[UUID]:
        """The batches on which nothing rests any more."""
        missing: dict[UUID, set[UUID]] = {}
        for stored in page:
            lacking: set[UUID] = set()
            for row in Closing.decode(stored.records).rows:
                key = self._keys.key(transaction, row.record.dek_id)
                if key is None:
                    lacking.add(row.record.dek_id)
                elif not self._signed_since(transaction, key, row):
                    break
            else:
                missing[stored.batch] = lacking
        erased = self._erased(transaction, sorted(set().union(*missing.values())))
        return [batch for batch, lacking in missing.items() if lacking <= erased]

    def _signed_since(self, transaction: Transaction, key: WrappedKey, row: SyncedRow) -> bool:
        """Whether both sites signed for this key in a later row, or for a newer version of the voice's key."""
        if not self._holds(key):
            return False
        if key.state is not KeyState.DESTROYED:
            return key.synced > row.row_version
        newest = self._keys.newest_key(transaction, key.voice)
        if newest is None or newest.ref.version <= key.ref.version or not self._holds(newest):
            return False
        return newest.state is not KeyState.DESTROYED and newest.synced == newest.row_version

    def _erased(self, transaction: Transaction, deks: Sequence[UUID]) -> set[UUID]:
        """Those of voices that both sites erased."""
        stones = self._stones.tombstones_of(transaction, deks) if deks else []
        return {dek for stone in stones if stone.peer_erased_at is not None and self._holds(stone) for dek in stone.dek_ids}

    def _holds(self, row: WrappedKey | Tombstone) -> bool:
        try:
            self._mac.check(row.mac, row.DOMAIN, *row.fields)
        except RecordTampered:
            return False
        return True
