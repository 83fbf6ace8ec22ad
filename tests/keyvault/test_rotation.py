"""Re-wrap on a real database: complete, resumable, safe beside other writers, and honest about what it could not move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from uuid import UUID, uuid4

import numpy as np
import pytest
from fakes import FakeHsm
from sqlalchemy import Engine, event, text

from keyvault.database import Transaction
from keyvault.errors import HsmUnavailable, KeyNotFound, KeyStateForbids, KeyVaultError, UnwrapRejected
from keyvault.events import KeyEvent
from keyvault.hsm import RingMaster, Sealed
from keyvault.keys import VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import RecordMac, RingVersion, WrappedKey
from keyvault.rotation import Outcome, Part, Rewrapping
from keyvault.states import KeyState
from keyvault.store import KeyStore

WHOLE = Part()
V1, V2, V3 = (RingMaster("main", number) for number in (1, 2, 3))


@dataclass
class Noted:
    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        assert transaction.in_transaction()
        self.events.append(event)


@dataclass
class House:
    """A token with three masters, of which the database knows those that were registered, and whatever works on them."""

    database: Engine
    hsm: FakeHsm = field(default_factory=lambda: FakeHsm([V1, V2, V3]))
    recorder: Noted = field(default_factory=Noted)
    store: KeyStore = field(default_factory=KeyStore)

    def __post_init__(self) -> None:
        self.mac = RecordMac(self.hsm)
        self.keys = VoiceKeys(self.hsm, self.store, self.recorder, self.mac)

    def ring(self, **states: KeyState) -> None:
        """The ring's versions are these, whatever they were: `v1=ACTIVE`."""
        with self.database.begin() as transaction:
            old = {version.version: version for version in self.store.ring_versions(transaction, "main")}
            for name, state in states.items():
                number = int(name[1:])
                if number not in old:
                    self.keys.rings.register(transaction, RingMaster("main", number))
                    old = {version.version: version for version in self.store.ring_versions(transaction, "main")}
                if old[number].state is not state:
                    new = replace(old[number], state=state, row_version=old[number].row_version + 1)
                    new = replace(new, mac=self.mac.make(RingVersion.DOMAIN, *new.fields))
                    self.store.replace_ring_version(transaction, old[number], new)

    def enrol(self, count: int = 1) -> list[UUID]:
        voices = [uuid4() for _ in range(count)]
        for voice in voices:
            with self.database.begin() as transaction, self.keys.create(transaction, tenant="acme", voice=voice):
                pass
        return voices

    def rows(self) -> list[WrappedKey]:
        with self.database.begin() as transaction:
            found = [
                key
                for version in (1, 2, 3)
                for key in self.store.keys_under(transaction, RingMaster("main", version), UUID(int=0), UUID(int=2**128 - 1), 10**6)
            ]
        return sorted(found, key=lambda key: key.ref.id)

    def under(self) -> dict[int, int]:
        with self.database.begin() as transaction:
            return self.store.references(transaction, "main")

    def rewrapping(self, **options) -> Rewrapping:
        return Rewrapping(self.database, self.hsm, self.store, self.recorder, self.mac, **options)

    def rewrap(self, part: Part = WHOLE, *, rate: float | None = None, tell=lambda _: None, **options) -> Outcome:
        rewrapping = self.rewrapping(**options)
        return rewrapping.run(rewrapping.plan("main"), part, rate=rate, tell=tell)

    def opens(self, voice: UUID) -> bool:
        with self.database.begin() as transaction:
            key = self.keys.current(transaction, voice)
        self.keys.open(key, [], lambda: None)
        return True

    def sql(self, statement: str, **values) -> None:
        with self.database.begin() as transaction:
            transaction.execute(text(statement), values)

    @property
    def pages(self) -> list[dict[str, str | int]]:
        return [event.facts for event in self.recorder.events if event.action == "keys.rewrapped"]


@pytest.fixture
def house(database: Engine) -> House:
    """A ring whose version 1 serves."""
    made = House(database)
    made.ring(v1=KeyState.ACTIVE)
    return made


@pytest.fixture
def rotated(house: House) -> House:
    """Ten voices under version 1, which version 2 has followed."""
    house.voices = house.enrol(10)
    house.ring(v1=KeyState.DEACTIVATED, v2=KeyState.ACTIVE)
    return house


