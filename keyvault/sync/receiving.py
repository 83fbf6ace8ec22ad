"""A site's receiving side for batches: every row durable under this site's own MAC, each key opened and compared, then signed.

What it refuses it refuses row by row, so that one bad row holds up no other. Of two versions of a row the higher row version
stands; of two different rows of one version, that of the site which the roster names first.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import Protocol, TypeVar
from uuid import UUID

from keyvault.database import Transaction
from keyvault.errors import HsmUnavailable, KeyVaultError, RowChanged
from keyvault.events import KeyEvent
from keyvault.hsm import KeyName, RingMaster
from keyvault.records import RecordMac, WrappedKey
from keyvault.store import KeyStore, TombstoneStore
from keyvault.sync.errors import ProofFailed, SyncRefused, SyncStoreUnavailable, VoiceErased
from keyvault.sync.messages import (
    Batch,
    Closing,
    KeyRow,
    RefusedRow,
    RowChanges,
    RowsHeld,
    RowsTaken,
    StoneRow,
    Taken,
    dek_proof,
    dek_record,
)
from keyvault.sync.node import SiteNode
from keyvault.sync.receipts import check_receipts, receipt
from keyvault.sync.signatures import verify_p256
from keyvault.sync.statement import Signed
from keyvault.sync.store import StoredBatch, lasting
from keyvault.tombstones import ERASED, Tombstones, facts

KEYS, STONES = "keys", "tombstones"
FAULTS = (HsmUnavailable, SyncStoreUnavailable)
"""Not a row's own fault: the whole batch is tried again."""

Message = TypeVar("Message", Batch, Taken, Closing, RowChanges, RowsTaken, RowsHeld)


class Replica(Protocol):
    """Rows of higher packages that travel with a voice's key. What it refuses it raises as a KeyVaultError."""

    def rows_of(self, transaction: Transaction, voice: UUID) -> bytes:
        """Everything of this voice that the other site needs; empty for nothing."""

    def take(self, transaction: Transaction, voice: UUID, rows: bytes) -> None:
        """Keep what the other site sent, as far as it is newer. Idempotent."""

    def drop(self, transaction: Transaction, voice: UUID) -> None:
        """Forget the voice's rows: it was erased. Idempotent."""


class Envelopes:
    """Signs what this site sends, and opens what the other has signed."""

    def __init__(self, node: SiteNode) -> None:
        self._node = node

    def sign(self, data: bytes) -> bytes:
        """This site's identity signs. Raises HsmUnavailable."""
        return self._node.parts.hsm.sign(KeyName.SITE_IDENTITY, data)

    def sealed(self, statement: Batch | Taken | Closing | RowChanges | RowsTaken | RowsHeld) -> bytes:
        """The statement under this site's signature."""
        return Signed.make(self._node.name, statement, self.sign).encode()

    def opened(self, data: bytes, kind: type[Message], site: str | None = None) -> Message:
        """What the other site (or `site`) signed. Raises StatementMalformed, SignatureInvalid, SyncRefused."""
        signed, roster = Signed.decode(data), self._node.ledger.roster
        signed.check(roster, verify_p256)
        said = kind.decode(signed.statement)
        wanted = (site,) if site else roster.peers(self._node.name)
        if (said.cluster, said.site) != (roster.cluster, signed.site) or signed.site not in wanted:
            raise SyncRefused(f"{signed.site!r} signed for another site or cluster")
        return said


