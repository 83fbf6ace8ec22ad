"""The life of a ring's master version: its states by NIST SP 800-57 Part 1, section 7, and its end, which waits and can be stopped.

Every change of state is a transaction of the sites, so that no site ever disagrees about what a version may do; what is asked
here is checked first against the state that stands. A destruction is approved by officers, waits its delay with the time
written in the version's row, and is carried out only when no stored key refers to the version: here by query before it is
proposed, and by each site again when it votes. Until then it can be cancelled, and each use of the version is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from keyvault.approvals import Approval, Operation
from keyvault.database import Database, Transaction
from keyvault.errors import DelayTooShort, KeyNotFound, KeyStateForbids, KeyVaultError, NothingPending, ReasonMissing
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import RingMaster, SiteHsm
from keyvault.records import RecordMac, RingVersion
from keyvault.rings import Rings
from keyvault.states import KeyState, require_step
from keyvault.store import KeyStore
from keyvault.sync.statement import DESTROY, destruction_subject
from keyvault.sync.store import lasting, reading

DEFAULT_DELAY = timedelta(days=7)
APPROVALS_LAST = timedelta(days=14)
"""Time for officers to sign, on top of the delay that their signatures must outlive."""
ALERT_EVERY = timedelta(minutes=1)


class Masters(Protocol):
    """Carries out agreed changes at every site; the coordinator of hsm-sync/1 does."""

    def change_states(
        self,
        states: Mapping[str, KeyState],
        reason: str,
        operation: Operation | None = None,
        approvals: Sequence[Approval] = (),
    ) -> object:
        """Give these versions, by label, these states at every site. COMPROMISED holds here at once, whatever the other does."""

    def alone(self) -> AbstractContextManager[object]:
        """While it is held nobody else of this site begins or finishes a change; its holder may call `change_states`."""

    def ending(self, label: str) -> bool:
        """Whether this site has voted for a change that destroys this version, which can only be finished."""


@dataclass(frozen=True)
class Approved:
    """An operation with enough officers' signatures; empty where the roster asks for none."""

    operation: Operation | None = None
    approvals: tuple[Approval, ...] = ()


class Officers(Protocol):
    """What officers are asked, and what they have approved."""

    def approved(self, kind: str, subject: bytes, now: datetime) -> Approved | None:
        """What was approved for exactly this and is not over; None while signatures are missing."""

    def request(self, kind: str, subject: bytes, description: Mapping[str, str | int], expires_at: datetime) -> str:
        """File a request in this site's name, unless one for the same is open; its digest in hex."""

    def withdraw(self, kind: str, subject: bytes, reason: str) -> tuple[str, ...]:
        """End every open request for exactly this, approved or not, on record; their digests in hex."""


@dataclass(frozen=True)
class Version:
    """One version as officers see it. `keys` counts the stored keys that it wraps at this site, `held` is about its token;
    `peer_destroy_at` is when the other site means to destroy it."""

    master: RingMaster
    state: KeyState
    created_at: datetime
    destroy_at: datetime | None
    reason: str
    keys: int
    held: bool
    peer_destroy_at: datetime | None = None


@dataclass(frozen=True)
class Destruction:
    """Where a destruction stands: due at a time, or waiting for officers to sign the request of this digest."""

    master: RingMaster
    due_at: datetime | None
    request: str = ""


@dataclass(frozen=True)
class Cancelled:
    """What a cancellation ended: a destruction that had its time, officers' requests for it (digests in hex), or both."""

    scheduled: bool
    requests: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """What came of a destruction that was due: `code` is empty if the version is destroyed, or says why it is not yet."""

    master: RingMaster
    code: str = ""
    said: str = ""


class PendingUse:
    """Reports that a version is still used whose destruction is pending, here or at the other site: at most once a minute for
    each, so that it is read."""

    def __init__(self, recorder: Recorder, clock: Callable[[], datetime]) -> None:
        self._recorder, self._clock = recorder, clock
        self._told: dict[RingMaster, datetime] = {}

    def note(self, transaction: Transaction, version: RingVersion) -> None:
        """Call it when a key under this version is about to be opened; the event commits with `transaction`."""
        if version.due is None:
            return
        master, now = RingMaster(version.ring, version.version), self._clock()
        if master not in self._told or now - self._told[master] >= ALERT_EVERY:
            self._told[master] = now
            facts: dict[str, str | int] = {"ring": version.ring, "version": version.version}
            where = "here" if version.due == version.destroy_at else "the other site"
            facts |= {"destroy_at": version.due.isoformat(), "scheduled_at": where}
            self._recorder.record(transaction, KeyEvent("key.pending_destruction_used", facts))