class TestEveryKeyMoves:
    def test_and_each_stays_the_same_key(self, rotated):
        with LockedBuffer(64) as buffer, rotated.database.begin() as transaction:
            buffer.array(16)[:] = 1.5
            voice = uuid4()
            with rotated.keys.create(transaction, tenant="acme", voice=voice) as key:
                sealed = key.seal(buffer, 64, b"aad")
        rotated.ring(v2=KeyState.DEACTIVATED, v3=KeyState.ACTIVE)
        outcome = rotated.rewrap()
        assert (outcome.moved, outcome.bad, outcome.left) == (11, {}, 0)
        assert rotated.under() == {3: 11}
        with rotated.database.begin() as transaction:
            moved = rotated.keys.current(transaction, voice)
        assert moved.ref.ring_version == 3
        with LockedBuffer(64) as buffer:
            rotated.keys.open(moved, [Sealed(sealed, b"aad", buffer)], lambda: None)
            assert (buffer.view(0, 64).view(np.float32) == 1.5).all()
        assert all(rotated.opens(voice) for voice in rotated.voices)

    def test_only_what_wraps_a_key_changes(self, rotated):
        before = rotated.rows()
        rotated.rewrap()
        for old, new in zip(before, rotated.rows(), strict=True):
            kept = replace(new, ref=old.ref, blob=old.blob, row_version=old.row_version, mac=old.mac)
            assert kept == old
            assert new.ref == replace(old.ref, ring_version=2)
            assert (new.row_version, new.first_ring_version) == (2, 1)
            assert new.blob != old.blob
            rotated.mac.check(new.mac, WrappedKey.DOMAIN, *new.fields)

    def test_the_other_sites_word_stands_until_it_has_the_new_blob(self, rotated):
        with rotated.database.begin() as transaction:
            old = rotated.keys.current(transaction, rotated.voices[0])
            new = replace(old, synced=1)
            new = replace(new, mac=rotated.mac.make(WrappedKey.DOMAIN, *new.fields))
            rotated.store.replace_key(transaction, old, new)
        rotated.rewrap()
        with rotated.database.begin() as transaction:
            moved = rotated.keys.current(transaction, rotated.voices[0])
        assert (moved.synced, moved.row_version) == (1, 2)

    def test_a_rerun_is_a_no_op(self, rotated):
        """B8: a rerun is a no-op."""
        rotated.rewrap()
        before, pages = rotated.rows(), len(rotated.pages)
        assert rotated.rewrap() == Outcome()
        assert rotated.rows() == before
        assert len(rotated.pages) == pages

    def test_pages_and_parts_cover_every_row_once(self, rotated):
        plan = rotated.rewrapping().plan("main")
        moved = [rotated.rewrapping(page=2).run(plan, Part(index, 3)).moved for index in range(3)]
        assert sum(moved) == 10
        assert rotated.under() == {2: 10}

    @pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
    def test_parts_meet_without_gap_or_overlap(self, count):
        parts = [Part(index, count) for index in range(count)]
        assert (parts[0].first.int, parts[-1].last.int) == (0, 2**128 - 1)
        assert all(left.last.int + 1 == right.first.int for left, right in pairwise(parts))

    def test_compromised_versions_come_first_then_the_oldest(self, house):
        house.enrol(2)
        house.ring(v1=KeyState.DEACTIVATED, v2=KeyState.ACTIVE)
        house.enrol(2)
        house.ring(v2=KeyState.COMPROMISED, v3=KeyState.ACTIVE)
        assert [source.version for source in house.rewrapping().plan("main").sources] == [2, 1]
        house.rewrap()
        assert [page["from"] for page in house.pages] == [2, 1]
        assert house.under() == {3: 4}

    def test_each_page_is_one_event_that_names_its_range(self, rotated):
        rotated.rewrap(page=4)
        ids = [str(key.ref.id) for key in rotated.rows()]
        assert [(page["keys"], page["first"], page["last"]) for page in rotated.pages] == [
            (4, ids[0], ids[3]),
            (4, ids[4], ids[7]),
            (2, ids[8], ids[9]),
        ]
        assert all((page["ring"], page["from"], page["to"], page["bad"]) == ("main", 1, 2, 0) for page in rotated.pages)

    def test_a_page_that_cannot_be_recorded_does_not_happen(self, rotated):
        class Full:
            def record(self, transaction: Transaction, event: KeyEvent) -> None:
                raise OSError("no room")

        rewrapping = Rewrapping(rotated.database, rotated.hsm, rotated.store, Full(), rotated.mac)
        with pytest.raises(OSError, match="no room"):
            rewrapping.run(rewrapping.plan("main"), WHOLE)
        assert rotated.under() == {1: 10}


