"""A real SoftHSM token behind a layer of faults: what is lost is healed once, what hangs holds nobody, what is wrong stays shut.

Each case runs in a process of its own and reports facts; load is eight threads that seal, open, sign and MAC.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from faulty_module import FaultyModule, once
from hsm_fixtures import USER_PIN, ServingToken, copied, in_own_process

from keyvault.errors import CallFailed, HsmTimeout, HsmUnavailable, KeyVaultError
from keyvault.events import KeyEvent
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import Figures, KeyName, RingMaster
from keyvault.hsm_listeners import Listeners
from keyvault.key_uses import Place
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Answer, Attribute
from keyvault.pkcs11_start import TokenConfig
from service.hsm_figures import FIGURES_PATH, hsm_finding
from service.vault.threads import Threads

MASTER = RingMaster("main", 1)
THREADS = 8
IDLE = {"C_Initialize", "C_GetSlotList", "C_GetTokenInfo"}


class Heard:
    """Everything that the door says, in order."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self.stuck: list[int] = []
        self.worn: list[Exception | None] = []

    def listeners(self, openings: int | None = None) -> Listeners:
        return Listeners(self.events.append, self.stuck.append, self.worn.append, openings)


def opened(config: TokenConfig, heard: Heard | None = None, openings: int | None = None) -> Pkcs11Hsm:
    listeners = (heard or Heard()).listeners(openings)
    return Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,), listeners=listeners)


def one_round(hsm: Pkcs11Hsm, buffer: LockedBuffer) -> None:
    with hsm.new_dek(MASTER) as dek:
        wrapped, sealed = dek.wrapped, dek.seal(buffer, 256, b"aad")
    with hsm.open_dek(MASTER, wrapped) as dek:
        assert dek.open_into(sealed, b"aad", buffer) == 256
    assert len(hsm.mac(KeyName.RECORD_MAC, b"x")) == 16
    assert len(hsm.sign(KeyName.TOKEN_SIGNER, b"x")) == 64


def answer_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except KeyVaultError as error:
        return error.code
    return "worked"


class Load:
    """Threads that work until they are stopped; each notes its failures."""

    def __init__(self, hsm: Pkcs11Hsm, threads: int = THREADS) -> None:
        self._hsm = hsm
        self._stop = threading.Event()
        self.failures: list[list[str]] = [[] for _ in range(threads)]
        self.rounds = [0] * threads
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]

    def _work(self, number: int) -> None:
        with LockedBuffer(256) as buffer:
            while not self._stop.is_set():
                try:
                    one_round(self._hsm, buffer)
                    self.rounds[number] += 1
                except KeyVaultError as error:
                    self.failures[number].append(f"{error.code}: {error}")

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(30)

    def goes_on(self, seconds: float = 20.0) -> bool:
        """Whether every thread finishes two more rounds."""
        before, deadline = list(self.rounds), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(now >= then + 2 for now, then in zip(self.rounds, before, strict=True)):
                return True
            time.sleep(0.02)
        return False


def under_load(config: TokenConfig, break_it: Callable[[FaultyModule, Pkcs11Hsm], None]) -> dict[str, Any]:
    module = FaultyModule(config.module)
    hsm = opened(replace(config, sessions=4, wait_s=5.0))
    load = Load(hsm)
    with load.running():
        before = load.goes_on()
        logins = module.calls["C_Login"]
        break_it(module, hsm)
        after = load.goes_on()
    return {
        "worked": (before, after),
        "most failures of one thread": max(len(failures) for failures in load.failures),
        "failures": [failure for failures in load.failures for failure in failures][:5],
        "logins": module.calls["C_Login"] - logins,
        "recoveries": hsm.figures.recoveries,
        "master": answer_of(lambda: hsm.new_dek(MASTER).__enter__()),
    }


# What breaks under load


def restart_the_module(module: FaultyModule, _: Pkcs11Hsm) -> None:
    with module.alone() as functions:
        functions["C_Finalize"](None)
        functions["C_Initialize"](None)


def stop_the_module(module: FaultyModule, _: Pkcs11Hsm) -> None:
    with module.alone() as functions:
        functions["C_Finalize"](None)


