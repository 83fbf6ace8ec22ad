"""A voice's keys on a real token and a real database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

import numpy as np
import pytest
import sqlalchemy
from fakes import FakeHsm
from hsm_fixtures import ServingToken
from sqlalchemy import Engine, text

from keyvault.database import Transaction
from keyvault.errors import HsmUnavailable, KeyNotFound, KeyStateForbids, RecordTampered, RowChanged, SealBroken, UnwrapRejected
from keyvault.events import KeyEvent
from keyvault.hsm import Hsm, RingMaster, Sealed
from keyvault.keys import VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import RecordMac, RingVersion
from keyvault.states import KeyState
from keyvault.store import KeyStore


@dataclass
class Noted:
    """A recorder that keeps what it was told."""

    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        assert transaction.in_transaction()
        self.events.append(event)


class Refused(Exception):
    pass


def keys_over(hsm: Hsm, recorder: Noted | None = None) -> VoiceKeys:
    return VoiceKeys(hsm, KeyStore(), recorder or Noted(), RecordMac(hsm))


@pytest.fixture
def recorder() -> Noted:
    return Noted()


@pytest.fixture
def keys(serving_token: ServingToken, database: Engine, recorder: Noted) -> VoiceKeys:
    made = keys_over(serving_token.hsm, recorder)
    with database.begin() as transaction:
        made.rings.register(transaction, RingMaster("main", 1))
    return made


def enrol(keys: VoiceKeys, database: Engine, voice: UUID, number: float = 1.5) -> bytes:
    with database.begin() as transaction, LockedBuffer(64) as buffer:
        buffer.array(16)[:] = number
        with keys.create(transaction, tenant="acme", voice=voice) as key:
            return key.seal(buffer, 64, str(voice).encode())


def nothing() -> None:
    """A check that lets everything pass."""


def test_a_voice_is_sealed_stored_found_and_opened(keys: VoiceKeys, database: Engine, recorder: Noted) -> None:
    voice = uuid4()
    sealed = enrol(keys, database, voice)
    with database.begin() as transaction:
        key = keys.current(transaction, voice)
        assert keys.get(transaction, key.ref.id) == key
    assert (key.ref.version, key.ref.ring, key.ref.ring_version, key.tenant, key.voice) == (1, "main", 1, "acme", voice)
    with LockedBuffer(64) as buffer:
        keys.open(key, [Sealed(sealed, str(voice).encode(), buffer)], nothing)
        assert (buffer.view(0, 64).view(np.float32) == 1.5).all()
    assert [event.action for event in recorder.events] == ["master.created", "key.created"]
    assert recorder.events[1].facts["dek"] == str(key.ref.id)


def test_a_block_that_fails_stores_and_records_nothing(keys: VoiceKeys, database: Engine, recorder: Noted) -> None:
    voice = uuid4()
    with database.begin() as transaction:
        with pytest.raises(Refused), keys.create(transaction, tenant="acme", voice=voice):
            raise Refused
        with pytest.raises(KeyNotFound):
            keys.current(transaction, voice)
    assert [event.action for event in recorder.events] == ["master.created"]


def test_a_recorder_that_fails_takes_the_key_with_it(serving_token: ServingToken, keys: VoiceKeys, database: Engine) -> None:
    class Full:
        def record(self, transaction: Transaction, event: KeyEvent) -> None:
            raise Refused

    voice = uuid4()
    unrecorded = VoiceKeys(serving_token.hsm, KeyStore(), Full(), RecordMac(serving_token.hsm))
    with pytest.raises(Refused), database.begin() as transaction, unrecorded.create(transaction, tenant="acme", voice=voice):
        pass
    with database.begin() as transaction, pytest.raises(KeyNotFound):
        keys.current(transaction, voice)


def test_versions_count_up_and_are_never_used_again(keys: VoiceKeys, database: Engine) -> None:
    voice = uuid4()
    first = enrol(keys, database, voice, 1.0)
    enrol(keys, database, voice, 2.0)
    with database.begin() as transaction:
        newest = keys.current(transaction, voice)
    assert newest.ref.version == 2
    with LockedBuffer(64) as buffer, pytest.raises(SealBroken):
        keys.open(newest, [Sealed(first, str(voice).encode(), buffer)], nothing)


def test_two_transactions_cannot_make_the_same_version(keys: VoiceKeys, database: Engine) -> None:
    voice = uuid4()
    slow, fast = database.connect(), database.connect()
    with slow, fast:
        begun = slow.begin()
        with (
            pytest.raises(RowChanged),
            keys.create(slow, tenant="acme", voice=voice),
            fast.begin(),
            keys.create(fast, tenant="acme", voice=voice) as made,
        ):
            pass
        begun.rollback()
        with fast.begin():
            assert keys.current(fast, voice).ref == made.ref


def test_a_missing_key_is_not_found(keys: VoiceKeys, database: Engine) -> None:
    enrol(keys, database, uuid4())
    with database.begin() as transaction:
        for find in (keys.current, keys.get):
            with pytest.raises(KeyNotFound):
                find(transaction, uuid4())


@pytest.mark.parametrize(
    "edit",
    [
        "tenant = 'other'",
        "voice_id = '00000000-0000-0000-0000-000000000001'",
        "version = 7",
        "ring = 'other'",
        "ring_version = 9",
        "state = 'deactivated'",
        "state = 'wide open'",
        "blob = decode(repeat('00', 40), 'hex')",
        "created_at = created_at + interval '1 microsecond'",
        "row_version = 2",
        "mac = decode(repeat('00', 16), 'hex')",
        "mac = ''",
        "dek_id = '00000000-0000-0000-0000-000000000002'",
    ],
)
def test_an_edited_row_is_refused_before_any_unwrap(keys: VoiceKeys, database: Engine, edit: str) -> None:
    enrol(keys, database, uuid4())
    with database.begin() as transaction:
        transaction.execute(text(f"UPDATE wrapped_key SET {edit}"))
        dek_id, voice = transaction.execute(text("SELECT dek_id, voice_id FROM wrapped_key")).one()
        with pytest.raises(RecordTampered):
            keys.get(transaction, dek_id)
        with pytest.raises(RecordTampered):
            keys.current(transaction, voice)


def test_two_rows_blobs_swapped_are_refused(keys: VoiceKeys, database: Engine) -> None:
    one, two = uuid4(), uuid4()
    enrol(keys, database, one)
    enrol(keys, database, two)
    swap = "UPDATE wrapped_key a SET blob = b.blob, mac = b.mac FROM wrapped_key b WHERE a.dek_id <> b.dek_id"
    with database.begin() as transaction:
        assert transaction.execute(text(swap)).rowcount == 2
        for voice in (one, two):
            with pytest.raises(RecordTampered):
                keys.current(transaction, voice)


def test_open_checks_mac_then_state_then_the_grant_then_unwraps(database: Engine) -> None:
    hsm = FakeHsm()
    keys = keys_over(hsm)
    with database.begin() as transaction:
        keys.rings.register(transaction, RingMaster("main", 1))
    voice = uuid4()
    enrol(keys, database, voice)
    with database.begin() as transaction:
        key = keys.current(transaction, voice)
    seen: list[str] = []

    def refuse() -> None:
        seen.append("checked")
        raise Refused

    with pytest.raises(RecordTampered):
        keys.open(replace(key, state=KeyState.SUSPENDED), [], refuse)
    suspended = replace(key, state=KeyState.SUSPENDED)
    suspended = replace(suspended, mac=RecordMac(hsm).make("wrapped_key", *suspended.fields))
    with pytest.raises(KeyStateForbids):
        keys.open(suspended, [], refuse)
    assert seen == []
    with pytest.raises(Refused):
        keys.open(key, [], refuse)
    assert (seen, hsm.unwraps) == (["checked"], 0)
    keys.open(key, [], nothing)
    assert hsm.unwraps == 1


def test_a_key_of_another_master_is_rejected_by_the_token(keys: VoiceKeys, database: Engine, serving_token: ServingToken) -> None:
    """A row with a right MAC and a blob that the master never wrapped: only the token can tell, and it does."""
    voice = uuid4()
    enrol(keys, database, voice)
    with database.begin() as transaction:
        key = replace(keys.current(transaction, voice), blob=bytes(40))
    key = replace(key, mac=RecordMac(serving_token.hsm).make("wrapped_key", *key.fields))
    with pytest.raises(UnwrapRejected):
        keys.open(key, [], nothing)


def test_compare_and_swap_refuses_the_second_writer(keys: VoiceKeys, database: Engine) -> None:
    voice = uuid4()
    enrol(keys, database, voice)
    store = KeyStore()
    with database.begin() as transaction:
        old = store.key(transaction, keys.current(transaction, voice).ref.id)
        assert old is not None
        new = replace(old, row_version=2, blob=b"new")
        store.replace_key(transaction, old, new)
        with pytest.raises(RowChanged):
            store.replace_key(transaction, old, replace(old, row_version=2, blob=b"late"))
        assert store.key(transaction, old.ref.id) == new


class TestRings:
    def test_registering_twice_changes_nothing(self, keys: VoiceKeys, database: Engine, recorder: Noted) -> None:
        with database.begin() as transaction:
            keys.rings.register(transaction, RingMaster("main", 1))
            assert keys.rings.serving(transaction, "main") == RingMaster("main", 1)
        assert [event.action for event in recorder.events] == ["master.created"]

    def test_two_that_register_at_once_both_succeed_and_one_records_it(self, database: Engine) -> None:
        master, recorder = RingMaster("main", 1), Noted()
        rings = keys_over(FakeHsm([master]), recorder).rings

        def register() -> None:
            with database.begin() as transaction:
                rings.register(transaction, master)

        with ThreadPoolExecutor(1) as thread:
            with database.begin() as transaction:
                rings.register(transaction, master)
                late = thread.submit(register)
                with pytest.raises(TimeoutError):
                    late.result(0.5)  # it found no version, and waits for the first to commit its own
            late.result(10)
        with database.begin() as transaction:
            assert rings.serving(transaction, "main") == master
        assert [event.action for event in recorder.events] == ["master.created"]

    @pytest.mark.parametrize(("mac", "error"), [(None, RecordTampered), ("right", RowChanged)])
    def test_what_another_registered_at_once_must_be_whole_and_active(
        self, database: Engine, mac: str | None, error: type[Exception]
    ) -> None:
        master = RingMaster("main", 1)
        hsm, store = FakeHsm([master]), KeyStore()
        rings = keys_over(hsm).rings

        def register() -> None:
            with database.begin() as transaction:
                rings.register(transaction, master)

        with ThreadPoolExecutor(1) as thread:
            with database.begin() as transaction:
                rings.register(transaction, master)
                late = thread.submit(register)
                with pytest.raises(TimeoutError):
                    late.result(0.5)
                found = store.ring_versions(transaction, "main")[0]
                other = replace(found, state=KeyState.SUSPENDED)
                if mac:
                    other = replace(other, mac=RecordMac(hsm).make(RingVersion.DOMAIN, *other.fields))
                store.replace_ring_version(transaction, found, other)
            with pytest.raises(error):
                late.result(10)

    def test_a_master_that_the_token_lacks_is_not_registered(self, keys: VoiceKeys, database: Engine) -> None:
        with database.begin() as transaction, pytest.raises(KeyNotFound):
            keys.rings.register(transaction, RingMaster("main", 2))

    def test_an_unknown_ring_is_not_found(self, keys: VoiceKeys, database: Engine) -> None:
        with database.begin() as transaction, pytest.raises(KeyNotFound):
            keys.rings.serving(transaction, "other")

    @pytest.mark.parametrize("edit", ["state = 'deactivated'", "version = 2", "row_version = 5", "mac = ''", "state = '?'"])
    def test_an_edited_ring_row_stops_new_keys(self, keys: VoiceKeys, database: Engine, edit: str) -> None:
        with database.begin() as transaction:
            transaction.execute(text(f"UPDATE ring_version SET {edit}"))
            with pytest.raises(RecordTampered), keys.create(transaction, tenant="acme", voice=uuid4()):
                pass

    def test_the_newest_version_serves_and_no_older_one_instead(self, database: Engine) -> None:
        old, new = RingMaster("main", 1), RingMaster("main", 2)
        hsm = FakeHsm([old, new])
        rings = keys_over(hsm).rings
        with database.begin() as transaction:
            rings.register(transaction, old)
            assert rings.serving(transaction, "main") == old
            rings.register(transaction, new)
            assert rings.serving(transaction, "main") == new
        hsm.forget(new)
        with database.begin() as transaction, pytest.raises(HsmUnavailable, match="main/2"):
            rings.serving(transaction, "main")


def test_the_unique_constraint_stands(database: Engine) -> None:
    found = {tuple(c["column_names"]) for c in sqlalchemy.inspect(database).get_unique_constraints("wrapped_key")}
    assert ("voice_id", "version") in found