class TestTarget:
    @pytest.mark.parametrize("state", [KeyState.SUSPENDED, KeyState.COMPROMISED, KeyState.DEACTIVATED])
    def test_one_that_may_not_wrap_is_refused_before_row_one(self, rotated, state, monkeypatch):
        """B9: a target that is disabled is refused before row 1 is read."""
        rotated.ring(v2=state)
        monkeypatch.setattr(KeyStore, "keys_under", lambda *_: pytest.fail("a row was read"))
        with pytest.raises(KeyStateForbids):
            rotated.rewrap()
        assert (rotated.hsm.unwraps, rotated.under()) == (0, {1: 10})

    def test_one_that_the_token_does_not_hold_is_refused(self, rotated):
        rotated.hsm.forget(V2)
        rotated.hsm.forget(V3)  # which no row names
        with pytest.raises(HsmUnavailable):
            rotated.rewrap()
        assert rotated.under() == {1: 10}

    def test_one_that_was_made_since_is_found_in_the_token(self, house):
        house.enrol(2)
        house.hsm._serving = (V1,)  # as a process that started before the ceremony sees it
        with house.database.begin() as transaction:
            for master, state in ((V1, KeyState.DEACTIVATED), (V2, KeyState.ACTIVE)):
                house.keys.rings.mirror(transaction, master, state, datetime.now(UTC))
            house.keys.rings.mirror(transaction, V3, KeyState.PRE_ACTIVATION, datetime.now(UTC))
        assert house.rewrap() == Outcome(2)

    def test_only_the_serving_version_can_be_named(self, rotated):
        with pytest.raises(KeyStateForbids, match="ring/main/2 serves"):
            rotated.rewrapping().plan("main", target=1)
        with pytest.raises(KeyNotFound):
            rotated.rewrapping().plan("main", target=3)
        assert rotated.rewrapping().plan("main", target=2).target == V2

    def test_disabled_on_the_way_it_gets_no_further_key(self, rotated):
        """Compromise stops new wraps at once, also those of a re-wrap that runs."""

        def disable(outcome: Outcome) -> None:
            if outcome.moved == 3:
                rotated.ring(v2=KeyState.COMPROMISED)

        with pytest.raises(KeyStateForbids):
            rotated.rewrap(page=3, tell=disable)
        assert rotated.under() == {1: 7, 2: 3}

    def test_nobody_disables_it_between_check_and_commit(self, rotated):
        """The page's transaction holds the target's row: a state change waits for its COMMIT, and then stops the next page."""
        order: list[str] = []

        def suspend() -> None:
            rotated.ring(v2=KeyState.SUSPENDED)
            order.append("suspended")

        class Slow(Noted):
            def record(self, transaction: Transaction, event: KeyEvent) -> None:
                waiting.append(threads.submit(suspend))
                with pytest.raises(TimeoutError):
                    waiting[0].result(0.3)
                order.append("recorded")

        with ThreadPoolExecutor(1) as threads:
            waiting: list = []
            rewrapping = Rewrapping(rotated.database, rotated.hsm, rotated.store, Slow(), rotated.mac)
            rewrapping.run(rewrapping.plan("main"), WHOLE)
            waiting[0].result(10)
        assert order == ["recorded", "suspended"]


class TestSources:
    def test_a_suspended_one_keeps_its_keys_and_the_others_move(self, house):
        house.enrol(3)
        house.ring(v1=KeyState.DEACTIVATED, v2=KeyState.ACTIVE)
        house.enrol(2)
        house.ring(v1=KeyState.DEACTIVATED, v2=KeyState.SUSPENDED, v3=KeyState.ACTIVE)
        plan = house.rewrapping().plan("main")
        assert [(source.version, source.keys, bool(source.refusal)) for source in plan.sources] == [(1, 3, False), (2, 2, True)]
        assert plan.keys == 3
        house.rewrap()
        assert house.under() == {2: 2, 3: 3}

    def test_one_that_the_token_lost_is_named_and_never_replaced_by_another(self, rotated):
        rotated.hsm.forget(V1)
        rotated.hsm.forget(V3)  # which no row names
        (source,) = rotated.rewrapping().plan("main").sources
        assert isinstance(source.refusal, KeyNotFound)
        assert rotated.rewrap() == Outcome()

    def test_a_version_that_the_ring_never_had_is_named(self, rotated):
        rotated.sql("UPDATE wrapped_key SET ring_version = 9 WHERE dek_id = :id", id=rotated.rows()[0].ref.id)
        plan = rotated.rewrapping().plan("main")
        assert [(source.version, source.state, source.keys) for source in plan.sources] == [
            (1, KeyState.DEACTIVATED, 9),
            (9, None, 1),
        ]


