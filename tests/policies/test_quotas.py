"""Quotas: counted once over all workers, in the transaction that admits; what is refused uses up neither token nor quota."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from types import SimpleNamespace
from uuid import uuid4

import pytest
from house import TEXT, House
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text as sql

from policies import errors
from policies.errors import PolicyError
from policies.grants import Purpose
from policies.quotas import EVERYONE, Limits, Quota, Scope, Used, left, windows
from policies.throttle import Throttle, fresh_counters


def limit(house: House, scope: Scope, name: str, **limits: int) -> None:
    wanted = {"requests": 10**6, "characters": 10**6, "seconds": 10**6, "attempts": 10**6} | limits
    with house.database.begin() as transaction:
        house.store.insert(transaction, Quota(scope, name, **wanted, row_version=1))


def used(house: House, scope: str = "client") -> dict[str, int]:
    with house.database.connect() as connection:
        rows = connection.execute(sql("SELECT * FROM usage WHERE scope = :scope"), {"scope": scope}).mappings().all()
    return {name: sum(row[name] for row in rows) for name in ("requests", "attempts", "characters", "milliseconds")}


@pytest.fixture
def scene(house, monkeypatch):
    """One second into a minute, around noon; clients' clocks go with ours."""
    house.clock.stopped = time.time() // 86_400 * 86_400 + 43_201
    monkeypatch.setattr("policies.proofs.time", SimpleNamespace(time=house.clock))
    return house, house.client(), house.voice()


def test_what_is_admitted_is_counted_for_client_and_voice(scene):
    house, device, voice = scene
    house.gate.admit(house.speech(device, voice))
    assert used(house) == {"requests": 2, "attempts": 0, "characters": len(TEXT), "milliseconds": 0}
    assert used(house, "voice") == used(house)


def test_characters_of_a_day(scene):
    house, device, voice = scene
    limit(house, Scope.CLIENT, "app", characters=2 * len(TEXT))
    for _ in range(2):
        house.gate.admit(house.speech(device, voice))
    call = house.speech(device, voice)
    before = used(house)
    with pytest.raises(errors.QuotaExhausted):
        house.gate.admit(call)
    assert used(house) == before, "a refusal uses nothing up"
    assert house.count("used_token") == 2
    house.clock.offset = 86_400
    house.gate.admit(house.speech(device, voice))
    assert used(house)["characters"] == len(TEXT)


def test_a_voice_has_limits_of_its_own(scene):
    house, device, voice = scene
    other = house.voice()
    limit(house, Scope.VOICE, str(voice), characters=len(TEXT))
    house.gate.admit(house.speech(device, voice))
    with pytest.raises(errors.QuotaExhausted):
        house.gate.admit(house.speech(device, voice))
    house.gate.admit(house.speech(device, other))


def test_requests_of_a_minute(scene):
    house, device, _ = scene
    limit(house, Scope.CLIENT, EVERYONE, requests=3)
    house.gate.admit(house.call(device, house.token(device, Purpose.READ), Purpose.READ))
    call = house.call(device, house.token(device, Purpose.READ), Purpose.READ)
    with pytest.raises(errors.RateLimited):
        house.gate.admit(call)
    house.token(house.client("other"), Purpose.READ)
    house.clock.offset = 60
    house.token(device, Purpose.READ)


def test_an_own_limit_counts_before_everyones(scene):
    house, device, _ = scene
    limit(house, Scope.CLIENT, EVERYONE, requests=0)
    limit(house, Scope.CLIENT, "app", requests=1)
    house.token(device, Purpose.READ)
    with pytest.raises(errors.RateLimited):
        house.token(house.client("other"), Purpose.READ)


def test_a_client_named_like_a_voice_gives_it_no_limits(scene):
    house, device, voice = scene
    limit(house, Scope.CLIENT, str(voice), characters=0, requests=0)
    house.gate.admit(house.speech(device, voice))


def test_seconds_spoken_count_when_they_are_known(scene):
    house, device, voice = scene
    limit(house, Scope.VOICE, EVERYONE, seconds=2)
    grant = house.gate.admit(house.speech(device, voice))
    spent = house.store.spend(device.x5t, voice, house.clock(), milliseconds=2000)
    house.audit.complete(grant.intent_id, "spoken", {}, spent)
    assert used(house, "voice")["milliseconds"] == 2000
    with pytest.raises(errors.QuotaExhausted):
        house.token(device, Purpose.SPEAK, voice)
    house.clock.offset = 86_400
    house.token(device, Purpose.SPEAK, voice)


def test_failed_attempts_of_a_known_client(scene):
    house, device, voice = scene
    limit(house, Scope.CLIENT, "app", attempts=2)
    token = house.token(device, Purpose.SPEAK, voice)
    for _ in range(2):
        with pytest.raises(errors.TextMismatch):
            house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, text="Another."))
    with pytest.raises(errors.RateLimited):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))
    assert used(house)["attempts"] == 2, "to wait as told is no failure"
    house.clock.offset = 59
    house.token(device, Purpose.READ)


def test_failed_attempts_that_prove_nothing_cost_no_database(scene):
    house, device, voice = scene
    house.gate._throttle = Throttle(3, house.clock)
    call = house.speech(device, voice)
    forged = house.call(device, call.token[:-4] + "AAAA", Purpose.SPEAK, voice)
    for _ in range(3):
        with pytest.raises((errors.TokenInvalid, errors.TokenMalformed)):
            house.gate.admit(forged)
    with pytest.raises(errors.RateLimited):
        house.gate.admit(call)
    other = house.client("other")
    house.gate.admit(house.call(other, house.token(other, Purpose.READ), Purpose.READ))
    house.clock.offset = 60
    house.gate.admit(house.speech(device, voice))


