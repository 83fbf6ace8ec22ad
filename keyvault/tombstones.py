"""What stays of an erased voice: its tombstone, and how far its erasure is. The keys of a voice end here.

Erased: every version of its key is gone from this store. That alone does not close an old copy of the database, which still
holds the wrapped key: shredded means that every ring version that ever wrapped one of its versions is destroyed at every site.

A row that does not carry its MAC never stops an erasure. What it says is not believed either: the tombstone then covers every
version of the ring, so that nothing is called shredded too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from keyvault.database import Transaction
from keyvault.errors import RecordTampered
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import DEFAULT_RING
from keyvault.records import KeyRef, RecordMac, RingVersion, Tombstone, WrappedKey
from keyvault.states import KeyState
from keyvault.store import KeyStore, TombstoneStore

MISSING = UUID(int=0)
"""Stands in a tombstone for a key version whose row was gone before the erasure: the n-th id is version n's."""
ERASED, SHREDDED = "voice.erased", "voice.shredded"


@dataclass(frozen=True)
class Outlook:
    """What keeps an erased voice from being shredded: ring versions that are not destroyed, and when the last one will be.

    `due` is None while at least one of them has no approved destruction pending.
    """

    left: tuple[str, ...]
    due: datetime | None


@dataclass(frozen=True)
class Shredding:
    """What one look at the tombstones found: voices that are shredded now, and tombstones that do not carry their MAC."""

    shredded: tuple[UUID, ...]
    tampered: tuple[UUID, ...]