def move_the_token_away_and_back(_: FaultyModule, hsm: Pkcs11Hsm) -> None:
    folder = hsm._token._config.folder
    assert folder is not None
    (folder / "objects").rename(folder / "gone")
    time.sleep(0.7)
    (folder / "gone").rename(folder / "objects")


def throw_the_login_away(module: FaultyModule, _: Pkcs11Hsm) -> None:
    """As a device does that ends every session after a while without work: only C_Finalize helps."""
    started = module.calls["C_Initialize"]

    def fault(name: str) -> Answer | None:
        if name in IDLE or module.calls["C_Initialize"] > started:
            return None
        return Answer.SESSION_HANDLE_INVALID

    module.fault = fault


def fail_for_a_moment(module: FaultyModule, _: Pkcs11Hsm) -> None:
    until = time.monotonic() + 0.5
    module.fault = lambda name: Answer.DEVICE_ERROR if time.monotonic() < until else None


BREAKS = (restart_the_module, stop_the_module, move_the_token_away_and_back, throw_the_login_away, fail_for_a_moment)


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_a_loss_under_load_is_healed_once(serving_token: ServingToken, tmp_path: Path, break_it: Any) -> None:
    """A2, A3, A4: module restarted or stopped, token moved away and back, login thrown away, device errors for a while."""
    report = in_own_process(under_load, copied(serving_token, tmp_path / "copy"), break_it)
    assert report["worked"] == (True, True), report
    assert report["most failures of one thread"] <= 1, report
    assert report["recoveries"] >= 1
    assert report["logins"] <= report["recoveries"] + 1, "single flight: one login a recovery"
    assert report["master"] == "worked", "the cached handle of the master was found again"


def counted(config: TokenConfig) -> list[Figures]:
    """What a process says of its sessions, before the module ends under it and after."""
    module = FaultyModule(config.module)
    hsm = opened(config)
    guarded = GuardedHsm(hsm, Place.VAULT, lambda _: None)
    guarded.random(8)
    before = replace(guarded.figures)
    stop_the_module(module, hsm)
    guarded.random(8)
    return [before, guarded.figures]


def answered(figures: Figures) -> dict[str, int]:
    """What a vault worker with this token answers its operator."""
    from service.vault.http import create_app  # it loads every engine, and the processes of other tests import this file

    vault: Any = SimpleNamespace(hsm=SimpleNamespace(figures=figures))

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(create_app(vault, Threads(1)))
        async with httpx.AsyncClient(transport=transport, base_url="http://vault") as client:
            return dict((await client.get(FIGURES_PATH)).json())

    return asyncio.run(ask())


def test_a_recovery_raises_the_count_that_an_operator_is_shown(serving_token: ServingToken) -> None:
    before, after = in_own_process(counted, serving_token.config)
    assert answered(before) == {"sessions_replaced": 0, "recoveries": 0, "timeouts": 0}
    assert answered(after)["recoveries"] == 1
    quiet, note = (hsm_finding("vault-0", answered(figures), Path("log")) for figures in (before, after))
    assert (quiet.state, quiet.said) == ("ok", "no session was lost and no call timed out since it started")
    assert (note.state, note.figures) == ("note", asdict(after))
    assert "recoveries: 1" in note.said


def close_pooled_sessions(config: TokenConfig) -> dict[str, Any]:
    module = FaultyModule(config.module)
    hsm = opened(replace(config, sessions=4))
    load = Load(hsm)
    with load.running():
        load.goes_on()
    pooled = [place.held.handle for place in hsm._token.places if place.held is not None]
    with module.alone() as functions:
        for handle in pooled:
            functions["C_CloseSession"](handle)
    before = hsm.figures.sessions_replaced
    answers = []
    barrier = threading.Barrier(len(pooled))

    def call() -> None:
        def together(session: Any) -> bytes:
            made = session.calls.random(session.handle, 8)
            with suppress(threading.BrokenBarrierError):
                barrier.wait(5)
            return bytes(made)

        answers.append(answer_of(lambda: hsm._token.run(together)))

    threads = [threading.Thread(target=call) for _ in pooled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "pooled": len(pooled),
        "answers": [*answers, answer_of(lambda: hsm.random(8))],
        "replaced": hsm.figures.sessions_replaced - before,
        "free": len(hsm._token._free),
        "recoveries": hsm.figures.recoveries,
    }


