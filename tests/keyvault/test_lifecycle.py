"""A master version's states, its destruction with a delay, and the alert when a pending one is used. Real database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from fakes import FakeHsm
from sqlalchemy import Engine, text

from keyvault.approvals import Approval, Operation
from keyvault.database import Transaction
from keyvault.errors import (
    DelayTooShort,
    HsmUnavailable,
    KeyNotFound,
    KeyStateForbids,
    NothingPending,
    ReasonMissing,
    RecordTampered,
    RowChanged,
)
from keyvault.events import KeyEvent
from keyvault.hsm import RingMaster
from keyvault.keys import VoiceKeys
from keyvault.lifecycle import Approved, Cancelled, Ended, Lifecycle, PendingUse
from keyvault.records import RecordMac
from keyvault.states import FOLLOWS, KeyState
from keyvault.store import KeyStore
from keyvault.sync.statement import DESTROY, destruction_subject

V1, V2 = RingMaster("main", 1), RingMaster("main", 2)
OTHER = RingMaster("other", 1)
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
WEEK = timedelta(days=7)


@dataclass
class Noted:
    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        assert transaction.in_transaction()
        self.events.append(event)

    def of(self, action: str) -> list[dict[str, str | int]]:
        return [event.facts for event in self.events if event.action == action]


@dataclass
class OneSite:
    """The agreed change of a cluster of one: written into the rows at once."""

    keys: VoiceKeys
    database: Engine
    changes: list[tuple[dict[str, KeyState], str, Operation | None]] = field(default_factory=list)
    fault: Exception | None = None
    before: Callable[[], object] = lambda: None
    """What happens while somebody waits for the turn."""
    voted: set[str] = field(default_factory=set)

    @contextmanager
    def alone(self):
        before, self.before = self.before, lambda: None
        before()
        yield

    def ending(self, label: str) -> bool:
        return label in self.voted

    def change_states(
        self, states: Mapping[str, KeyState], reason: str, operation: Operation | None = None, approvals: Sequence[Approval] = ()
    ) -> None:
        if self.fault:
            raise self.fault
        self.changes.append((dict(states), reason, operation))
        with self.database.begin() as transaction:
            for label, state in states.items():
                self.keys.rings.mirror(transaction, RingMaster.named(label), state, START, reason=reason)


@dataclass
class Desk:
    """The officers: what they were asked, and what they have signed."""

    signed: dict[tuple[str, bytes], Approved] = field(default_factory=dict)
    asked: list[tuple[str, bytes, Mapping[str, str | int], datetime]] = field(default_factory=list)

    def approved(self, kind: str, subject: bytes, now: datetime) -> Approved | None:
        found = self.signed.get((kind, subject))
        return None if found is None or (found.operation and found.operation.expires_at <= now) else found

    def request(self, kind: str, subject: bytes, description: Mapping[str, str | int], expires_at: datetime) -> str:
        self.asked.append((kind, subject, description, expires_at))
        return subject.hex()

    def withdraw(self, kind: str, subject: bytes, reason: str) -> tuple[str, ...]:
        asked = [one for one in self.asked if one[:2] == (kind, subject)]
        self.asked = [one for one in self.asked if one not in asked]
        return (subject.hex(),) if self.signed.pop((kind, subject), None) or asked else ()

    def sign(self, label: str, expires_at: datetime = START + timedelta(days=21)) -> Operation:
        subject = destruction_subject("cluster-1", [label])
        operation = Operation("cluster-1", DESTROY, subject, "site/a", bytes(16), expires_at)
        self.signed[DESTROY, subject] = Approved(operation)
        return operation


class House:
    def __init__(self, database: Engine) -> None:
        self.database, self.hsm, self.recorder, self.store = database, FakeHsm([V1, V2, OTHER]), Noted(), KeyStore()
        self.mac = RecordMac(self.hsm)
        self.keys = VoiceKeys(self.hsm, self.store, self.recorder, self.mac)
        self.masters, self.desk, self.now = OneSite(self.keys, database), Desk(), START
        with database.begin() as transaction:
            for master in (V1, V2, OTHER):
                self.keys.rings.mirror(transaction, master, KeyState.ACTIVE, START)
            self.keys.rings.mirror(transaction, V1, KeyState.DEACTIVATED, START)
        self.lifecycle = Lifecycle(
            database=database,
            hsm=self.hsm,
            store=self.store,
            recorder=self.recorder,
            masters=self.masters,
            officers=self.desk,
            cluster="cluster-1",
            clock=lambda: self.now,
        )

    def state(self, master: RingMaster = V2) -> KeyState:
        return self.version(master).state

    def version(self, master: RingMaster):
        return next(version for version in self.lifecycle.versions(master.ring) if version.master == master)

    def put(self, master: RingMaster, state: KeyState) -> None:
        with self.database.begin() as transaction:
            self.keys.rings.mirror(transaction, master, state, START)

    def enrol(self) -> None:
        with self.database.begin() as transaction, self.keys.create(transaction, tenant="acme", voice=uuid4()):
            pass


@pytest.fixture
def house(database: Engine) -> House:
    return House(database)


class TestStates:
    def test_suspend_and_resume(self, house):
        house.lifecycle.suspend(V2, "a laptop was lost")
        assert (house.state(), house.version(V2).reason) == (KeyState.SUSPENDED, "a laptop was lost")
        with pytest.raises(KeyStateForbids):
            house.enrol()
        house.lifecycle.resume(V2, "found")
        assert house.state() is KeyState.ACTIVE
        house.enrol()

    @pytest.mark.parametrize("state", [state for state in KeyState if state is not KeyState.SUSPENDED])
    def test_only_a_suspended_one_resumes(self, house, state):
        """B17: a version that was retired never serves again under its number; going back needs a new one."""
        house.put(V2, state)
        with pytest.raises(KeyStateForbids):
            house.lifecycle.resume(V2, "back to it")
        assert house.masters.changes == []

    def test_compromise_stops_new_wraps_and_what_is_moved_first(self, house):
        house.lifecycle.compromise(V2, "the token was stolen")
        assert house.state() is KeyState.COMPROMISED
        with pytest.raises(KeyStateForbids):
            house.enrol()

    @pytest.mark.parametrize("reason", ["", "  "])
    @pytest.mark.parametrize("act", ["suspend", "resume", "deactivate", "compromise", "destroy", "cancel"])
    def test_every_change_needs_a_reason(self, house, act, reason):
        house.put(V1, KeyState.SUSPENDED)
        with pytest.raises(ReasonMissing):
            getattr(house.lifecycle, act)(V1, reason)
        assert house.masters.changes == []

    @pytest.mark.parametrize("state", list(KeyState))
    @pytest.mark.parametrize(
        ("act", "target"),
        [("suspend", KeyState.SUSPENDED), ("deactivate", KeyState.DEACTIVATED), ("compromise", KeyState.COMPROMISED)],
    )
    def test_only_steps_of_the_standard_are_proposed(self, house, state, act, target):
        house.put(V2, state)
        if target in FOLLOWS[state] or target is state:
            getattr(house.lifecycle, act)(V2, "because")
            assert len(house.masters.changes) == (target is not state)
        else:
            with pytest.raises(KeyStateForbids):
                getattr(house.lifecycle, act)(V2, "because")
            assert house.masters.changes == []

    def test_what_the_sites_refuse_changes_nothing(self, house):
        house.masters.fault = HsmUnavailable("unplugged")
        with pytest.raises(HsmUnavailable):
            house.lifecycle.suspend(V2, "because")
        assert house.state() is KeyState.ACTIVE

    def test_an_edited_row_is_no_ground_to_act_on(self, house):
        with house.database.begin() as transaction:
            transaction.execute(text("UPDATE ring_version SET state = 'suspended' WHERE version = 2"))
        with pytest.raises(RecordTampered):
            house.lifecycle.resume(V2, "because")

    def test_an_unknown_version_or_ring_is_not_found(self, house):
        with pytest.raises(KeyNotFound):
            house.lifecycle.suspend(RingMaster("main", 9), "because")
        with pytest.raises(KeyNotFound):
            house.lifecycle.versions("none")

    def test_a_change_names_exactly_one_version(self, house):
        """B16: what is changed is the named version alone: no other version, ring, key or token object."""
        house.enrol()
        with house.database.begin() as transaction:
            before = transaction.execute(text("SELECT * FROM wrapped_key ORDER BY dek_id")).all()
        others = [version for version in house.lifecycle.versions() if version.master != V2]
        held = house.hsm.held()
        house.lifecycle.deactivate(V2, "because")
        assert [set(states) for states, *_ in house.masters.changes] == [{"ring/main/2"}]
        assert [version for version in house.lifecycle.versions() if version.master != V2] == others
        with house.database.begin() as transaction:
            assert transaction.execute(text("SELECT * FROM wrapped_key ORDER BY dek_id")).all() == before
        assert house.hsm.held() == held


class TestVersions:
    def test_each_with_its_keys_and_whether_it_is_held(self, house):
        house.enrol()
        house.hsm.forget(V1)
        shown = {version.master: (version.state, version.keys, version.held) for version in house.lifecycle.versions()}
        assert shown == {
            V1: (KeyState.DEACTIVATED, 0, False),
            V2: (KeyState.ACTIVE, 1, True),
            OTHER: (KeyState.ACTIVE, 0, True),
        }


class TestDestruction:
    def test_without_approval_a_request_is_filed_and_nothing_pends(self, house):
        found = house.lifecycle.destroy(V1, "retired")
        assert found.due_at is None
        ((kind, subject, facts, expires_at),) = house.desk.asked
        assert (kind, subject) == (DESTROY, destruction_subject("cluster-1", ["ring/main/1"]))
        assert found.request == subject.hex()
        assert facts == {"versions": "ring/main/1", "delay_hours": 168, "reason": "retired"}
        assert expires_at > START + WEEK, "the signatures outlive the delay"
        assert house.version(V1).destroy_at is None

    def test_approved_it_waits_its_delay_and_is_destroyed(self, house):
        operation = house.desk.sign("ring/main/1")
        assert house.lifecycle.destroy(V1, "retired").due_at == START + WEEK
        assert house.version(V1).destroy_at == START + WEEK
        assert house.lifecycle.destroy_due(START + WEEK - timedelta(seconds=1)) == []
        assert house.lifecycle.destroy_due(START + WEEK) == [Ended(V1)]
        assert house.masters.changes == [({"ring/main/1": KeyState.DESTROYED}, "retired", operation)]
        assert (house.state(V1), house.version(V1).destroy_at) == (KeyState.DESTROYED, None)
        assert house.lifecycle.destroy_due(START + WEEK) == []
        assert [facts["version"] for facts in house.recorder.of("key.destruction_scheduled")] == [1]

    def test_asked_again_it_keeps_its_time(self, house):
        house.desk.sign("ring/main/1")
        due = house.lifecycle.destroy(V1, "retired").due_at
        house.now += timedelta(days=1)
        assert house.lifecycle.destroy(V1, "again", timedelta(days=30)).due_at == due

    def test_a_pending_one_can_be_cancelled_and_scheduled_anew(self, house):
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        assert house.lifecycle.cancel(V1, "still needed").scheduled
        assert house.version(V1).destroy_at is None
        assert house.lifecycle.destroy_due(START + 2 * WEEK) == []
        with pytest.raises(NothingPending):
            house.lifecycle.cancel(V1, "still needed")
        assert house.lifecycle.destroy(V1, "now really").due_at is None, "what officers signed for was cancelled"
        house.desk.sign("ring/main/1")
        assert house.lifecycle.destroy(V1, "now really").due_at == START + WEEK
        assert [facts["reason"] for facts in house.recorder.of("key.destruction_cancelled")] == ["still needed"]

    def test_one_that_is_cancelled_while_its_end_waits_for_its_turn_stays(self, house):
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        house.masters.before = lambda: house.lifecycle.cancel(V1, "still needed")
        assert house.lifecycle.destroy_due(START + WEEK) == []
        assert house.masters.changes == []
        assert house.version(V1).destroy_at is None

    def test_what_this_site_voted_for_is_cancelled_no_more(self, house):
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        house.masters.voted.add("ring/main/1")
        with pytest.raises(KeyStateForbids):
            house.lifecycle.cancel(V1, "still needed")
        assert house.version(V1).destroy_at == START + WEEK
        assert house.desk.signed

    def test_one_that_officers_are_only_asked_for_is_withdrawn(self, house):
        request = house.lifecycle.destroy(V1, "retired").request
        assert house.lifecycle.cancel(V1, "still needed") == Cancelled(scheduled=False, requests=(request,))
        assert house.desk.asked == []
        with pytest.raises(NothingPending):
            house.lifecycle.cancel(V1, "still needed")

    @pytest.mark.parametrize("state", [KeyState.ACTIVE, KeyState.SUSPENDED, KeyState.DESTROYED])
    def test_one_that_is_in_use_or_gone_is_refused(self, house, state):
        house.put(V1, state)
        house.desk.sign("ring/main/1")
        with pytest.raises(KeyStateForbids):
            house.lifecycle.destroy(V1, "retired")

    def test_the_delay_has_a_least_that_is_set(self, house):
        house.desk.sign("ring/main/1")
        with pytest.raises(DelayTooShort):
            house.lifecycle.destroy(V1, "retired", WEEK - timedelta(hours=1))
        assert house.version(V1).destroy_at is None

    def test_none_given_is_the_least_that_is_set_where_that_is_longer_than_a_week(self, house):
        house.lifecycle._least_delay = 2 * WEEK
        house.desk.sign("ring/main/1")
        assert house.lifecycle.destroy(V1, "retired").due_at == START + 2 * WEEK

    def test_it_retires_only_at_zero_references(self, house):
        """B13: the old version ends only when no row refers to it, by query at the moment it is due."""
        house.put(V2, KeyState.SUSPENDED)
        house.put(V1, KeyState.ACTIVE)
        house.enrol()
        house.put(V1, KeyState.DEACTIVATED)
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        (ended,) = house.lifecycle.destroy_due(START + WEEK)
        assert (ended.master, ended.code) == (V1, "key_still_referenced")
        assert house.masters.changes == []
        with house.database.begin() as transaction:
            transaction.execute(text("DELETE FROM wrapped_key"))
        assert house.lifecycle.destroy_due(START + WEEK) == [Ended(V1)]

    def test_while_the_other_site_is_away_it_stays_due(self, house):
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        house.masters.fault = HsmUnavailable("site b does not answer")
        assert house.lifecycle.destroy_due(START + WEEK) == [Ended(V1, "hsm_unavailable", "site b does not answer")]
        house.masters.fault = None
        assert house.lifecycle.destroy_due(START + WEEK) == [Ended(V1)]

    def test_approvals_that_ran_out_are_asked_for_again(self, house):
        house.desk.sign("ring/main/1", START + timedelta(days=1))
        house.lifecycle.destroy(V1, "retired")
        (ended,) = house.lifecycle.destroy_due(START + WEEK)
        assert ended.code == "approvals_missing"
        assert len(house.desk.asked) == 1
        assert house.masters.changes == []

    def test_two_that_schedule_at_once_write_one_time(self, house):
        house.desk.sign("ring/main/1")
        with house.database.begin() as transaction:
            old = house.keys.rings.version(transaction, V1)
        house.lifecycle.destroy(V1, "retired")
        with pytest.raises(RowChanged):
            house.lifecycle._write(old, "key.destruction_scheduled", destroy_at=START, reason="late")
        assert house.version(V1).destroy_at == START + WEEK


class TestUseOfAPendingOne:
    """B19: use of a key that is scheduled for destruction is reported, and its references are shown."""

    def test_reported_once_a_minute_and_version(self, house):
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        alerts = PendingUse(house.recorder, lambda: house.now)
        for seconds in (0, 1, 59, 60, 61, 125):
            house.now = START + timedelta(seconds=seconds)
            with house.database.begin() as transaction:
                for master in (V1, V2):
                    alerts.note(transaction, house.keys.rings.version(transaction, master))
        told = house.recorder.of("key.pending_destruction_used")
        assert [(facts["ring"], facts["version"], facts["destroy_at"]) for facts in told] == [
            ("main", 1, (START + WEEK).isoformat())
        ] * 3

    def test_finding_a_voices_key_under_it_reports_it(self, house):
        house.enrol()
        house.put(V2, KeyState.DEACTIVATED)
        house.desk.sign("ring/main/2")
        house.lifecycle.destroy(V2, "retired")
        for _ in range(3):
            with house.database.begin() as transaction:
                (voice,) = transaction.scalars(text("SELECT voice_id FROM wrapped_key"))
                house.keys.current(transaction, voice)
        assert [facts["version"] for facts in house.recorder.of("key.pending_destruction_used")] == [2]

    def test_its_references_are_shown(self, house):
        house.put(V2, KeyState.SUSPENDED)
        house.put(V1, KeyState.ACTIVE)
        house.enrol()
        house.put(V1, KeyState.DEACTIVATED)
        house.desk.sign("ring/main/1")
        house.lifecycle.destroy(V1, "retired")
        assert (house.version(V1).keys, house.version(V1).destroy_at) == (1, START + WEEK)