class Tombstones:
    """Ends voices' keys, in the caller's transaction. Nothing here opens a key.

    `bury`, `receive` and `confirm` lock the voice first: whoever reads its rows to change them does the same.
    """

    def __init__(self, mac: RecordMac, recorder: Recorder, *, ring: str = DEFAULT_RING) -> None:
        self._mac, self._recorder, self._ring = mac, recorder, ring
        self._keys, self._store = KeyStore(), TombstoneStore()

    def lock(self, transaction: Transaction, voice: UUID) -> None:
        """Wait for whoever is at work on this voice and keep others waiting."""
        self._store.lock_voice(transaction, voice)

    def of(self, transaction: Transaction, voice: UUID) -> Tombstone | None:
        """The voice's tombstone. Raises RecordTampered."""
        stone = self._store.tombstone(transaction, voice)
        if stone is not None:
            self._check(stone)
        return stone

    def keys_of(self, transaction: Transaction, voice: UUID) -> tuple[list[WrappedKey], list[str]]:
        """Every version of the voice's key, oldest first, and what is wrong with them, in words."""
        keys = self._store.keys_of(transaction, voice)
        bad = [f"key version {key.ref.version} does not carry its MAC" for key in keys if not self._holds(key)]
        gone = set(range(1, max((key.ref.version for key in keys), default=0))) - {key.ref.version for key in keys}
        return keys, bad + [f"key version {version} is missing" for version in sorted(gone)]

    def bury(
        self, transaction: Transaction, voice: UUID, tenant: str, *, now: datetime, peer_erased_at: datetime | None
    ) -> tuple[Tombstone, tuple[str, ...]]:
        """Delete every version of the voice's key and write the tombstone; returns it, and what was wrong, in words.

        A voice that has one and came back (from a restored copy) is buried again: the tombstone then covers both, counts as
        not shredded, and waits for the other site anew. `peer_erased_at`: at once where there is no other site.
        """
        self.lock(transaction, voice)
        keys, findings = self.keys_of(transaction, voice)
        if not keys:
            findings.append("the key is missing")
        first, last = self._whole_ring(transaction) if findings else _covered(keys)
        stone = Tombstone(voice, tenant, _ids(keys), self._ring, first, last, now, peer_erased_at)
        old = self._store.tombstone(transaction, voice)
        if old is not None and not self._holds(old):
            findings.append("the tombstone did not carry its MAC")
            first, last = self._whole_ring(transaction)
            stone = replace(stone, first_ring_version=first, last_ring_version=last)
        elif old is not None:
            stone = _merged(old, stone)
        self._store.erase_keys(transaction, voice)
        return self._written(transaction, old, stone), tuple(findings)

    def receive(self, transaction: Transaction, theirs: Tombstone, *, now: datetime) -> Tombstone:
        """Bury here what the other site erased, covering what both sites know; idempotent. `theirs` came signed by that site."""
        self.lock(transaction, theirs.voice)
        row = self._store.tombstone(transaction, theirs.voice)
        mine = row if row is not None and self._holds(row) else None
        keys, findings = self.keys_of(transaction, theirs.voice)
        if mine is not None and not keys and _coverage(_merged(mine, theirs)) == _coverage(mine):
            return mine if mine.peer_erased_at else self._written(transaction, mine, replace(mine, peer_erased_at=theirs.erased_at))
        doubtful = bool(findings) or mine is not row
        first, last = self._whole_ring(transaction) if doubtful else _covered(keys) if keys else _range(theirs)
        own = Tombstone(theirs.voice, theirs.tenant, _ids(keys), self._ring, first, last, now, theirs.erased_at)
        stone = _merged(theirs, own)
        self._store.erase_keys(transaction, theirs.voice)
        return self._written(transaction, row, _merged(mine, stone) if mine else stone)

    def confirm(self, transaction: Transaction, theirs: Tombstone, *, now: datetime) -> Tombstone:
        """The other site erased its copies and answered with its tombstone: cover what it covered. Raises RecordTampered."""
        self.lock(transaction, theirs.voice)
        mine = self.of(transaction, theirs.voice)
        if mine is None:
            return self.receive(transaction, theirs, now=now)
        if mine.peer_erased_at is not None:
            return mine
        stone = replace(_merged(mine, theirs), erased_at=mine.erased_at, peer_erased_at=now, shredded_at=mine.shredded_at)
        return self._written(transaction, mine, stone)

    def shred_due(self, transaction: Transaction, *, now: datetime) -> Shredding:
        """Find what is shredded by now and write it down; call it after each destruction of a ring version.

        A version counts as destroyed if its row, under MAC, says so: it says so once every site acknowledged. A row that is
        missing counts as not destroyed. Raises RecordTampered for a ring version's row, RowChanged; nothing is called shredded
        then.
        """
        shredded, tampered = [], []
        for ring, first, last in self._store.coverages(transaction):
            if _outlook(ring, first, last, self._versions(transaction, ring)).left:
                continue
            for found in self._store.unshredded(transaction, ring, first, last):
                if not self._holds(found):
                    tampered.append(found.voice)
                    continue
                done = self._written(transaction, found, replace(found, shredded_at=now))
                self._recorder.record(transaction, KeyEvent(SHREDDED, facts(done)))
                shredded.append(found.voice)
        return Shredding(tuple(shredded), tuple(tampered))

    def outlook(self, transaction: Transaction, stone: Tombstone) -> Outlook:
        """What keeps this voice from being shredded. Raises RecordTampered for a ring version's row."""
        return _outlook(stone.ring, *_range(stone), self._versions(transaction, stone.ring))

    def retire_older(self, transaction: Transaction, voice: UUID, version: int) -> tuple[WrappedKey, ...]:
        """Destroy every key version below `version`: the blob goes, the row stays, for its number is never used again.

        The row names no ring any more, so that no master is kept for it. Returns those that were destroyed now. Idempotent.
        Raises RecordTampered, RowChanged.
        """
        old = [key for key in self._store.keys_of(transaction, voice) if key.ref.version < version]
        old = [key for key in old if key.state is not KeyState.DESTROYED or key.blob]
        for key in old:
            self._mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
            ref, after = KeyRef(key.ref.id, key.ref.version, "", 0), key.row_version + 1
            gone = replace(key, ref=ref, state=KeyState.DESTROYED, blob=b"", synced=after, row_version=after)
            self._keys.replace_key(transaction, key, replace(gone, mac=self._mac.make(WrappedKey.DOMAIN, *gone.fields)))
        return tuple(old)

    def _written(self, transaction: Transaction, old: Tombstone | None, new: Tombstone) -> Tombstone:
        new = replace(new, row_version=old.row_version + 1 if old else 1)
        new = replace(new, mac=self._mac.make(Tombstone.DOMAIN, *new.fields))
        if old is None:
            self._store.add_tombstone(transaction, new)
        else:
            self._store.replace_tombstone(transaction, old, new)
        return new

    def _versions(self, transaction: Transaction, ring: str) -> list[RingVersion]:
        versions = self._keys.ring_versions(transaction, ring)
        for version in versions:
            self._mac.check(version.mac, RingVersion.DOMAIN, *version.fields)
        return versions

    def _whole_ring(self, transaction: Transaction) -> tuple[int, int]:
        """Every version that the ring has had. A row without its MAC counts: it can only make the erasure wait longer."""
        numbers = [version.version for version in self._keys.ring_versions(transaction, self._ring)]
        return min(numbers, default=1), max(numbers, default=1)

    def _check(self, stone: Tombstone) -> None:
        self._mac.check(stone.mac, Tombstone.DOMAIN, *stone.fields)

    def _holds(self, row: Tombstone | WrappedKey) -> bool:
        try:
            self._mac.check(row.mac, row.DOMAIN, *row.fields)
        except RecordTampered:
            return False
        return True