class TestBadRows:
    def test_a_corrupt_and_a_foreign_row_are_named_and_the_others_move(self, house):
        """B9: one corrupt and one foreign-key row in a batch of six: four are moved, both others named."""
        house.enrol(6)
        corrupt, foreign = (key.ref.id for key in house.rows()[1:3])
        house.sql("UPDATE wrapped_key SET blob = decode(repeat('00', 40), 'hex') WHERE dek_id = :id", id=corrupt)
        self.plant(house, foreign)
        house.ring(v1=KeyState.DEACTIVATED, v2=KeyState.ACTIVE)
        told: list[int] = []
        outcome = house.rewrap(page=2, tell=lambda found: told.append(found.moved + len(found.bad)))
        assert outcome == Outcome(4, 0, {corrupt: "record_tampered", foreign: "unwrap_rejected"})
        assert house.under() == {1: 2, 2: 4}
        assert told == [2, 4, 6]
        assert sum(int(page["bad"]) for page in house.pages) == 2

    def plant(self, house: House, dek_id: UUID) -> None:
        """A row with a right MAC whose blob another master wrapped."""
        with house.database.begin() as transaction, house.hsm.new_dek(V3) as dek:
            old = house.store.key(transaction, dek_id)
            new = replace(old, blob=dek.wrapped)
            house.store.replace_key(transaction, old, replace(new, mac=house.mac.make(WrappedKey.DOMAIN, *new.fields)))

    @pytest.mark.parametrize(
        "edit",
        [
            "tenant = 'other'",
            "voice_id = '00000000-0000-0000-0000-000000000001'",
            "version = 7",
            "state = 'wide open'",
            "blob = substring(blob from 1 for 39)",
            "blob = ''",
            "first_ring_version = 2",
            "synced = 1",
            "row_version = 2",
            "mac = decode(repeat('00', 16), 'hex')",
            "mac = ''",
        ],
    )
    def test_an_edited_row_never_reaches_the_token(self, rotated, edit):
        victim = rotated.rows()[4].ref.id
        rotated.sql(f"UPDATE wrapped_key SET {edit} WHERE dek_id = :id", id=victim)
        outcome = rotated.rewrap()
        assert (outcome.moved, outcome.bad) == (9, {victim: "record_tampered"})
        assert rotated.hsm.unwraps == 9

    def test_swapped_and_replayed_blobs_never_reach_the_token(self, rotated):
        one, two, three = (key.ref.id for key in rotated.rows()[:3])
        old = rotated.rows()[2]
        rotated.rewrap()  # row three goes to version 2 …
        rotated.ring(v2=KeyState.DEACTIVATED, v3=KeyState.ACTIVE)
        swap = "UPDATE wrapped_key a SET blob = b.blob, mac = b.mac FROM wrapped_key b WHERE a.dek_id = :one AND b.dek_id = :two"
        rotated.sql(swap, one=one, two=two)
        # … and its blob and MAC of before are laid back into the row of now.
        rotated.sql("UPDATE wrapped_key SET blob = :blob, mac = :mac WHERE dek_id = :id", blob=old.blob, mac=old.mac, id=three)
        unwraps = rotated.hsm.unwraps
        outcome = rotated.rewrap()
        assert outcome.bad == {one: "record_tampered", three: "record_tampered"}
        assert rotated.hsm.unwraps - unwraps == outcome.moved == 8

    def test_a_rerun_names_them_again_and_moves_nothing(self, rotated):
        victim = rotated.rows()[0].ref.id
        self.plant(rotated, victim)
        first, again = rotated.rewrap(), rotated.rewrap()
        assert first.bad == again.bad == {victim: "unwrap_rejected"}
        assert again.moved == 0


