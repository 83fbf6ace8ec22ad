"""What happens to a ring's keys by itself: a rotation by age or by the number of keys, re-wrap, and the end of old versions.

A schedule never does what needs officers: it files their request and reminds them. It does the rest, and says what it did.
"Uses" of a version are the keys wrapped under it, for that is what a master does: openings are not counted. Each plan carries
the record MAC, so that writing the database neither starts nor stops anything.

Cryptoperiods: NIST SP 800-57 Part 1, 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from itertools import pairwise
from typing import Self

from keyvault.database import Database, Transaction
from keyvault.errors import RecordTampered, RotationPinNeeded, ScheduleInvalid, ScheduleUnknown
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import RingMaster
from keyvault.lifecycle import Lifecycle, Officers, Version
from keyvault.records import RecordMac, canonical
from keyvault.rotation import Part, Rewrapping
from keyvault.states import KeyState
from keyvault.sync.store import ScheduleRow, ScheduleStore, lasting, reading

ROTATE = "keys.rotate"
"""The kind of request that asks officers for a ring's next version; the ceremony is their answer."""
REMIND_EVERY = timedelta(days=1)
REQUEST_LASTS = timedelta(days=30)
DOMAIN = "key_schedule"


class Action(StrEnum):
    """What a schedule does."""

    ROTATE = "rotate"
    REWRAP = "rewrap"
    DESTROY = "destroy"


@dataclass(frozen=True)
class Schedule:
    """`rotate` is due by the serving version's age in days or by the keys under it; `destroy` by the days since a version was
    followed by the next, once it wraps nothing; `rewrap` whenever an old version wraps keys, at most `rate` of them a second."""

    name: str
    ring: str
    action: Action
    after_days: int | None = None
    after_keys: int | None = None
    rate: float | None = None
    last_run_at: datetime | None = None
    last_reminder_at: datetime | None = None

    def __post_init__(self) -> None:
        limits = {"days": self.after_days, "keys": self.after_keys, "rate": self.rate}
        given = {name for name, value in limits.items() if value is not None}
        allowed = {Action.ROTATE: {"days", "keys"}, Action.REWRAP: {"rate"}, Action.DESTROY: {"days"}}[self.action]
        if not self.name or not self.ring or given - allowed or any(value is not None and value <= 0 for value in limits.values()):
            raise ScheduleInvalid(f"a {self.action} schedule takes {' or '.join(sorted(allowed))}, each above 0")
        if not given and self.action is not Action.REWRAP:
            raise ScheduleInvalid(f"a {self.action} schedule needs {' or '.join(sorted(allowed))}")

    @classmethod
    def of(cls, row: ScheduleRow) -> Self:
        """From a row whose MAC was checked. Raises RecordTampered for a plan of another version of Glottis."""
        try:
            plan = json.loads(row.plan)
            action = Action(plan.pop("action"))
            return cls(row.name, action=action, last_run_at=row.last_run_at, last_reminder_at=row.last_reminder_at, **plan)
        except (ValueError, TypeError, KeyError) as error:
            raise RecordTampered(f"the schedule {row.name!r} is none that this version writes") from error

    def row(self, mac: RecordMac) -> ScheduleRow:
        """As it is stored."""
        facts = asdict(self)
        plan = {name: facts[name] for name in ("ring", "action", "after_days", "after_keys", "rate")}
        data = json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
        row = ScheduleRow(self.name, data, self.last_run_at, self.last_reminder_at)
        return replace(row, mac=mac.make(DOMAIN, *row.fields))


@dataclass(frozen=True)
class Due:
    """Something that a schedule calls for now, about this version, and why in a sentence."""

    schedule: Schedule
    master: RingMaster
    why: str


@dataclass(frozen=True)
class Done:
    """What came of it: `what` is `moved`, `scheduled`, `asked` (of officers) or `waiting` for them."""

    due: Due
    what: str
    facts: Mapping[str, str | int]