def facts(stone: Tombstone) -> dict[str, str | int]:
    """What the log says of a tombstone."""
    ring: dict[str, str | int] = {
        "ring": stone.ring,
        "first_ring_version": stone.first_ring_version,
        "last_ring_version": stone.last_ring_version,
    }
    return {"voice": str(stone.voice), "tenant": stone.tenant, "keys": len(stone.dek_ids), **ring}


def _outlook(ring: str, first: int, last: int, rows: Sequence[RingVersion]) -> Outlook:
    versions = {version.version: version for version in rows}
    left, times = [], []
    for number in range(first, last + 1):
        version = versions.get(number)
        if version is None or version.state is not KeyState.DESTROYED:
            left.append(f"{ring}/{number}")
            times.append(version.due if version else None)
    due = [at for at in times if at is not None]
    return Outlook(tuple(left), max(due) if due and len(due) == len(times) else None)


def _covered(keys: Sequence[WrappedKey]) -> tuple[int, int]:
    """From the first ring version that wrapped any of these keys to the last one that does."""
    first = min(key.first_ring_version for key in keys)
    return first, max(first, *(key.ref.ring_version for key in keys))


def _range(stone: Tombstone) -> tuple[int, int]:
    return stone.first_ring_version, stone.last_ring_version


def _ids(keys: Sequence[WrappedKey]) -> tuple[UUID, ...]:
    found = {key.ref.version: key.ref.id for key in keys}
    return tuple(found.get(version, MISSING) for version in range(1, max(found, default=0) + 1))


def _merged(old: Tombstone, new: Tombstone) -> Tombstone:
    """Covers what both cover; times are those of `new`."""
    longest = max(len(old.dek_ids), len(new.dek_ids))
    pairs = zip(*(stone.dek_ids + (MISSING,) * (longest - len(stone.dek_ids)) for stone in (old, new)), strict=True)
    return replace(
        new,
        tenant=old.tenant,
        dek_ids=tuple(one if one != MISSING else other for one, other in pairs),
        first_ring_version=min(old.first_ring_version, new.first_ring_version),
        last_ring_version=max(old.last_ring_version, new.last_ring_version),
    )


def _coverage(stone: Tombstone) -> tuple[tuple[UUID, ...], str, int, int]:
    """What it says is erased: the keys, and the versions of their ring."""
    return stone.dek_ids, stone.ring, stone.first_ring_version, stone.last_ring_version
