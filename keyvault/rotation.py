"""Re-wrap: every stored key of a ring moves under the ring's serving master, in the token, while everything goes on serving.

There is no job to keep: what is left to do is what the query finds, so a run that was killed at any step is continued by the
next one, and a run with nothing left changes nothing. Pages go by (ring version, key id). A row's MAC is checked before the
token sees its blob, and a row is replaced only if it is still as it was read; what somebody else changed meanwhile is read
again in the next pass. The old master stays until no row refers to it: that is decided elsewhere, by another query.

Order of the sources: compromised versions first, then the oldest. Sources: NIST SP 800-57 Part 1, 5.3 and 8.2.3; RFC 3394.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from keyvault.database import Database, Transaction
from keyvault.errors import HsmUnavailable, KeyNotFound, KeyStateForbids, KeyVaultError, RecordTampered, UnwrapRejected
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import RingMaster, SiteHsm
from keyvault.records import Move, RecordMac, RingVersion, WrappedKey
from keyvault.rings import Rings
from keyvault.states import KeyState, KeyUse, require_use
from keyvault.store import KeyStore
from keyvault.sync.store import lasting, reading

PAGE = 500
"""Rows of one page: one event, one UPDATE, and as much work as a kill can undo."""
_MOST_PASSES = 20
_IDS = 1 << 128


@dataclass(frozen=True)
class Source:
    """One version that still wraps keys: its state (None: the ring has no such version), how many, and why they must stay."""

    version: int
    state: KeyState | None
    keys: int
    refusal: KeyVaultError | None = None


@dataclass(frozen=True)
class Plan:
    """What a re-wrap would do: where to, and from which versions, in this order."""

    target: RingMaster
    sources: tuple[Source, ...]

    @property
    def movable(self) -> tuple[Source, ...]:
        """Sources whose keys can be moved."""
        return tuple(source for source in self.sources if source.refusal is None)

    @property
    def keys(self) -> int:
        """How many keys are to be moved."""
        return sum(source.keys for source in self.movable)


@dataclass(frozen=True)
class Part:
    """One of `count` workers' equal shares of all key ids, which are random."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no part {self.index} of {self.count}")

    @property
    def first(self) -> UUID:
        return UUID(int=_IDS * self.index // self.count)

    @property
    def last(self) -> UUID:
        return UUID(int=_IDS * (self.index + 1) // self.count - 1)


class Mover(Protocol):
    """Whatever moves keys from one master to another: the serving token, or the one that alone can."""

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        """See `keyvault.hsm.Hsm.rewrap_many`."""


@dataclass
class Outcome:
    """How far a run is. `bad` names each row that was passed over, with the code of the reason; `left` were changed by others
    in every pass."""

    moved: int = 0
    left: int = 0
    bad: dict[UUID, str] = field(default_factory=dict)


class Rewrapping:
    """Moves a ring's keys under its serving master. One instance may run in each of several processes, each with its part."""

    def __init__(
        self,
        database: Database,
        hsm: SiteHsm,
        store: KeyStore,
        recorder: Recorder,
        mac: RecordMac,
        *,
        mover: Mover | None = None,
        page: int = PAGE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._database, self._hsm, self._store, self._recorder, self._mac = database, hsm, store, recorder, mac
        self._mover: Mover = mover or hsm
        self._rings = Rings(hsm, store, recorder, mac)
        self._page, self._clock, self._sleep = page, clock, sleep

    def plan(self, ring: str, *, target: int | None = None) -> Plan:
        """What there is to do; no wrapped key is read. `target` is refused unless it is the version that serves.

        Raises KeyNotFound, KeyStateForbids, RecordTampered, HsmUnavailable: also where the ring's newest version may not
        serve, for nothing may then be wrapped at all.
        """
        with reading(self._database) as transaction:
            known = self._rings.known(transaction)
            if set(known) - set(self._hsm.masters()):  # made since this process looked into the token
                self._hsm.refresh(known, ())
            serving = self._rings.serving(transaction, ring)
            versions = {version.version: version for version in self._rings.versions(transaction, ring)}
            counts = self._store.references(transaction, ring)
        if target is not None and target != serving.version:
            if target not in versions:
                raise KeyNotFound(f"ring {ring!r} has no version {target}")
            raise KeyStateForbids(f"{RingMaster(ring, target).label} is {versions[target].state}; {serving.label} serves")
        sources = [
            self._source(RingMaster(ring, version), versions.get(version), keys)
            for version, keys in counts.items()
            if version != serving.version
        ]
        sources.sort(key=lambda source: (source.state is not KeyState.COMPROMISED, source.version))
        return Plan(serving, tuple(sources))

    def _source(self, master: RingMaster, found: RingVersion | None, keys: int) -> Source:
        refusal: KeyVaultError | None = None
        if found is None:
            refusal = KeyNotFound(f"the ring has no version {master.version}")
        else:
            try:
                require_use(found.state, KeyUse.REWRAP)
            except KeyStateForbids as error:
                refusal = error
            else:
                if master not in self._hsm.masters():
                    refusal = KeyNotFound(f"this token does not hold {master.label}")
        return Source(master.version, found.state if found else None, keys, refusal)

    def run(
        self, plan: Plan, part: Part, *, rate: float | None = None, tell: Callable[[Outcome], None] = lambda _: None
    ) -> Outcome:
        """Move every key of `part`, at most `rate` a second, until a pass finds nothing more; `tell` hears of each page.

        Durable page by page. A row that cannot be moved is named in the outcome and passed over. Raises HsmUnavailable, what
        refuses the target from then on (KeyStateForbids, …), and SyncStoreUnavailable: what was told stands, the rest is
        left for the next run.
        """
        outcome, pace = Outcome(), _Pace(rate, self._clock, self._sleep)

        def settle(page: _Page, moved: int) -> None:
            outcome.bad |= page.bad
            outcome.moved += moved
            outcome.left += len(page.moves) - moved
            tell(outcome)
            pace.done(moved + len(page.bad))

        for _ in range(_MOST_PASSES):
            before, outcome.left = outcome.moved, 0
            for source in plan.movable:
                master = RingMaster(plan.target.ring, source.version)
                walk = _Walk(master, plan.target, part, pace.most(self._page), frozenset(outcome.bad))
                self._pass(walk, settle)
            if outcome.left == 0 and outcome.moved == before:
                break
        return outcome

    def _pass(self, walk: _Walk, settle: Callable[[_Page, int], None]) -> None:
        """One walk through a part's keys under one source. The database works on one page while the token has the next."""
        with ThreadPoolExecutor(1) as beside:
            found = beside.submit(self._read, walk, walk.part.first).result()
            written: tuple[_Page, Future[int]] | None = None
            while found:
                first = found[-1].ref.id.int + 1
                more = len(found) == walk.limit and first <= walk.part.last.int
                following = beside.submit(self._read, walk, UUID(int=first)) if more else None
                page = self._wrapped([key for key in found if key.ref.id not in walk.known_bad], walk)
                if written:
                    settle(written[0], written[1].result())
                written = (page, beside.submit(self._write, page, walk)) if page.rows else None
                found = following.result() if following else []
            if written:
                settle(written[0], written[1].result())

    def _read(self, walk: _Walk, first: UUID) -> list[WrappedKey]:
        with reading(self._database) as transaction:
            return self._store.keys_under(transaction, walk.source, first, walk.part.last, walk.limit)

    def _wrapped(self, keys: Sequence[WrappedKey], walk: _Walk) -> _Page:
        """The token's work on a page: each record's MAC, before any of the blobs reaches the token; then the moves."""
        macs = self._mac.make_many(WrappedKey.DOMAIN, [key.fields for key in keys])
        whole = [key for key, mac in zip(keys, macs, strict=True) if hmac.compare_digest(key.mac, mac)]
        bad = {key.ref.id: RecordTampered.code for key in keys} if len(whole) < len(keys) else {}
        for key in whole if bad else ():
            del bad[key.ref.id]
        wrapped: list[tuple[WrappedKey, bytes]] = []
        for key, blob in zip(whole, self._mover.rewrap_many([key.blob for key in whole], walk.source, walk.target), strict=True):
            if isinstance(blob, UnwrapRejected):
                bad[key.ref.id] = blob.code
            else:
                wrapped.append((key, blob))
        if UnwrapRejected.code in bad.values():
            self._require_unwraps(walk.source, walk.target)
        # `synced` stays, so that the other site is sent the key again while it serves on.
        rows = [key.fields_under(walk.target.version, blob, key.row_version + 1) for key, blob in wrapped]
        macs = self._mac.make_many(WrappedKey.DOMAIN, rows)
        return _Page(keys, [Move(key, blob, mac) for (key, blob), mac in zip(wrapped, macs, strict=True)], bad)

    def _write(self, page: _Page, walk: _Walk) -> int:
        """Make a page durable, with its event; returns how many rows moved: those that nobody else changed."""
        facts: dict[str, str | int] = {"ring": walk.target.ring, "from": walk.source.version, "to": walk.target.version}
        facts |= {"first": str(page.rows[0].ref.id), "last": str(page.rows[-1].ref.id), "bad": len(page.bad)}
        with lasting(self._database) as transaction:
            self._require_serving(transaction, walk.target)
            moved = self._store.move_keys(transaction, walk.target, page.moves) if page.moves else 0
            self._recorder.record(transaction, KeyEvent("keys.rewrapped", facts | {"keys": moved}))
        return moved

    def _require_unwraps(self, source: RingMaster, target: RingMaster) -> None:
        """Whether the token moves a key that is certainly good: if not, it is at fault and not the row. Raises HsmUnavailable."""
        with self._hsm.new_dek(source) as dek:
            (moved,) = self._mover.rewrap_many([dek.wrapped], source, target)
        if isinstance(moved, UnwrapRejected):
            raise HsmUnavailable(f"the token unwraps nothing under {source.label} any more") from moved

    def _require_serving(self, transaction: Transaction, target: RingMaster) -> None:
        """The target still serves, and nobody changes that before `transaction` ends. Raises KeyStateForbids."""
        self._store.hold_ring_version(transaction, target)
        if self._rings.serving(transaction, target.ring) != target:
            raise KeyStateForbids(f"{target.label} no longer serves; plan again")


@dataclass(frozen=True)
class _Walk:
    """One pass over a part's keys under `source`, in pages of `limit`; rows that are known to be bad are left alone."""

    source: RingMaster
    target: RingMaster
    part: Part
    limit: int
    known_bad: frozenset[UUID]


@dataclass(frozen=True)
class _Page:
    """A page after the token's work: its rows, the moves to be written, and the rows that cannot move."""

    rows: Sequence[WrappedKey]
    moves: Sequence[Move]
    bad: dict[UUID, str]


class _Pace:
    """Keeps to so many rows a second, evenly, however long each page takes."""

    def __init__(self, rate: float | None, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._started, self._rows = clock(), 0

    def most(self, page: int) -> int:
        """Rows of the next page: no more than a second's worth."""
        return page if self._rate is None else max(1, min(page, int(self._rate)))

    def done(self, rows: int) -> None:
        """Wait until these rows were due."""
        self._rows += rows
        if self._rate is not None:
            self._sleep(max(0.0, self._started + self._rows / self._rate - self._clock()))