class TestHsmFaults:
    def test_a_fault_stops_the_run_and_is_no_verdict_on_a_row(self, rotated):
        def fail(outcome: Outcome) -> None:
            rotated.hsm.fault = HsmUnavailable("unplugged")

        with pytest.raises(HsmUnavailable, match="unplugged"):
            rotated.rewrap(page=4, tell=fail)
        assert rotated.under() == {1: 6, 2: 4}
        rotated.hsm.fault = None
        assert rotated.rewrap() == Outcome(6)

    def test_a_token_that_rejects_every_key_is_at_fault_and_no_row_is(self, rotated, monkeypatch):
        """It answers a good key's unwrap as it would answer a bad one's: a key made on the spot tells the two apart."""
        monkeypatch.setattr(FakeHsm, "_unwrap", self.reject)
        with pytest.raises(HsmUnavailable, match="ring/main/1"):
            rotated.rewrap()
        assert rotated.under() == {1: 10}
        assert rotated.pages == []

    @staticmethod
    def reject(*_) -> bytes:
        raise UnwrapRejected


class TestBesideOthers:
    """B8: enrolling, speaking and erasing go on; a row that another changed is skipped, read again, and never overwritten."""

    def race(self, house: House, act: Callable[[Sequence[WrappedKey]], None]) -> Outcome:
        """Run with `act` between the reading of the first page and its writing."""
        done: list[bool] = []

        class Interrupted(KeyStore):
            def keys_under(self, *arguments) -> list[WrappedKey]:
                found = super().keys_under(*arguments)
                if not done:
                    done.append(True)
                    act(found)
                return found

        rewrapping = Rewrapping(house.database, house.hsm, Interrupted(), house.recorder, house.mac)
        return rewrapping.run(rewrapping.plan("main"), WHOLE)

    def test_an_erased_row_stays_erased(self, rotated):
        victim = rotated.rows()[3].ref.id
        outcome = self.race(rotated, lambda _: rotated.sql("DELETE FROM wrapped_key WHERE dek_id = :id", id=victim))
        assert outcome == Outcome(9)
        assert victim not in {key.ref.id for key in rotated.rows()}
        assert rotated.under() == {2: 9}

    def test_a_changed_row_is_read_again_and_keeps_the_change(self, rotated):
        victim = rotated.rows()[3].ref.id

        def change(_: Sequence[WrappedKey]) -> None:
            with rotated.database.begin() as transaction:
                old = rotated.store.key(transaction, victim)
                new = replace(old, synced=1)  # as the second site's receipt does: the row's version stays
                rotated.store.replace_key(transaction, old, replace(new, mac=rotated.mac.make(WrappedKey.DOMAIN, *new.fields)))

        outcome = self.race(rotated, change)
        assert outcome == Outcome(10)
        assert next(key for key in rotated.rows() if key.ref.id == victim).synced == 1
        assert all(rotated.opens(voice) for voice in rotated.voices)

    def test_a_row_that_another_worker_moved_is_left_to_it(self, rotated):
        outcome = self.race(rotated, lambda _: rotated.rewrap())
        assert outcome == Outcome(0)
        assert rotated.under() == {2: 10}
        assert all(rotated.opens(voice) for voice in rotated.voices)

    def test_a_voice_enrolled_under_the_old_master_is_found_by_the_next_pass(self, rotated):
        """Whoever read the old version as serving commits after the first pass."""

        def enrol_late(_: Sequence[WrappedKey]) -> None:
            with rotated.hsm.new_dek(V1) as dek:
                first = rotated.rows()[0]
                key = replace(first, ref=replace(first.ref, id=uuid4()), voice=uuid4(), blob=dek.wrapped)
            with rotated.database.begin() as transaction:
                rotated.store.add_key(transaction, replace(key, mac=rotated.mac.make(WrappedKey.DOMAIN, *key.fields)))

        assert self.race(rotated, enrol_late) == Outcome(11)
        assert rotated.under() == {2: 11}

    def test_enrolling_opening_and_erasing_meanwhile(self, rotated):
        rotated.enrol(150)  # under version 2: not touched
        rotated.ring(v2=KeyState.DEACTIVATED, v3=KeyState.ACTIVE)
        plan = rotated.rewrapping().plan("main")
        opened: list[bool] = []

        def speak() -> None:
            opened.extend(rotated.opens(voice) for voice in rotated.voices for _ in range(5))

        gone = [key.ref.id for key in rotated.rows() if key.voice not in rotated.voices][::3]

        def erase() -> None:
            for dek_id in gone:
                rotated.sql("DELETE FROM wrapped_key WHERE dek_id = :id", id=dek_id)

        with ThreadPoolExecutor(5) as threads:
            running = [threads.submit(rotated.rewrapping(page=7).run, plan, Part(index, 2)) for index in range(2)]
            speaking, erasing = threads.submit(speak), threads.submit(erase)
            enrolled = threads.submit(rotated.enrol, 20).result()
            outcomes = [future.result() for future in running]
            speaking.result()
            erasing.result()
        assert all(outcome.bad == {} and outcome.left == 0 for outcome in outcomes)
        assert rotated.under() == {3: 160 - len(gone) + 20}
        assert not {key.ref.id for key in rotated.rows()} & set(gone)
        assert len(opened) == 50
        assert all(rotated.opens(voice) for voice in (*rotated.voices, *enrolled))

    def test_a_row_that_is_changed_in_every_pass_is_counted_as_left(self, rotated):
        victim = rotated.rows()[3].ref.id

        class Restless(KeyStore):
            def keys_under(self, *arguments) -> list[WrappedKey]:
                found = super().keys_under(*arguments)
                with rotated.database.begin() as transaction:
                    old = self.key(transaction, victim)
                    new = replace(old, row_version=old.row_version + 1)
                    self.replace_key(transaction, old, replace(new, mac=rotated.mac.make(WrappedKey.DOMAIN, *new.fields)))
                return found

        rewrapping = Rewrapping(rotated.database, rotated.hsm, Restless(), rotated.recorder, rotated.mac)
        outcome = rewrapping.run(rewrapping.plan("main"), WHOLE)
        assert (outcome.moved, outcome.left) == (9, 1)