@given(st.lists(st.text(min_size=1, max_size=8), max_size=300))
def test_the_throttle_forgets_no_failure_and_takes_no_room(certificates):
    throttle = Throttle(10**9, lambda: 60.0)
    size = len(throttle._counts)
    for certificate in certificates:
        throttle.failed(certificate)
    for certificate in set(certificates):
        counted = min(throttle._counts[place] for place in throttle._places(certificate))
        assert counted >= certificates.count(certificate)
    assert len(throttle._counts) == size


def test_parallel_requests_are_counted_once_over_all(scene):
    house, device, voice = scene
    limit(house, Scope.CLIENT, "app", characters=5 * len(TEXT))
    calls = [house.speech(device, voice) for _ in range(12)]

    def outcome(call):
        try:
            house.gate.admit(call)
        except PolicyError as refusal:
            return refusal.code
        return "admitted"

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(outcome, calls))
    assert sorted(outcomes) == ["admitted"] * 5 + ["quota_exhausted"] * 7
    assert used(house)["characters"] == 5 * len(TEXT)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE quota SET characters = characters + 1", "UPDATE quota SET name = '*'", "UPDATE quota SET scope = 'voice', name = '*'"],
)
def test_a_limit_edited_in_the_database_opens_nothing(scene, statement):
    house, device, voice = scene
    limit(house, Scope.CLIENT, "app")
    call = house.speech(device, voice)
    house.edit(statement)
    with pytest.raises(errors.AuthorityRowTampered):
        house.gate.admit(call)


def test_use_that_the_database_does_not_count_stops_everything(scene):
    house, device, voice = scene
    call = house.speech(device, voice)
    house.edit("CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    house.edit("CREATE TRIGGER lose BEFORE INSERT OR UPDATE ON usage FOR EACH ROW EXECUTE FUNCTION lose()")
    with pytest.raises(errors.AuditUnavailable):
        house.gate.admit(call)
    assert house.count("used_token") == 0


AMOUNT = st.integers(0, 10**6)
LIMITS = st.builds(Limits, AMOUNT, AMOUNT, AMOUNT, AMOUNT)
USED = st.builds(Used, AMOUNT, AMOUNT, AMOUNT, AMOUNT)


@given(LIMITS, LIMITS, USED, USED)
def test_whoever_has_least_decides(client, voice, by_client, of_voice):
    alone = left({Scope.CLIENT: client, Scope.VOICE: voice}, {Scope.CLIENT: by_client})
    both = left({Scope.CLIENT: client, Scope.VOICE: voice}, {Scope.CLIENT: by_client, Scope.VOICE: of_voice})
    assert all(less <= more for less, more in zip(astuple(both), astuple(alone), strict=True))
    assert both.attempts == alone.attempts == client.attempts - by_client.attempts


@given(st.floats(0, 2**32))
def test_windows_begin_with_the_minute_and_the_day(now):
    minute, day = windows(now)
    assert minute.timestamp() <= now < minute.timestamp() + 60
    assert day.timestamp() <= now < day.timestamp() + 86_400
    assert (minute.second, day.hour, day.minute) == (0, 0, 0)


def test_setting_a_quota_needs_somebody_to_set_it_for(scene):
    house, device, voice = scene
    with house.database.begin() as transaction:
        with pytest.raises(errors.ClientUnknown):
            house.registry.set_quota(transaction, Scope.CLIENT, "nobody", Limits())
        with pytest.raises(errors.VoiceUnknown):
            house.registry.set_quota(transaction, Scope.VOICE, str(uuid4()), Limits())
        house.registry.set_quota(transaction, Scope.VOICE, EVERYONE, Limits(characters=10**6))
        house.registry.set_quota(transaction, Scope.VOICE, str(voice), Limits(characters=0))
        assert house.registry.set_quota(transaction, Scope.VOICE, str(voice), Limits(characters=len(TEXT))).row_version == 2
    house.gate.admit(house.speech(device, voice))
    with pytest.raises(errors.QuotaExhausted):
        house.gate.admit(house.speech(device, voice))


def failing(path, clock, times: int) -> None:
    throttle = Throttle.shared(10, clock, path)
    for _ in range(times):
        throttle.failed("one")


def test_failed_attempts_are_counted_once_over_all_workers(tmp_path):
    """Four processes at once: none of their failures is lost, and each of them sees the others'."""
    path, moment = tmp_path / "attempts", 120.0
    path.write_bytes(fresh_counters())
    workers = [multiprocessing.get_context("fork").Process(target=failing, args=(path, lambda: moment, 500)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    throttle = Throttle.shared(10, lambda: moment, path)
    assert min(throttle._counts[place] for place in throttle._places("one")) == 2000
    with pytest.raises(errors.RateLimited):
        throttle.require("one")
    throttle.require("another")
    Throttle.shared(10, lambda: moment + 60, path).require("one")


def test_a_worker_whose_clock_is_just_behind_forgets_nothing(tmp_path):
    path = tmp_path / "attempts"
    path.write_bytes(fresh_counters())
    ahead, behind = Throttle.shared(1, lambda: 120.0, path), Throttle.shared(1, lambda: 119.9, path)
    ahead.failed("one")
    for throttle in (behind, ahead):
        with pytest.raises(errors.RateLimited):
            throttle.require("one")


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_file_that_is_none_of_ours_is_not_counted_in(tmp_path, content):
    (tmp_path / "attempts").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        Throttle.shared(1, time.time, tmp_path / "attempts")
    with pytest.raises(OSError):
        Throttle.shared(1, time.time, tmp_path / "missing")