def test_dead_sessions_leave_the_pool(serving_token: ServingToken) -> None:
    """A1: every pooled session is closed behind our back: the next calls succeed, each was replaced, the pool keeps its size."""
    report = in_own_process(close_pooled_sessions, serving_token.config)
    assert report["pooled"] == 4
    assert report["answers"] == ["worked"] * 5
    assert (report["replaced"], report["free"], report["recoveries"]) == (4, 4, 0)


def invalid_once(config: TokenConfig) -> dict[str, Any]:
    module = FaultyModule(config.module)
    hsm = opened(replace(config, sessions=1))
    hsm.mac(KeyName.RECORD_MAC, b"x")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("keyvault").addHandler(handler)
    module.fault = once("C_SignInit", Answer.SESSION_HANDLE_INVALID)
    answers = [answer_of(lambda: hsm.mac(KeyName.RECORD_MAC, b"x"))]
    module.fault = once("C_Sign", Answer.FUNCTION_FAILED)  # C_SignInit stays active in its session
    answers += [answer_of(lambda: hsm.mac(KeyName.RECORD_MAC, b"x")) for _ in range(3)]
    return {"answers": answers, "lines": lines}


def test_one_lost_session_is_one_retry_and_one_line(serving_token: ServingToken) -> None:
    """A12: answered after one retry; the log has the session's age and the answer's name. A7: no poisoned session stays."""
    report = in_own_process(invalid_once, serving_token.config)
    assert report["answers"] == ["worked", "hsm_unavailable", "worked", "worked"]
    assert "C_SignInit answered SESSION_HANDLE_INVALID" in report["lines"][0]
    assert "s old, tried once more" in report["lines"][0]
    assert "OPERATION_ACTIVE" in report["lines"][1]


# Calls that hang


def hang(config: TokenConfig) -> dict[str, Any]:
    module, heard = FaultyModule(config.module), Heard()
    hsm = opened(replace(config, sessions=4, call_s=0.4, wait_s=0.4), heard)
    leave, places = threading.Event(), threading.Semaphore(1)

    def fault(name: str) -> Answer | None:
        if name == "C_UnwrapKey" and places.acquire(blocking=False):
            leave.wait(20)
        return None

    with hsm.new_dek(MASTER) as dek:
        wrapped = dek.wrapped
    module.fault = fault
    stuck = threading.Thread(target=lambda: answer_of(lambda: hsm.open_dek(MASTER, wrapped).__enter__()), daemon=True)
    stuck.start()
    report: dict[str, Any] = {"heard": eventually(lambda: heard.stuck == [stuck.ident])}
    report["others"] = [answer_of(lambda: hsm.open_dek(MASTER, wrapped).__enter__()) for _ in range(5)]
    report["places"] = (len(hsm._token._free), hsm.figures.timeouts, list(heard.worn))
    places.release()
    more = threading.Thread(target=lambda: answer_of(lambda: hsm.open_dek(MASTER, wrapped).__enter__()), daemon=True)
    more.start()
    report["worn"] = eventually(lambda: len(heard.worn) == 1 and isinstance(heard.worn[0], HsmTimeout))
    for _ in range(2):
        places.release()
        threading.Thread(target=lambda: answer_of(lambda: hsm.open_dek(MASTER, wrapped).__enter__()), daemon=True).start()
    eventually(lambda: hsm.figures.timeouts == 4)
    began = time.monotonic()
    report["no place left"] = answer_of(lambda: hsm.random(1))
    report["at once"] = time.monotonic() - began < 0.4
    began = time.monotonic()
    hsm.close()
    report["close waits for nobody"] = time.monotonic() - began < 2
    leave.set()
    report["back"] = eventually(lambda: len(hsm._token._free) == 4)
    return report


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_a_call_that_hangs_is_seen_and_its_place_taken_out(serving_token: ServingToken) -> None:
    """A6: the waiter's thread is named in time, others go on, half the places stuck asks for another process."""
    report = in_own_process(hang, serving_token.config)
    assert report["heard"]
    assert report["others"] == ["worked"] * 5
    assert report["places"] == (3, 1, [])
    assert report["worn"]
    assert (report["no place left"], report["at once"]) == ("hsm_timeout", True)
    assert report["close waits for nobody"]
    assert report["back"], "a call that comes back after all gives its place back"


# The circuit breaker