class Receiving:
    """Takes the other site's rows."""

    def __init__(self, node: SiteNode, replica: Replica) -> None:
        self._node, self._replica, self._parts = node, replica, node.parts
        self._mac, self._envelopes = RecordMac(node.parts.hsm), Envelopes(node)
        self._keys, self._tombstones = KeyStore(), Tombstones(self._mac, node.parts.recorder)

    def take(self, batch: bytes) -> bytes:
        """Keep the other site's rows; the answer is signed. Idempotent.

        Raises SignatureInvalid, SyncRefused, HsmUnavailable, SyncStoreUnavailable: nothing is kept then.
        """
        given = self._envelopes.opened(batch, Batch)
        if {RingMaster(row.ring, row.ring_version) for row in given.keys} - set(self._parts.hsm.masters()):
            self._node.durable.serve()
        refused = {row.dek_id: code for row in given.keys if (code := self._unproved(given, row))}
        with lasting(self._parts.database) as transaction:
            stones = tuple(self._bury(transaction, row) for row in given.stones)
            for row in given.keys:
                if row.dek_id not in refused and (code := self._refusal(transaction, given.site, row)):
                    refused[row.dek_id] = code
        records = tuple(row.record for row in given.keys if row.dek_id not in refused)
        state = self._node.current
        signed = receipt(state, given.batch, records, self._envelopes.sign) if records else b""
        passed = tuple(RefusedRow(row, code) for row, code in sorted(refused.items()))
        return self._envelopes.sealed(Taken(given.cluster, self._node.name, given.batch, signed, stones, passed))

    def close(self, closing: bytes) -> None:
        """The other site has signed last: mark its rows as held by both. Idempotent. Raises AwaitingSync, SignatureInvalid."""
        given = self._envelopes.opened(closing, Closing)
        check_receipts(self._node.ledger, given.batch, given.records, given.receipts, verify_p256)
        receipts = {Signed.decode(message).site: message for message in given.receipts}
        with lasting(self._parts.database) as transaction:
            for row in given.rows:
                key = self._keys.key(transaction, row.record.dek_id)
                if key and key.row_version == row.row_version and dek_record(key) == row.record:
                    self.mark(transaction, key)
            signed = (receipts.get(self._node.name), receipts.get(given.site))
            batch = StoredBatch(given.batch, f"{KEYS}-told", given.encode(), *signed, self._parts.clock())
            self._node.durable.store.add_batch(transaction, batch)

    def mark(self, transaction: Transaction, key: WrappedKey) -> None:
        """Both sites' receipts stand for this row as it is. Raises RowChanged, RecordTampered."""
        self._mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
        self._replace(transaction, key, replace(key, synced=key.row_version))

    def _unproved(self, batch: Batch, row: KeyRow) -> str | None:
        """The code of the reason why this site's HSM does not open the key as the other's did; None where it does."""
        try:
            self._node.current.opening(f"ring/{row.ring}", row.ring_version)
            master = RingMaster(row.ring, row.ring_version)
            tag = self._parts.hsm.dek_mac(master, row.blob, dek_proof(batch.batch, batch.site, row.key))
            return None if hmac.compare_digest(tag, row.tag) else ProofFailed.code
        except FAULTS:
            raise
        except KeyVaultError as error:
            return error.code

    def _bury(self, transaction: Transaction, row: StoneRow) -> StoneRow:
        self._tombstones.lock(transaction, row.voice)
        self._replica.drop(transaction, row.voice)
        known = TombstoneStore().tombstone(transaction, row.voice)
        stone = self._tombstones.receive(transaction, row.stone, now=self._parts.clock())
        if known is None:
            self._parts.recorder.record(transaction, KeyEvent(ERASED, facts(stone)))
        return StoneRow.of(stone)

    def _refusal(self, transaction: Transaction, site: str, row: KeyRow) -> str | None:
        """Take one key; where it can't be taken, nothing of it is kept and the code says why."""
        try:
            with transaction.begin_nested():
                self._take_key(transaction, site, row)
        except FAULTS:
            raise
        except KeyVaultError as error:
            return error.code
        return None

    def _take_key(self, transaction: Transaction, site: str, row: KeyRow) -> None:
        self._tombstones.lock(transaction, row.voice)
        if self._tombstones.of(transaction, row.voice) is not None:
            raise VoiceErased
        mine, theirs = self._keys.key(transaction, row.dek_id), row.key
        if mine is None:
            self._keys.add_key(transaction, replace(theirs, mac=self._mac.make(WrappedKey.DOMAIN, *theirs.fields)))
        else:
            self._mac.check(mine.mac, WrappedKey.DOMAIN, *mine.fields)
            self._supersede(transaction, site, mine, theirs)
        self._tombstones.retire_older(transaction, row.voice, row.version)
        self._replica.take(transaction, row.voice, row.rows)

    def _supersede(self, transaction: Transaction, site: str, mine: WrappedKey, theirs: WrappedKey) -> None:
        """The other site's row in the place of ours, where it is newer."""
        theirs = replace(theirs, synced=mine.synced)
        if (mine.tenant, mine.voice, mine.ref.version) != (theirs.tenant, theirs.voice, theirs.ref.version):
            raise SyncRefused("this key id is another voice's here")
        if theirs.fields == mine.fields:
            return
        first = self._node.ledger.roster.names[0] == site
        if (theirs.row_version, first) < (mine.row_version, True):
            raise RowChanged("this site has a newer row")
        self._replace(transaction, mine, theirs)

    def _replace(self, transaction: Transaction, old: WrappedKey, new: WrappedKey) -> None:
        self._keys.replace_key(transaction, old, replace(new, mac=self._mac.make(WrappedKey.DOMAIN, *new.fields)))
