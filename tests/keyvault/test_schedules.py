"""Schedules: due by age and by keys, what they do alone, and what they only ask officers for. Real database."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from test_lifecycle import START, V1, V2, House

from keyvault.errors import KeyNotFound, RecordTampered, RowChanged, ScheduleInvalid, ScheduleUnknown
from keyvault.lifecycle import Approved
from keyvault.records import RingVersion
from keyvault.rotation import Rewrapping
from keyvault.schedules import ROTATE, Action, Schedule, Schedules
from keyvault.states import KeyState
from keyvault.sync.statement import DESTROY
from keyvault.sync.store import ScheduleStore

DAY = timedelta(days=1)


class Ring(House):
    """A ring whose version 2 followed version 1, and its schedules."""

    def __init__(self, database: Engine) -> None:
        super().__init__(database)
        rewrapping = Rewrapping(database, self.hsm, self.store, self.recorder, self.mac)
        self.schedules = Schedules(
            database=database,
            mac=self.mac,
            recorder=self.recorder,
            lifecycle=self.lifecycle,
            rewrapping=rewrapping,
            officers=self.desk,
            cluster="cluster-1",
        )

    def enrol_under(self, master, count: int) -> None:
        states = {version.master: version.state for version in self.lifecycle.versions("main")}
        self.put(V2, KeyState.SUSPENDED)
        self.put(master, KeyState.ACTIVE)
        for _ in range(count):
            self.enrol()
        for known, state in states.items():
            self.put(known, state)

    def due(self, now=START) -> list[tuple[str, str]]:
        return [(due.schedule.name, due.master.label) for due in self.schedules.due(now)]

    def run(self, now=START) -> list[tuple[str, dict]]:
        return [(done.what, dict(done.facts)) for done in (self.schedules.run(due, now) for due in self.schedules.due(now))]


@pytest.fixture
def ring(database: Engine) -> Ring:
    return Ring(database)


class TestKept:
    def test_set_listed_replaced_and_removed(self, ring):
        first = Schedule("yearly", "main", Action.ROTATE, after_days=365)
        ring.schedules.put(first)
        ring.schedules.put(Schedule("move", "main", Action.REWRAP, rate=200.0))
        assert ring.schedules.all() == [Schedule("move", "main", Action.REWRAP, rate=200.0), first]
        ring.schedules.put(replace(first, after_days=90))
        assert ring.schedules.all()[1].after_days == 90
        ring.schedules.remove("yearly")
        assert [schedule.name for schedule in ring.schedules.all()] == ["move"]
        assert [facts["name"] for facts in ring.recorder.of("schedule.set")] == ["yearly", "move", "yearly"]
        assert len(ring.recorder.of("schedule.removed")) == 1
        with pytest.raises(ScheduleUnknown):
            ring.schedules.remove("yearly")

    @pytest.mark.parametrize(
        "limits",
        [
            {"action": Action.ROTATE},
            {"action": Action.DESTROY},
            {"action": Action.ROTATE, "after_days": 0},
            {"action": Action.ROTATE, "after_keys": -1},
            {"action": Action.ROTATE, "after_days": 5, "rate": 1.0},
            {"action": Action.REWRAP, "after_days": 5},
            {"action": Action.REWRAP, "rate": 0.0},
            {"action": Action.DESTROY, "after_keys": 5},
            {"action": Action.REWRAP, "name": ""},
        ],
    )
    def test_one_that_says_nothing_is_refused(self, limits):
        with pytest.raises(ScheduleInvalid):
            Schedule(**{"name": "x", "ring": "main", **limits})

    def test_a_ring_that_is_none_is_refused(self, ring):
        with pytest.raises(KeyNotFound):
            ring.schedules.put(Schedule("x", "none", Action.REWRAP))

    @pytest.mark.parametrize(
        "edit",
        ["plan = convert_to(replace(convert_from(plan, 'UTF8'), '365', '1'), 'UTF8')", "last_run_at = now()", "name = 'other'"],
    )
    def test_an_edited_one_neither_runs_nor_stays_silent(self, ring, edit):
        ring.schedules.put(Schedule("yearly", "main", Action.ROTATE, after_days=365))
        with ring.database.begin() as transaction:
            transaction.execute(text(f"UPDATE key_schedule SET {edit}"))
        with pytest.raises(RecordTampered):
            ring.schedules.due(START)

    def test_two_that_change_it_at_once_do_not_lose_one(self, ring):
        ring.schedules.put(Schedule("move", "main", Action.REWRAP))
        with ring.database.begin() as transaction:
            (old,) = ScheduleStore().schedules(transaction)
        ring.schedules.put(Schedule("move", "main", Action.REWRAP, rate=5.0))
        with pytest.raises(RowChanged), ring.database.begin() as transaction:
            ScheduleStore().put_schedule(transaction, Schedule("move", "main", Action.REWRAP).row(ring.mac), old)
        assert ring.schedules.all()[0].rate == 5.0


class TestRotate:
    def test_due_by_age_of_the_serving_version_alone(self, ring):
        ring.schedules.put(Schedule("quarterly", "main", Action.ROTATE, after_days=90))
        assert ring.due(START + 90 * DAY - timedelta(seconds=1)) == []
        assert ring.due(START + 90 * DAY) == [("quarterly", "ring/main/2")]

    def test_due_by_the_keys_under_it(self, ring):
        ring.schedules.put(Schedule("full", "main", Action.ROTATE, after_keys=2))
        ring.enrol_under(V1, 2)
        ring.enrol()
        assert ring.due() == []
        ring.enrol()
        assert ring.due() == [("full", "ring/main/2")]

    def test_it_asks_officers_and_reminds_them_daily_and_rotates_nothing(self, ring):
        ring.schedules.put(Schedule("quarterly", "main", Action.ROTATE, after_days=90))
        late, before = START + 91 * DAY, ring.lifecycle.versions()
        assert [what for what, _ in ring.run(late)] == ["asked"]
        assert [what for what, _ in ring.run(late + timedelta(hours=23))] == ["waiting"]
        assert [what for what, _ in ring.run(late + DAY)] == ["asked"]
        kinds = {kind for kind, *_ in ring.desk.asked}
        facts = ring.desk.asked[0][2]
        assert (kinds, facts["version"], facts["follows"]) == ({ROTATE}, "ring/main/2", "ring/main/3")
        assert len({subject for _, subject, *_ in ring.desk.asked}) == 1, "one request, however often it is asked"
        assert ring.lifecycle.versions() == before
        assert len(ring.recorder.of("schedule.asked")) == 2

    def test_another_ring_is_another_matter(self, ring):
        """B16: a schedule of one ring touches no other."""
        ring.schedules.put(Schedule("quarterly", "other", Action.ROTATE, after_days=90))
        assert ring.due(START + 91 * DAY) == [("quarterly", "ring/other/1")]


class TestRewrap:
    def test_it_moves_what_older_versions_wrap(self, ring):
        ring.enrol_under(V1, 3)
        ring.schedules.put(Schedule("move", "main", Action.REWRAP))
        assert ring.run() == [("moved", {"keys": 3, "bad": 0, "left": 0})]
        assert ring.due() == []
        assert ring.schedules.all()[0].last_run_at == START

    def test_rows_that_cannot_be_moved_are_told_once_a_day(self, ring):
        ring.enrol_under(V1, 1)
        with ring.database.begin() as transaction:
            transaction.execute(text("UPDATE wrapped_key SET mac = decode(repeat('00', 16), 'hex')"))
        ring.schedules.put(Schedule("move", "main", Action.REWRAP))
        assert [what for what, _ in ring.run()] == ["asked"]
        assert [what for what, _ in ring.run(START + timedelta(hours=23))] == ["waiting"]
        assert [what for what, _ in ring.run(START + DAY)] == ["asked"]

    def test_nothing_is_due_where_no_version_serves(self, ring):
        ring.enrol_under(V1, 1)
        ring.schedules.put(Schedule("move", "main", Action.REWRAP))
        ring.put(V2, KeyState.SUSPENDED)
        assert ring.due() == []


class TestDestroy:
    """B13: old versions go by themselves after days, and only those that wrap nothing."""

    @pytest.fixture
    def aged(self, ring: Ring) -> Ring:
        ring.schedules.put(Schedule("retire", "main", Action.DESTROY, after_days=30))
        with ring.database.begin() as transaction:
            old = ring.keys.rings.version(transaction, V2)
            new = replace(old, created_at=START + 10 * DAY)
            ring.store.replace_ring_version(transaction, old, replace(new, mac=ring.mac.make(RingVersion.DOMAIN, *new.fields)))
        return ring

    def test_due_by_the_days_since_it_was_followed(self, aged):
        assert aged.due(START + 40 * DAY - timedelta(seconds=1)) == []
        assert aged.due(START + 40 * DAY) == [("retire", "ring/main/1")]

    def test_never_while_it_wraps_a_key(self, aged):
        aged.enrol_under(V1, 1)
        assert aged.due(START + 400 * DAY) == []

    def test_it_asks_officers_first_and_schedules_once_they_signed(self, aged):
        aged.now = late = START + 41 * DAY
        assert [what for what, _ in aged.run(late)] == ["asked"]
        assert aged.version(V1).destroy_at is None
        aged.desk.signed[DESTROY, aged.desk.asked[0][1]] = Approved()
        assert [what for what, _ in aged.run(late + timedelta(hours=1))] == ["scheduled"]
        assert aged.version(V1).destroy_at == late + timedelta(days=7)
        assert aged.due(late) == []