class Lifecycle:
    """Changes of master versions at this site's request. Every method is durable on return, or nothing has happened here."""

    def __init__(
        self,
        *,
        database: Database,
        hsm: SiteHsm,
        store: KeyStore,
        recorder: Recorder,
        masters: Masters,
        officers: Officers,
        cluster: str,
        clock: Callable[[], datetime],
        least_delay: timedelta = DEFAULT_DELAY,
    ) -> None:
        self._database, self._hsm, self._store, self._recorder = database, hsm, store, recorder
        self._masters, self._officers, self._cluster = masters, officers, cluster
        self._clock, self._least_delay = clock, least_delay
        self._mac = RecordMac(hsm)
        self._rings = Rings(hsm, store, recorder, self._mac)

    def versions(self, ring: str | None = None) -> list[Version]:
        """Every version of the ring, or of all rings. Raises RecordTampered, and KeyNotFound for a ring that is none."""
        held = self._hsm.held()
        with reading(self._database) as transaction:
            found: list[Version] = []
            for name in [ring] if ring else self._store.rings(transaction):
                keys, rows = self._store.references(transaction, name), self._rings.versions(transaction, name)
                if not rows:
                    raise KeyNotFound(f"ring {name!r} has no version")
                found += [_seen(row, keys.get(row.version, 0), held) for row in rows]
        return found

    def suspend(self, master: RingMaster, reason: str) -> None:
        """Stop all use of it for a while. Raises KeyStateForbids, ReasonMissing, what the sites refuse."""
        self._change(master, KeyState.SUSPENDED, reason)

    def resume(self, master: RingMaster, reason: str) -> None:
        """End a suspension: it serves again. Raises KeyStateForbids unless it is suspended."""
        with reading(self._database) as transaction:
            state = self._rings.version(transaction, master).state
        if state is not KeyState.SUSPENDED:
            raise KeyStateForbids(f"{master.label} is {state}, not suspended")
        self._change(master, KeyState.ACTIVE, reason)

    def deactivate(self, master: RingMaster, reason: str) -> None:
        """It wraps nothing new, and still opens and moves what it wrapped."""
        self._change(master, KeyState.DEACTIVATED, reason)

    def compromise(self, master: RingMaster, reason: str) -> None:
        """It wraps nothing from now on and opens nothing without break-glass; its keys are the first to be moved."""
        self._change(master, KeyState.COMPROMISED, reason)

    def _change(self, master: RingMaster, state: KeyState, reason: str) -> None:
        said = _require_reason(reason)
        with reading(self._database) as transaction:
            found = self._rings.version(transaction, master)
        if found.state is state:
            return
        require_step(found.state, state)
        self._masters.change_states({master.label: state}, said)

    # --- its end

    def destroy(self, master: RingMaster, reason: str, delay: timedelta | None = None) -> Destruction:
        """Let it be destroyed after `delay`; one that is pending keeps its time. Without approval, file the request for one.

        No delay given is a week, or the least that is set where that is longer.

        Keys that it still wraps do not hinder this, only the destruction itself. Raises KeyStateForbids, ReasonMissing,
        DelayTooShort.
        """
        said, now = _require_reason(reason), self._clock()
        if delay is None:
            delay = max(DEFAULT_DELAY, self._least_delay)
        if delay < self._least_delay:
            raise DelayTooShort(f"{_hours(delay)} hours are less than the {_hours(self._least_delay)} that are set")
        with reading(self._database) as transaction:
            found = self._rings.version(transaction, master)
            require_step(found.state, KeyState.DESTROYED)
        if found.destroy_at is not None:
            return Destruction(master, found.destroy_at)
        if self._officers.approved(DESTROY, self._subject(master), now) is None:
            facts: dict[str, str | int] = {"versions": master.label, "delay_hours": _hours(delay), "reason": said}
            return Destruction(master, None, self._request(master, facts, now + delay))
        due = now + delay
        self._write(found, "key.destruction_scheduled", destroy_at=due, reason=said)
        return Destruction(master, due)

    def cancel(self, master: RingMaster, reason: str) -> Cancelled:
        """Stop a destruction, pending or only asked for: officers' signatures for it count no more, so another needs new ones.

        Raises NothingPending, ReasonMissing, and KeyStateForbids once this site has voted for it.
        """
        said = _require_reason(reason)
        with self._masters.alone():
            return self._cancel(master, said)

    def _cancel(self, master: RingMaster, said: str) -> Cancelled:
        if self._masters.ending(master.label):
            raise KeyStateForbids(f"this site has voted to destroy {master.label}: that can only be finished")
        with reading(self._database) as transaction:
            found = self._rings.version(transaction, master)
        scheduled = found.destroy_at is not None and found.state is not KeyState.DESTROYED
        # The signatures go first: whatever happens next, a time without them destroys nothing.
        requests = self._officers.withdraw(DESTROY, self._subject(master), said)
        if scheduled:
            self._write(found, "key.destruction_cancelled", destroy_at=None, reason=said)
        elif not requests:
            raise NothingPending(f"no destruction of {master.label} is pending or asked for")
        return Cancelled(scheduled, requests)

    def destroy_due(self, now: datetime) -> list[Ended]:
        """Carry out every destruction whose time has come; one that cannot be yet stays due and says why."""
        with reading(self._database) as transaction:
            rows = [row for ring in self._store.rings(transaction) for row in self._rings.versions(transaction, ring)]
        due = [row for row in rows if row.destroy_at is not None and row.destroy_at <= now and row.state is not KeyState.DESTROYED]
        ended = [self._end(RingMaster(row.ring, row.version), now) for row in due]
        return [one for one in ended if one is not None]

    def _end(self, master: RingMaster, now: datetime) -> Ended | None:
        """None where it was cancelled, or carried out, before its turn came."""
        with self._masters.alone():
            with reading(self._database) as transaction:
                row = self._rings.version(transaction, master)
            if row.destroy_at is None or row.destroy_at > now or row.state is KeyState.DESTROYED:
                return None
            return self._end_alone(row, master, now)

    def _end_alone(self, row: RingVersion, master: RingMaster, now: datetime) -> Ended:
        with reading(self._database) as transaction:
            keys = self._store.references(transaction, row.ring).get(row.version, 0)
        if keys:
            return Ended(master, "key_still_referenced", f"{keys} keys are still wrapped under {master.label}")
        found = self._officers.approved(DESTROY, self._subject(master), now)
        if found is None:
            request = self._request(master, {"versions": master.label, "delay_hours": 0, "reason": row.reason}, now)
            return Ended(master, "approvals_missing", f"the approvals are over; request {request} waits for new ones")
        try:
            self._masters.change_states({master.label: KeyState.DESTROYED}, row.reason, found.operation, found.approvals)
        except KeyVaultError as error:  # the other site is away, or still has keys under it: it stays due
            return Ended(master, error.code, str(error))
        return Ended(master)

    def _subject(self, master: RingMaster) -> bytes:
        return destruction_subject(self._cluster, [master.label])

    def _request(self, master: RingMaster, facts: Mapping[str, str | int], due: datetime) -> str:
        return self._officers.request(DESTROY, self._subject(master), facts, due + APPROVALS_LAST)

    def _write(self, old: RingVersion, action: str, *, destroy_at: datetime | None, reason: str) -> None:
        """Compare and swap of the row, with its event. Raises RowChanged."""
        changed = replace(old, destroy_at=destroy_at, reason=reason, row_version=old.row_version + 1)
        changed = replace(changed, mac=self._mac.make(RingVersion.DOMAIN, *changed.fields))
        facts: dict[str, str | int] = {"ring": old.ring, "version": old.version, "reason": reason}
        due = destroy_at or old.destroy_at
        assert due is not None
        with lasting(self._database) as transaction:
            self._store.replace_ring_version(transaction, old, changed)
            self._recorder.record(transaction, KeyEvent(action, facts | {"destroy_at": due.isoformat()}))


def _seen(row: RingVersion, keys: int, held: Container[str]) -> Version:
    master = RingMaster(row.ring, row.version)
    about = (row.state, row.created_at, row.destroy_at, row.reason)
    return Version(master, *about, keys, master.label in held, row.peer_destroy_at)


def _require_reason(reason: str) -> str:
    said = reason.strip()
    if not said:
        raise ReasonMissing
    return said


def _hours(delay: timedelta) -> int:
    return int(delay.total_seconds() // 3600)
