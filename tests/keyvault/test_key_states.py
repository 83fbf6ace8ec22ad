"""What a ring version's state allows a worker to do with the keys under it: at once, on every worker, by name."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from fakes import FakeHsm
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from test_keys import Noted, nothing

from keyvault.errors import (
    HsmUnavailable,
    KeyCompromised,
    KeyDestroyed,
    KeyNotFound,
    KeyStateForbids,
    PromiseBroken,
    RecordTampered,
)
from keyvault.hsm import RingMaster
from keyvault.keys import FoundKey, VoiceKeys
from keyvault.records import RecordMac
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.errors import AwaitingSync

ONE, TWO, THREE = (RingMaster("main", number) for number in (1, 2, 3))


class Worker:
    """One vault worker of a site; all of them share the token and the database."""

    def __init__(self, hsm: FakeHsm, database: Engine, **options: object) -> None:
        self.keys = VoiceKeys(hsm, KeyStore(), Noted(), RecordMac(hsm), site="a", **options)
        self.database = database

    def state(self, master: RingMaster, state: KeyState) -> None:
        with self.database.begin() as transaction:
            self.keys.rings.mirror(transaction, master, state, datetime.now(UTC))

    def enrol(self) -> UUID:
        voice = uuid4()
        with self.database.begin() as transaction, self.keys.create(transaction, tenant="acme", voice=voice):
            pass
        return voice

    def find(self, voice: UUID) -> FoundKey:
        with self.database.begin() as transaction:
            return self.keys.current(transaction, voice)

    def open(self, voice: UUID, **options: object) -> None:
        self.keys.open(self.find(voice), [], nothing, **options)


@pytest.fixture
def hsm() -> FakeHsm:
    return FakeHsm([ONE, TWO])


@pytest.fixture
def worker(hsm: FakeHsm, database: Engine) -> Worker:
    worker = Worker(hsm, database)
    worker.state(ONE, KeyState.ACTIVE)
    return worker


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        (KeyState.SUSPENDED, KeyStateForbids, "key_state_forbids"),
        (KeyState.COMPROMISED, KeyCompromised, "key_compromised"),
        (KeyState.DESTROYED, KeyDestroyed, "key_destroyed"),
        (KeyState.PRE_ACTIVATION, KeyStateForbids, "key_state_forbids"),
    ],
)
def test_a_version_that_was_closed_opens_nothing_at_once_on_every_worker(
    worker: Worker, hsm: FakeHsm, database: Engine, state: KeyState, error: type[Exception], code: str
) -> None:
    """B14: no worker keeps what it knew."""
    voice, others = worker.enrol(), [Worker(hsm, database) for _ in range(3)]
    for other in others:
        other.open(voice)
    worker.state(ONE, state)
    before = hsm.unwraps
    for other in others:
        with pytest.raises(error) as refused:
            other.open(voice)
        assert refused.value.code == code
    assert hsm.unwraps == before
    worker.state(ONE, KeyState.DEACTIVATED)
    for other in others:
        other.open(voice)


def test_a_voices_own_key_that_was_disabled_is_refused_at_once(worker: Worker, hsm: FakeHsm, database: Engine) -> None:
    """B14."""
    voice, other = worker.enrol(), Worker(hsm, database)
    other.open(voice)
    store = KeyStore()
    with database.begin() as transaction:
        key = store.newest_key(transaction, voice)
        assert key is not None
        new = replace(key, state=KeyState.SUSPENDED, row_version=2)
        store.replace_key(transaction, key, replace(new, mac=RecordMac(hsm).make(new.DOMAIN, *new.fields)))
    with pytest.raises(KeyStateForbids):
        other.open(voice)


def test_under_a_compromised_version_only_broken_glass_opens(worker: Worker) -> None:
    voice = worker.enrol()
    worker.state(ONE, KeyState.COMPROMISED)
    asked: list[str] = []

    def refused() -> None:
        raise PermissionError("no officer allowed this voice")

    with pytest.raises(PermissionError):
        worker.open(voice, break_glass=refused)
    worker.open(voice, break_glass=lambda: asked.append("asked"))
    assert asked == ["asked"]
    worker.state(ONE, KeyState.DESTROYED)
    with pytest.raises(KeyDestroyed):
        worker.open(voice, break_glass=lambda: asked.append("destroyed"))
    worker.state(ONE, KeyState.ACTIVE)
    worker.open(voice, break_glass=lambda: asked.append("needless"))
    assert asked == ["asked"]


def test_nothing_new_is_wrapped_but_under_the_active_version(worker: Worker, hsm: FakeHsm) -> None:
    worker.state(TWO, KeyState.PRE_ACTIVATION)
    assert worker.find(worker.enrol()).ref.ring_version == 1
    worker.state(ONE, KeyState.DEACTIVATED)
    worker.state(TWO, KeyState.ACTIVE)
    assert worker.find(worker.enrol()).ref.ring_version == 2
    for state in (KeyState.SUSPENDED, KeyState.COMPROMISED, KeyState.DEACTIVATED, KeyState.DESTROYED):
        worker.state(TWO, state)
        with pytest.raises(KeyStateForbids):
            worker.enrol()


def test_a_state_can_not_change_under_a_key_that_is_being_made(worker: Worker, database: Engine) -> None:
    """Who counts a version's references after it was closed counts this one too."""
    with (
        database.begin() as transaction,
        worker.keys.create(transaction, tenant="acme", voice=uuid4()),
        database.connect() as other,
        other.begin(),
    ):
        other.execute(text("SET LOCAL lock_timeout = '100ms'"))
        with pytest.raises(DBAPIError, match="lock timeout"):
            other.execute(text("UPDATE ring_version SET state = 'deactivated'"))
    worker.state(ONE, KeyState.DEACTIVATED)