def fail_for_long(config: TokenConfig) -> dict[str, Any]:
    module, heard = FaultyModule(config.module), Heard()
    hsm = opened(replace(config, wait_s=0.2, call_s=5.0), heard)
    module.fault = lambda _: Answer.DEVICE_ERROR
    report: dict[str, Any] = {"failing": [answer_of(lambda: hsm.random(1)) for _ in range(5)], "open": hsm.failing}
    calls = module.calls.total()
    report["at once"] = [answer_of(lambda: hsm.random(1)) for _ in range(200)]
    report["calls meanwhile"] = module.calls.total() - calls
    time.sleep(0.6)
    report["half open, and not mended"] = answer_of(lambda: hsm.random(1))
    report["then"] = hsm.failing
    module.fault = lambda _: None
    report["closed"] = eventually(lambda: answer_of(lambda: hsm.random(1)) == "worked")
    report["after"] = [answer_of(lambda: hsm.random(1)) for _ in range(10)]
    report["events"] = [event.action for event in heard.events]
    report["facts"] = [sorted(event.facts) for event in heard.events]
    return report


def test_failures_in_a_row_open_the_circuit_and_one_success_closes_it(serving_token: ServingToken) -> None:
    report = in_own_process(fail_for_long, serving_token.config)
    assert report["failing"] == ["hsm_unavailable"] * 5
    assert report["open"]
    assert report["at once"] == ["hsm_unavailable"] * 200
    assert report["calls meanwhile"] == 0
    assert (report["half open, and not mended"], report["then"]) == ("hsm_unavailable", True)
    assert report["closed"]
    assert report["after"] == ["worked"] * 10
    assert report["events"] == ["hsm.breaker_opened", "hsm.breaker_closed"], "one event each, whatever happens between"
    assert report["facts"] == [["answer", "failures"], ["failures", "seconds"]]


# PINs


def pin_refused_at_recovery(config: TokenConfig) -> dict[str, Any]:
    module, heard = FaultyModule(config.module), Heard()
    hsm = opened(config, heard)
    stop_the_module(module, hsm)
    module.fault = lambda name: Answer.PIN_INCORRECT if name == "C_Login" else None
    logins = module.calls["C_Login"]
    report: dict[str, Any] = {"answers": [answer_of(lambda: hsm.random(1)) for _ in range(20)]}
    report["logins"] = module.calls["C_Login"] - logins
    report["worn"] = [type(error).__name__ for error in heard.worn]
    report["pin"] = (repr(hsm._token._pin), hsm._token._pin.read())
    return report


def test_a_pin_refused_after_a_loss_is_never_tried_again(serving_token: ServingToken, tmp_path: Path) -> None:
    """A16: the one login that a loss allows is refused: the process stops using the token and forgets the PIN."""
    report = in_own_process(pin_refused_at_recovery, copied(serving_token, tmp_path / "copy"))
    assert report["answers"] == ["pin_rejected"] * 20
    assert report["logins"] == 1
    assert report["worn"] == ["PinRejected"]
    assert report["pin"] == ("HeldPin(…)", "")


def started_in_a_loop(config: TokenConfig, starts: int) -> tuple[Counter[str], int]:
    """A token that locks itself after three wrong PINs, and a supervisor that starts its program again and again."""
    module, tries = FaultyModule(config.module), [0]

    def fault(name: str) -> Answer | None:
        if name == "C_Login":
            tries[0] += 1
            return Answer.PIN_LOCKED if tries[0] > 3 else Answer.PIN_INCORRECT
        return None

    module.fault = fault
    answers = Counter(answer_of(lambda: Pkcs11Hsm.open(config, "wrong", expected_masters=(MASTER,))) for _ in range(starts))
    return answers, tries[0]


def test_a_loop_of_starts_cannot_lock_the_token(serving_token: ServingToken, tmp_path: Path) -> None:
    """A16: twenty starts with a wrong PIN reach the token once."""
    answers, tries = in_own_process(started_in_a_loop, copied(serving_token, tmp_path / "copy"), 20)
    assert answers == {"pin_rejected": 1, "pin_throttled": 19}
    assert tries == 1


# Handles that may mean another key