@dataclass
class Counted:
    """Operations of the token and statements of the database."""

    statements: list[str] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)


@pytest.fixture
def counted(rotated: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    found = Counted()

    def note(_connection, _cursor, statement, *_rest) -> None:
        found.statements.append(statement)

    for name in ("mac", "rewrap_many", "rewrap", "new_dek", "open_dek"):
        real = getattr(FakeHsm, name)

        def counting(self, *arguments, _real=real, _name=name):
            amount = len(arguments[0]) if _name == "rewrap_many" else 1
            found.operations[_name] = found.operations.get(_name, 0) + amount
            return _real(self, *arguments)

        monkeypatch.setattr(FakeHsm, name, counting)
    event.listen(rotated.database, "before_cursor_execute", note)
    yield found
    event.remove(rotated.database, "before_cursor_execute", note)


def test_operations_and_round_trips_are_bounded(rotated, counted):
    """B11: one unwrap and one wrap a row, two MACs; and a handful of statements a page, however many rows it has."""
    plan = rotated.rewrapping().plan("main")
    counted.statements.clear()
    counted.operations.clear()
    rotated.rewrapping(page=100).run(plan, WHOLE)
    assert counted.operations["rewrap_many"] == 10
    assert counted.operations["rewrap"] == 10  # what the fake's rewrap_many is made of
    assert "new_dek" not in counted.operations
    assert counted.operations["mac"] <= 2 * 10 + 2  # and the ring's versions, once a page
    page = [statement for statement in counted.statements if "wrapped_key" in statement or "ring_version" in statement]
    assert len(page) <= 8


class TestPace:
    def test_a_rate_is_kept_over_the_run(self, rotated):
        now, slept = [0.0], []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

        def tell(_: Outcome) -> None:
            now[0] += 0.3  # the page's own work counts

        outcome = rotated.rewrap(rate=4, clock=lambda: now[0], sleep=sleep, tell=tell)
        assert outcome.moved == 10
        assert now[0] == pytest.approx(2.5)
        assert slept == pytest.approx([0.7, 0.7, 0.2])

    def test_less_than_one_a_second_moves_one_at_a_time(self, rotated):
        slept: list[float] = []
        rotated.rewrap(rate=0.5, clock=lambda: 0.0, sleep=slept.append)
        assert slept == [2.0 * count for count in range(1, 11)]


def test_every_refusal_has_a_code_of_its_own():
    codes = {error.code for error in (KeyStateForbids, KeyNotFound, HsmUnavailable, UnwrapRejected)}
    assert len(codes) == 4
    assert KeyVaultError.code not in codes