def test_a_master_that_came_after_the_start_is_found_by_one_look(worker: Worker, hsm: FakeHsm) -> None:
    hsm.install(THREE)
    worker.state(ONE, KeyState.DEACTIVATED)
    worker.state(THREE, KeyState.ACTIVE)
    worker.state(TWO, KeyState.DEACTIVATED)
    assert THREE not in hsm.masters()
    worker.open(worker.enrol())
    assert THREE in hsm.masters()


def test_a_master_that_is_not_there_is_looked_for_once_and_named(worker: Worker, hsm: FakeHsm) -> None:
    """Another version is never used instead."""
    worker.state(TWO, KeyState.DEACTIVATED)
    voice = worker.enrol()
    hsm.forget(ONE)
    looks: list[object] = []
    refresh = hsm.refresh
    hsm.refresh = lambda allowed, required: (looks.append(allowed), refresh(allowed, required))  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(KeyNotFound, match="site a's token does not hold ring/main/1") as refused:
            worker.open(voice)
        assert refused.value.code == "key_version_not_found"
        with pytest.raises(HsmUnavailable, match="site a's token"):
            worker.enrol()
    assert looks == [(ONE, TWO)]
    worker.state(ONE, KeyState.SUSPENDED)
    worker.state(ONE, KeyState.ACTIVE)
    with pytest.raises(KeyNotFound):
        worker.open(voice)
    assert len(looks) == 2, "its row changed: perhaps it was brought back"


def test_a_key_under_a_version_that_nobody_knows_is_not_found(worker: Worker, database: Engine) -> None:
    voice = worker.enrol()
    with database.begin() as transaction:
        transaction.execute(text("DELETE FROM ring_version"))
    with pytest.raises(KeyNotFound, match="main/1"):
        worker.open(voice)


def test_an_edited_state_opens_nothing(worker: Worker, database: Engine) -> None:
    voice = worker.enrol()
    worker.state(ONE, KeyState.DEACTIVATED)
    with database.begin() as transaction:
        transaction.execute(text("UPDATE ring_version SET state = 'active'"))
    for use in (lambda: worker.open(voice), worker.enrol):
        with pytest.raises(RecordTampered):
            use()


def test_a_trusted_object_that_no_row_names_stops_the_look(worker: Worker, hsm: FakeHsm) -> None:
    worker.state(TWO, KeyState.DEACTIVATED)
    voice = worker.enrol()
    key = hsm._token[ONE]
    hsm.forget(ONE)
    hsm.install(ONE, key)
    hsm.install(RingMaster("planted", 1))
    with pytest.raises(PromiseBroken, match="planted"):
        worker.open(voice)


def test_a_key_that_not_every_site_signed_for_waits(hsm: FakeHsm, database: Engine) -> None:
    worker, alone = Worker(hsm, database, receipts=True), Worker(hsm, database)
    worker.state(ONE, KeyState.ACTIVE)
    voice = worker.enrol()
    with pytest.raises(AwaitingSync):
        worker.open(voice)
    alone.open(voice)
    store = KeyStore()
    with database.begin() as transaction:
        key = store.newest_key(transaction, voice)
        assert key is not None
        new = replace(key, synced=1)
        store.replace_key(transaction, key, replace(new, mac=RecordMac(hsm).make(new.DOMAIN, *new.fields)))
    worker.open(voice)