class Schedules:
    """A site's schedules. `due` only looks; `run` acts, in the site process, which the sites' locks make the only one."""

    def __init__(
        self,
        *,
        database: Database,
        mac: RecordMac,
        recorder: Recorder,
        lifecycle: Lifecycle,
        rewrapping: Rewrapping,
        officers: Officers,
        cluster: str,
    ) -> None:
        self._database, self._mac, self._recorder = database, mac, recorder
        self._lifecycle, self._rewrapping, self._officers = lifecycle, rewrapping, officers
        self._cluster, self._store = cluster, ScheduleStore()

    def all(self) -> list[Schedule]:
        """Every schedule, by name. Raises RecordTampered."""
        with reading(self._database) as transaction:
            return [Schedule.of(row) for row in self._rows(transaction).values()]

    def put(self, schedule: Schedule) -> None:
        """Set it; one of that name is replaced, and starts anew. Raises KeyNotFound for a ring that is none."""
        self._lifecycle.versions(schedule.ring)
        with lasting(self._database) as transaction:
            self._store.put_schedule(transaction, schedule.row(self._mac), self._rows(transaction).get(schedule.name))
            self._recorder.record(transaction, KeyEvent("schedule.set", _facts(schedule)))

    def remove(self, name: str) -> None:
        """End it. Raises ScheduleUnknown."""
        with lasting(self._database) as transaction:
            if not self._store.remove_schedule(transaction, name):
                raise ScheduleUnknown(f"there is no schedule {name!r}")
            self._recorder.record(transaction, KeyEvent("schedule.removed", {"name": name}))

    def due(self, now: datetime) -> list[Due]:
        """Everything that is due, without doing it."""
        found: list[Due] = []
        for schedule in self.all():
            versions = self._lifecycle.versions(schedule.ring)
            found += [Due(schedule, master, why) for master, why in _LOOKS[schedule.action](schedule, versions, now)]
        return found

    def run(self, due: Due, now: datetime) -> Done:
        """Do one thing that is due, or ask for it. Raises what the re-wrap raises; it then stays due."""
        match due.schedule.action:
            case Action.ROTATE:
                done = self._ask_for_rotation(due, now)
            case Action.DESTROY:
                done = self._retire(due, now)
            case Action.REWRAP:
                done = self._rewrap(due, now)
        self._note(done, now)
        return done

    def _ask_for_rotation(self, due: Due, now: datetime) -> Done:
        following = RingMaster(due.master.ring, due.master.version + 1)
        subject = sha256(canonical(ROTATE, self._cluster, due.master.label)).digest()
        facts: dict[str, str | int] = {"version": due.master.label, "follows": following.label, "why": due.why}
        request = self._officers.request(ROTATE, subject, facts, now + REQUEST_LASTS)
        return self._asked(due, request, now)

    def _retire(self, due: Due, now: datetime) -> Done:
        found = self._lifecycle.destroy(due.master, f"schedule {due.schedule.name}: {due.why}")
        if found.due_at is None:
            return self._asked(due, found.request, now)
        return Done(due, "scheduled", {"version": due.master.label, "destroy_at": found.due_at.isoformat()})

    def _asked(self, due: Due, request: str, now: datetime) -> Done:
        """A request waits for officers: they hear of it when it is filed, and again each day."""
        return self._told(due, {"version": due.master.label, "request": request}, now)

    def _told(self, due: Due, facts: Mapping[str, str | int], now: datetime) -> Done:
        last = due.schedule.last_reminder_at
        waits = last is not None and now - last < REMIND_EVERY
        return Done(due, "waiting" if waits else "asked", facts)

    def _rewrap(self, due: Due, now: datetime) -> Done:
        try:
            outcome = self._rewrapping.run(self._rewrapping.plan(due.master.ring), Part(), rate=due.schedule.rate)
        except RotationPinNeeded as error:  # nothing here has that PIN: people hear of it, and again each day
            return self._told(due, {"version": due.master.label, "code": error.code}, now)
        if outcome.moved == 0:  # rows that cannot be moved stay due: people hear of them, and again each day
            return self._told(due, {"version": due.master.label, "bad": len(outcome.bad), "left": outcome.left}, now)
        return Done(due, "moved", {"keys": outcome.moved, "bad": len(outcome.bad), "left": outcome.left})

    def _note(self, done: Done, now: datetime) -> None:
        if done.what == "waiting":
            return
        with lasting(self._database) as transaction:
            old = self._rows(transaction).get(done.due.schedule.name)
            if old is not None:
                plan = Schedule.of(old)
                noted = replace(plan, last_reminder_at=now) if done.what == "asked" else replace(plan, last_run_at=now)
                self._store.put_schedule(transaction, noted.row(self._mac), old)
            facts: dict[str, str | int] = {"name": done.due.schedule.name, "ring": done.due.schedule.ring, **done.facts}
            self._recorder.record(transaction, KeyEvent(f"schedule.{done.what}", facts))

    def _rows(self, transaction: Transaction) -> dict[str, ScheduleRow]:
        rows = {row.name: row for row in self._store.schedules(transaction)}
        for row in rows.values():
            self._mac.check(row.mac, DOMAIN, *row.fields)
        return rows


Look = Callable[[Schedule, list[Version], datetime], list[tuple[RingMaster, str]]]


def _rotations(schedule: Schedule, versions: list[Version], now: datetime) -> list[tuple[RingMaster, str]]:
    active = [version for version in versions if version.state is KeyState.ACTIVE]
    for version in active:
        age = (now - version.created_at).days
        if schedule.after_days is not None and age >= schedule.after_days:
            return [(version.master, f"{version.master.label} serves for {age} days")]
        if schedule.after_keys is not None and version.keys >= schedule.after_keys:
            return [(version.master, f"{version.master.label} wraps {version.keys} keys")]
    return []


def _rewraps(_: Schedule, versions: list[Version], __: datetime) -> list[tuple[RingMaster, str]]:
    active = [version.master for version in versions if version.state is KeyState.ACTIVE]
    old = sum(version.keys for version in versions if version.state in (KeyState.DEACTIVATED, KeyState.COMPROMISED))
    return [(active[0], f"older versions wrap {old} keys")] if active and old else []


def _retirements(schedule: Schedule, versions: list[Version], now: datetime) -> list[tuple[RingMaster, str]]:
    found: list[tuple[RingMaster, str]] = []
    for version, following in pairwise(versions):
        days = (now - following.created_at).days
        ended = version.state in (KeyState.DEACTIVATED, KeyState.COMPROMISED) and version.destroy_at is None
        if ended and version.keys == 0 and days >= (schedule.after_days or 0):
            found.append((version.master, f"{version.master.label} wraps nothing and was followed {days} days ago"))
    return found


_LOOKS: Mapping[Action, Look] = {Action.ROTATE: _rotations, Action.REWRAP: _rewraps, Action.DESTROY: _retirements}


def _facts(schedule: Schedule) -> dict[str, str | int]:
    limits = {"after_days": schedule.after_days, "after_keys": schedule.after_keys}
    rate = {} if schedule.rate is None else {"rate": str(schedule.rate)}
    given = {name: value for name, value in limits.items() if value is not None}
    return {"name": schedule.name, "ring": schedule.ring, "action": schedule.action.value, **given, **rate}
