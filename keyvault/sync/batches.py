"""Wrapped keys and tombstones on their way to the other site, and the receipts of both: no voice waits longer than it must.

The writing site sends what the other has not signed for. The other makes it durable, opens every key and signs
(`keyvault.sync.receiving`); the writing site signs last, in the transaction that marks the rows, and then tells. Nothing needs
to be remembered before both receipts are there: what was cut off is sent again and taken again. A row that changed meanwhile
keeps waiting. Erased is stronger than any key: a voice with a tombstone is never taken again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from keyvault.database import Transaction
from keyvault.errors import KeyVaultError, RecordTampered
from keyvault.events import KeyEvent
from keyvault.hsm import RingMaster
from keyvault.records import RecordMac, Tombstone, WrappedKey
from keyvault.store import KeyStore, TombstoneStore
from keyvault.sync.errors import PeerUnavailable, StatementMalformed
from keyvault.sync.messages import (
    MOST,
    Batch,
    Closing,
    KeyRow,
    StoneRow,
    Summary,
    SyncedRow,
    Taken,
    dek_proof,
)
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import BatchPeer
from keyvault.sync.receipts import check_receipts, receipt
from keyvault.sync.receiving import FAULTS, KEYS, STONES, Envelopes, Receiving, Replica
from keyvault.sync.signatures import verify_p256
from keyvault.sync.store import StoredBatch, lasting, reading, snapshot, summarized
from keyvault.tombstones import Tombstones

_FIRST = UUID(int=0)
_MOST_BYTES = 1 << 21
"""Of rows in one batch, so that a message stays well under `wire.MAX_BYTES`."""


@dataclass
class Pumped:
    """What one run moved. `refused` names each row that was passed over, with the code of the reason."""

    keys: int = 0
    stones: int = 0
    refused: dict[UUID, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.keys or self.stones)


class Batches:
    """One site's sending and receiving. `peer` is None with one site: nothing waits there, and nothing is sent."""

    def __init__(self, node: SiteNode, peer: BatchPeer | None, replica: Replica, *, most: int = MOST) -> None:
        self._node, self._peer, self._replica, self._most = node, peer, replica, most
        self._parts, self._store = node.parts, node.durable.store
        self._mac, self._envelopes = RecordMac(node.parts.hsm), Envelopes(node)
        self._keys, self._stones = KeyStore(), TombstoneStore()
        self._tombstones = Tombstones(self._mac, node.parts.recorder)
        self._receiving = Receiving(node, replica)

    # --- what the other site calls

    def take(self, batch: bytes) -> bytes:
        """See `Receiving.take`."""
        return self._receiving.take(batch)

    def close(self, closing: bytes) -> None:
        """See `Receiving.close`."""
        self._receiving.close(closing)

    def page(self, kind: str, after: bytes) -> bytes:
        """A signed batch of what this site holds, above a key's or a voice's id; empty at the end."""
        start: UUID | None = UUID(bytes=after)
        while start is not None:
            batch, start = self._next_stones(start) if kind == STONES else self._next_keys(start, Pumped(), unsynced=False)
            if batch.keys or batch.stones:
                return self._envelopes.sealed(batch)
        return self._envelopes.sealed(self._batch())

    def summary(self) -> bytes:
        """What both sites signed for, counted and digested."""
        with snapshot(self._parts.database) as transaction:
            return Summary(*summarized(transaction)).encode()

    # --- what this site does

    def pump(self) -> Pumped:
        """Send everything that waits, batch by batch; falsy when nothing was. May run anywhere, any number of times.

        A row that is not as it should be is passed over and named. Raises PeerUnavailable, SyncStoreUnavailable,
        HsmUnavailable: what both signed by then stands.
        """
        done = Pumped()
        if self._peer is None:
            return done
        self._tell(self._peer, done)
        self._send_stones(self._peer, done)
        after: UUID | None = _FIRST
        while after is not None:
            batch, after = self._next_keys(after, done, unsynced=True)
            if batch.keys:
                self._send_keys(self._peer, batch, done)
                self._tell(self._peer, done)
        return done

    def reconcile(self, *, keys: bool = True) -> Pumped:
        """Take whatever the other site holds and this one does not: after a restore, a replacement, at every start.

        Tombstones come first, so that nothing that was erased stays or comes back. Nothing is asked for where both sites'
        summaries agree; `keys` False compares and takes the tombstones alone.
        """
        done = Pumped()
        if self._peer is None:
            return done
        mine, theirs = Summary.decode(self.summary()), Summary.decode(self._peer.summary())
        if (mine.stones, mine.stones_digest) != (theirs.stones, theirs.stones_digest):
            self._take_pages(self._peer, STONES, done)
        if keys and (mine.keys, mine.keys_digest) != (theirs.keys, theirs.keys_digest):
            self._take_pages(self._peer, KEYS, done)
        return done

    # --- tombstones

    def _send_stones(self, peer: BatchPeer, done: Pumped) -> None:
        while True:
            with reading(self._parts.database) as transaction:
                found = [stone for stone in self._stones.untold(transaction) if self._holds(stone)][: self._most]
            if not found:
                return
            rows = sorted((StoneRow.of(stone) for stone in found), key=lambda row: row.voice)
            batch = self._batch(stones=rows)
            reply = peer.take(self._envelopes.sealed(batch))
            taken = self._answer(reply, batch)
            confirmed = {row.voice: row for row in taken.stones}
            if set(confirmed) != {row.voice for row in rows}:
                raise StatementMalformed("the other site answered for other tombstones")
            with lasting(self._parts.database) as transaction:
                now = self._parts.clock()
                for row in rows:
                    self._tombstones.confirm(transaction, confirmed[row.voice].stone, now=now)
                signed = StoredBatch(batch.batch, f"{STONES}-told", batch.encode(), None, reply, now)
                self._sign_off(transaction, signed, tombstones=len(rows))
            done.stones += len(rows)

    def _next_stones(self, after: UUID) -> tuple[Batch, UUID | None]:
        """The next tombstones above that voice, and where to go on; None at the end."""
        with reading(self._parts.database) as transaction:
            page = self._stones.page(transaction, self._most, after=after)
        batch = self._batch(stones=[StoneRow.of(stone) for stone in page if self._holds(stone)])
        return batch, page[-1].voice if len(page) == self._most else None

    # --- keys

    def _next_keys(self, after: UUID, done: Pumped, *, unsynced: bool) -> tuple[Batch, UUID | None]:
        """The next keys above that id as a batch, with what travels with them, and where to go on; None at the end."""
        batch, size = uuid4(), 0
        rows: list[KeyRow] = []
        with snapshot(self._parts.database) as transaction:
            page = self._keys.key_page(transaction, self._most, after=after, unsynced=unsynced)
            for key in page:
                if size > _MOST_BYTES:
                    return self._batch(batch, rows), after
                after = key.ref.id
                if not key.blob:
                    continue  # retired: only its number stays
                try:
                    rows.append(self._row(transaction, batch, key))
                    size += len(rows[-1].rows)
                except FAULTS:
                    raise
                except KeyVaultError as error:
                    done.refused[key.ref.id] = error.code
        return self._batch(batch, rows), after if len(page) == self._most else None

    def _row(self, transaction: Transaction, batch: UUID, key: WrappedKey) -> KeyRow:
        self._mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
        proof = dek_proof(batch, self._node.name, key)
        tag = self._parts.hsm.dek_mac(RingMaster(key.ref.ring, key.ref.ring_version), key.blob, proof)
        return KeyRow.of(key, tag, self._replica.rows_of(transaction, key.voice))

    def _send_keys(self, peer: BatchPeer, batch: Batch, done: Pumped) -> None:
        """One batch to the other site; where its receipt came, this site's after it, and the rows marked, in one transaction."""
        taken = self._answer(peer.take(self._envelopes.sealed(batch)), batch)
        refused = {row.row: row.code for row in taken.refused}
        done.refused |= refused
        rows = [row for row in batch.keys if row.dek_id not in refused]
        if not rows:
            return
        records = tuple(row.record for row in rows)
        state = self._node.current
        with lasting(self._parts.database) as transaction:
            if not all(self._unchanged(transaction, row) for row in rows):
                return  # somebody changed one meanwhile: the next run sends it as it is then
            own = receipt(state, batch.batch, records, self._envelopes.sign)
            check_receipts(state.ledger, batch.batch, records, (own, taken.receipt), verify_p256)
            for row in rows:
                key = self._keys.key(transaction, row.dek_id)
                assert key is not None
                self._receiving.mark(transaction, key)
            synced = tuple(SyncedRow(row.record, row.row_version) for row in rows)
            closing = Closing(batch.cluster, self._node.name, batch.batch, synced, (own, taken.receipt))
            stored = StoredBatch(batch.batch, KEYS, closing.encode(), own, taken.receipt, self._parts.clock())
            self._sign_off(transaction, stored, keys=len(rows))
        done.keys += len(rows)

    def _unchanged(self, transaction: Transaction, row: KeyRow) -> bool:
        """Whether the key is still what was sent: only then may this site vouch for what it sent."""
        key = self._keys.key(transaction, row.dek_id)
        return key is not None and KeyRow.of(key, row.tag, row.rows) == row

    def _tell(self, peer: BatchPeer, done: Pumped) -> None:
        """Send this site's receipt for every batch that it signed last. A refused one is not sent again: the other site then
        sends those rows itself, and signs last."""
        with reading(self._parts.database) as transaction:
            waiting = self._store.untold_batches(transaction)
        for batch, stored in waiting.items():
            if stored is None:
                done.refused[batch] = RecordTampered.code
                continue
            code = ""
            try:
                peer.close(self._envelopes.sealed(Closing.decode(stored.records)))
            except (PeerUnavailable, *FAULTS):
                raise
            except KeyVaultError as error:
                code = error.code
            with lasting(self._parts.database) as transaction:
                self._store.told_batch(transaction, stored)
                if code:
                    refused = KeyEvent("sync.batch_refused", {"batch": str(stored.batch), "code": code})
                    self._parts.recorder.record(transaction, refused)

    # --- what sending shares

    def _take_pages(self, peer: BatchPeer, kind: str, done: Pumped) -> None:
        after = _FIRST
        while True:
            page = peer.page(kind, after.bytes)
            batch = self._envelopes.opened(page, Batch)
            ids = [row.dek_id for row in batch.keys] or [row.voice for row in batch.stones]
            if not ids:
                return
            if ids[0] <= after:
                raise StatementMalformed("the other site's pages do not go on")
            taken = self._envelopes.opened(self.take(page), Taken, self._node.name)
            done.refused |= {row.row: row.code for row in taken.refused}
            done.keys += len(batch.keys) - len(taken.refused)
            done.stones += len(batch.stones)
            after = ids[-1]

    def _batch(self, batch: UUID | None = None, keys: Sequence[KeyRow] = (), stones: Sequence[StoneRow] = ()) -> Batch:
        cluster = self._node.ledger.roster.cluster
        return Batch(cluster, self._node.name, batch or uuid4(), tuple(keys), tuple(stones))

    def _answer(self, reply: bytes, batch: Batch) -> Taken:
        taken = self._envelopes.opened(reply, Taken)
        if taken.batch != batch.batch:
            raise StatementMalformed("the other site answered for another batch")
        return taken

    def _sign_off(self, transaction: Transaction, stored: StoredBatch, **counts: int) -> None:
        """Keep both sites' word on a batch, and say so."""
        self._store.add_batch(transaction, stored)
        facts: dict[str, str | int] = {"site": self._node.name, "batch": str(stored.batch), **counts}
        self._parts.recorder.record(transaction, KeyEvent("sync.batch", facts))

    def _holds(self, stone: Tombstone) -> bool:
        try:
            self._mac.check(stone.mac, Tombstone.DOMAIN, *stone.fields)
        except RecordTampered:
            return False
        return True