def old_handles(config: TokenConfig) -> dict[str, Any]:
    module = FaultyModule(config.module)
    hsm = opened(config)
    objects = hsm._token.run(lambda session: len(session.find({Attribute.TOKEN: True})))
    report: dict[str, Any] = {}
    with LockedBuffer(64) as buffer:
        deks = [hsm.new_dek(MASTER) for _ in range(30)]
        made = [dek.__enter__() for dek in deks]
        restart_the_module(module, hsm)
        report["sealing"] = Counter(answer_of(lambda dek=dek: dek.seal(buffer, 32, b"")) for dek in made)
        report["still there"] = {answer_of(lambda: one_round(hsm, LockedBuffer(256))) for _ in range(3)}
        report["destroying"] = Counter(answer_of(lambda dek=dek: dek.__exit__(None, None, None)) for dek in deks)
    report["objects"] = hsm._token.run(lambda session: len(session.find({Attribute.TOKEN: True}))) - objects
    report["works"] = answer_of(lambda: one_round(hsm, LockedBuffer(256)))
    return report


def test_a_key_from_before_a_recovery_is_gone_and_its_handle_harms_nothing(serving_token: ServingToken, tmp_path: Path) -> None:
    report = in_own_process(old_handles, copied(serving_token, tmp_path / "copy"))
    assert report["sealing"] == {"hsm_unavailable": 30}
    assert report["still there"] == {"worked"}
    assert report["destroying"] == {"worked": 30}
    assert (report["objects"], report["works"]) == (0, "worked"), "a new start gives old numbers to other keys"


def look_up_while_the_cache_expires(config: TokenConfig) -> set[bool]:
    hsm = opened(replace(config, sessions=4, wait_s=60))
    macs = {key: hsm.mac(key, b"proof") for key in (KeyName.RECORD_MAC, KeyName.AUDIT_PSEUDONYM)}
    publics = {key: hsm.public_key(key) for key in (KeyName.TOKEN_SIGNER, KeyName.PROVENANCE_SIGNER, KeyName.SITE_IDENTITY)}
    stop = threading.Event()

    def expire() -> None:
        while not stop.is_set():
            for place in hsm._token.places:
                if place.held is not None:
                    place.held.forget_keys()
            time.sleep(0.001)

    def look(number: int) -> bool:
        same = True
        for _ in range(20):
            same &= all(hsm.mac(key, b"proof") == mac for key, mac in macs.items())
            same &= all(hsm.public_key(key) == public for key, public in publics.items())
        return same

    expiring = threading.Thread(target=expire)
    expiring.start()
    with ThreadPoolExecutor(32) as threads:
        found = set(threads.map(look, range(32)))
    stop.set()
    expiring.join()
    return found


def test_look_ups_are_right_while_the_cache_expires(serving_token: ServingToken) -> None:
    """B5: 32 threads look up five keys while they are forgotten; each handle's proof is its own key's."""
    assert in_own_process(look_up_while_the_cache_expires, serving_token.config) == {True}


def from_an_executor(config: TokenConfig) -> int:
    hsm = opened(replace(config, wait_s=60))

    def operation(number: int) -> int:
        with LockedBuffer(256) as buffer:
            one_round(hsm, buffer)
        if number % 50 == 0:
            gc.collect()
        return 4

    async def all_of_them() -> int:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(16) as threads:
            return sum(await asyncio.gather(*(loop.run_in_executor(threads, operation, number) for number in range(250))))

    return asyncio.run(all_of_them())


def test_a_thousand_operations_from_an_executor_leave_the_process_alive(serving_token: ServingToken) -> None:
    """A10: threads of an executor under asyncio, with collections of garbage between."""
    assert in_own_process(from_an_executor, serving_token.config) == 1000


def count_openings(config: TokenConfig) -> list[Any]:
    heard = Heard()
    hsm = opened(config, heard, openings=10)
    with LockedBuffer(256) as buffer:
        for _ in range(20):
            one_round(hsm, buffer)
    return heard.worn


def test_a_set_count_of_openings_asks_for_another_process_once(serving_token: ServingToken) -> None:
    assert in_own_process(count_openings, serving_token.config) == [None]


def test_errors_of_calls_name_the_function_and_the_answer_alone() -> None:
    error = CallFailed("C_Sign", "DEVICE_ERROR")
    assert isinstance(error, HsmUnavailable)
    assert str(error) == "C_Sign answered DEVICE_ERROR"
