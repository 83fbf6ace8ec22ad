"""Starting a token: locking proved, one login, a bounded pool, loss mended once. Each start in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_ulong, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hsm_fixtures import USER_PIN, ServingToken, copied, in_own_process

from keyvault.errors import CallFailed, HsmUnavailable, PinRejected, PinThrottled
from keyvault.hsm import KeyName, RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pin_throttle import pause_after
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_raw import RawCalls
from keyvault.pkcs11_start import Module, TokenConfig

MASTER = RingMaster("main", 1)
INITIALIZE, TOKEN_INFO, OPEN_SESSION, CLOSE_SESSION, CLOSE_ALL, LOGIN = 0, 6, 12, 13, 14, 18
FLAGS_AT = 96  # in CK_TOKEN_INFO
FINAL_TRY, LOCKED = 0x20000, 0x40000


class Watched:
    """A function of the module's table, counted on its way; `after` may change what it leaves behind. Lives as long as it."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, module: Path, place: int, arguments: int, after: Callable[..., None] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        slot = c_void_p.from_address(RawCalls(ctypes.CDLL(str(module))).table + 8 * place)
        prototype = CFUNCTYPE(c_ulong, *[c_void_p] * arguments)
        original = prototype(slot.value or 0)

        def on_the_way(*values: Any) -> int:
            self.calls.append(values)
            answer = int(original(*values))
            if after is not None:
                after(*values)
            return answer

        replacement = prototype(on_the_way)
        self.kept.append(replacement)
        slot.value = ctypes.cast(replacement, c_void_p).value


class OpenSessions:
    """How many sessions are open, counted at the module's own functions (SoftHSM does not tell)."""

    def __init__(self, module: Path) -> None:
        self._opened, self._closed = Watched(module, OPEN_SESSION, 5), Watched(module, CLOSE_SESSION, 1)

    def count(self) -> int:
        return len(self._opened.calls) - len(self._closed.calls)


def opened(config: TokenConfig, pin: str = USER_PIN) -> Pkcs11Hsm:
    return Pkcs11Hsm.open(config, pin, expected_masters=(MASTER,))


def function(hsm: Pkcs11Hsm, place: int, *arguments: int) -> int:
    table = hsm._token.token.module.calls.table
    pointer = c_void_p.from_address(table + 8 * place).value
    return int(CFUNCTYPE(c_ulong, *[c_ulong] * len(arguments))(pointer or 0)(*arguments))


def one_round(hsm: Pkcs11Hsm, buffer: LockedBuffer) -> None:
    with hsm.new_dek(MASTER) as dek:
        wrapped, sealed = dek.wrapped, dek.seal(buffer, 256, b"aad")
    with LockedBuffer(256) as target, hsm.open_dek(MASTER, wrapped) as dek:
        assert dek.open_into(sealed, b"aad", target) == 256


# What runs in a process of its own


def start_counting(config: TokenConfig) -> dict[str, Any]:
    flags: list[int] = []
    Watched(config.module, INITIALIZE, 1, lambda arguments: flags.append(c_ulong.from_address(arguments + 32).value))
    logins, sessions = Watched(config.module, LOGIN, 4), OpenSessions(config.module)
    report: dict[str, Any] = {}
    try:
        opened(config, "wrong")
    except PinRejected as error:
        report["refused"] = error.code
    report["logins"], report["sessions after the wrong PIN"] = len(logins.calls), sessions.count()
    try:
        opened(config)
    except PinThrottled as error:
        report["right PIN at once"] = (error.code, len(logins.calls))
    rest(config)
    hsm = opened(config)
    report |= {"flags": flags, "logins after the right PIN": len(logins.calls), "sessions": sessions.count()}
    try:
        Module(config.module, config.folder)
    except CallFailed as error:
        report["second module"] = str(error)
    report["mac"] = len(hsm.mac(KeyName.RECORD_MAC, b"x"))
    hsm.close()
    hsm.close()
    for name, call in (("mac", lambda: hsm.mac(KeyName.RECORD_MAC, b"x")), ("dek", lambda: one_round(hsm, LockedBuffer(256)))):
        try:
            call()
        except HsmUnavailable as error:
            report[f"{name} after close"] = error.code
    return report


def rest(config: TokenConfig) -> None:
    """As if the pause after a refused PIN were over."""
    assert config.folder is not None
    marker = config.folder / ".pin-rejected"
    note = json.loads(marker.read_text())
    marker.write_text(json.dumps(note | {"when": note["when"] - pause_after(note["refusals"])}))


def start_on_the_last_try(config: TokenConfig, flag: int) -> tuple[str, int]:
    def mark(_slot: int, info: int) -> None:
        c_ulong.from_address(info + FLAGS_AT).value |= flag

    Watched(config.module, TOKEN_INFO, 2, mark)
    logins = Watched(config.module, LOGIN, 4)
    with pytest.raises(PinRejected) as refused:
        opened(config)
    return str(refused.value), len(logins.calls)


def many_threads(config: TokenConfig, threads: int, rounds: int) -> dict[str, Any]:
    sessions = OpenSessions(config.module)
    hsm = opened(replace(config, sessions=4, wait_s=60))
    errors: list[str] = []

    def work() -> None:
        with LockedBuffer(256) as buffer:
            for number in range(rounds):
                try:
                    one_round(hsm, buffer)
                    assert len(hsm.mac(KeyName.RECORD_MAC, bytes([number]))) == 16
                    assert len(hsm.sign(KeyName.TOKEN_SIGNER, b"x")) == 64
                except Exception as error:  # noqa: BLE001 — counted, and shown by the test
                    errors.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"errors": errors[:5], "sessions": sessions.count(), "objects": len(hsm._token.run(lambda s: s.find({})))}


def after_a_fork(config: TokenConfig) -> tuple[str, int]:
    hsm = opened(config)
    hsm.mac(KeyName.RECORD_MAC, b"x")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hsm.mac(KeyName.RECORD_MAC, b"x")
            os.write(write, b"worked")
        except HsmUnavailable as error:
            os.write(write, str(error).encode())
        hsm.close()  # must not touch the parent's login
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode(), len(hsm.mac(KeyName.RECORD_MAC, b"x"))


def lose_things(config: TokenConfig) -> dict[str, Any]:
    sessions = OpenSessions(config.module)
    hsm = opened(replace(config, sessions=2))
    report: dict[str, Any] = {}
    hsm.mac(KeyName.RECORD_MAC, b"x")
    lost = hsm._token.run(lambda session: session.handle)
    function(hsm, CLOSE_SESSION, lost)
    report["mac after a lost session"] = len(hsm.mac(KeyName.RECORD_MAC, b"x"))
    report["another session"] = hsm._token.run(lambda session: session.handle) != lost
    report["sessions"] = sessions.count()
    with hsm.new_dek(MASTER) as dek:
        wrapped = dek.wrapped
    keys = hsm._token.run(lambda session: session._keys)
    keys[(MASTER.label, 4, True)] = 999_999
    with hsm.open_dek(MASTER, wrapped):
        report["key found again"] = hsm._token.run(lambda session: session.key(MASTER.label, 4, trusted=True)) != 999_999
    with hsm.open_dek(MASTER, wrapped) as dek, LockedBuffer(64) as target:
        for handle in {hsm._token.run(lambda session: session.handle) for _ in range(8)}:
            function(hsm, CLOSE_SESSION, handle)
        try:
            dek.open_into(bytes(40), b"", target)
        except HsmUnavailable as error:
            report["dek lost with its session"] = error.code
    with hsm.open_dek(MASTER, wrapped):
        report["opened again"] = True
    function(hsm, CLOSE_ALL, hsm._token.token._token.slot.slot_id)
    report["login lost"] = [len(hsm.mac(KeyName.RECORD_MAC, b"x")) for _ in range(3)]
    report["recoveries"] = hsm.figures.recoveries
    return report


def token_folder_moved(config: TokenConfig) -> list[str]:
    hsm = opened(replace(config, wait_s=0.3))
    copy = config.folder
    assert copy is not None
    hsm.mac(KeyName.RECORD_MAC, b"x")
    (copy / "objects").rename(copy / "gone")
    codes = []
    for call in (lambda: hsm.mac(KeyName.RECORD_MAC, b"x"), lambda: one_round(hsm, LockedBuffer(256))):
        try:
            call()
            codes.append("worked")
        except HsmUnavailable as error:
            codes.append(error.code)
    return codes


def busy_pool(config: TokenConfig) -> dict[str, Any]:
    hsm = opened(replace(config, sessions=1, wait_s=0.2))
    report: dict[str, Any] = {}
    entered, leave = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        entered.set()
        leave.wait(10)

    holder = threading.Thread(target=lambda: hsm._token.run(hold))
    holder.start()
    entered.wait(10)
    began = time.monotonic()
    try:
        hsm.random(1)
    except HsmUnavailable as error:
        report["busy"] = (error.code, str(error), 0.1 < time.monotonic() - began < 5)
    leave.set()
    holder.join()
    # One session is enough for any nesting: none is held across a caller's code.
    with (
        hsm.new_dek(MASTER) as one,
        hsm.new_dek(MASTER) as two,
        hsm.open_dek(MASTER, one.wrapped),
        hsm.open_dek(MASTER, two.wrapped),
    ):
        report["nested"] = len(hsm.random(8))
    return report


def close_under_load(config: TokenConfig) -> tuple[set[str], int]:
    hsm = opened(config)
    errors: set[str] = set()
    rounds: list[int] = []

    def work() -> None:
        with LockedBuffer(256) as buffer:
            try:
                while True:
                    one_round(hsm, buffer)
                    rounds.append(1)
            except HsmUnavailable as error:
                errors.add(error.code)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    time.sleep(0.3)
    hsm.close()
    for worker in workers:
        worker.join()
    return errors, len(rounds)


# The tests


def test_locking_is_proved_and_one_start_is_one_login(serving_token: ServingToken, tmp_path: Path) -> None:
    """A16: a wrong PIN is one C_Login; the next start is refused by us, without asking the token."""
    config = copied(serving_token, tmp_path / "copy")
    report = in_own_process(start_counting, config)
    assert report["right PIN at once"] == ("pin_throttled", 1)
    assert not (tmp_path / "copy" / ".pin-rejected").exists(), "an accepted PIN clears it"
    assert report["refused"] == "pin_rejected"
    assert report["logins"] == 1
    assert report["logins after the right PIN"] == 2
    assert report["flags"] == [2, 2, 2], "C_Initialize was called with CKF_OS_LOCKING_OK at each start"
    assert report["sessions after the wrong PIN"] == 0
    assert report["sessions"] == 1
    assert "OS locking" in report["second module"]
    assert report["mac"] == 16
    assert (report["mac after close"], report["dek after close"]) == ("hsm_unavailable", "hsm_unavailable")


@pytest.mark.parametrize("flag", [FINAL_TRY, LOCKED])
def test_the_last_try_is_never_used(serving_token: ServingToken, flag: int) -> None:
    message, logins = in_own_process(start_on_the_last_try, serving_token.config, flag)
    assert "not used" in message
    assert logins == 0


def test_many_threads_on_few_sessions(serving_token: ServingToken) -> None:
    """A7: 32 threads on four sessions."""
    report = in_own_process(many_threads, serving_token.config, 32, 50)
    assert report["errors"] == []
    assert report["sessions"] <= 4 + 1
    assert report["objects"] == serving_token.hsm._token.run(lambda session: len(session.find({})))


def test_a_fork_is_refused_and_does_not_harm_the_parent(serving_token: ServingToken) -> None:
    """A9: a child that inherits the module gets an error of ours."""
    said, mac = in_own_process(after_a_fork, serving_token.config)
    assert "fork" in said
    assert mac == 16


def test_lost_sessions_and_keys_are_replaced_once(serving_token: ServingToken) -> None:
    report = in_own_process(lose_things, serving_token.config)
    assert report["mac after a lost session"] == 16
    assert report["another session"]
    assert report["sessions"] <= 2 + 1
    assert report["key found again"]
    assert report["dek lost with its session"] == "hsm_unavailable"
    assert report["opened again"]
    assert report["login lost"] == [16, 16, 16]
    assert report["recoveries"] == 1


def test_a_token_folder_that_is_gone_is_unavailable_not_an_unknown_key(serving_token: ServingToken, tmp_path: Path) -> None:
    config = copied(serving_token, tmp_path / "copy")
    assert in_own_process(token_folder_moved, config) == ["hsm_unavailable", "hsm_unavailable"]


def test_a_busy_pool_answers_in_time_and_nesting_needs_one_session(serving_token: ServingToken) -> None:
    report = in_own_process(busy_pool, serving_token.config)
    assert report["busy"] == ("hsm_busy", "every session of the token was busy for 0.2 s", True)
    assert report["nested"] == 8


def test_closing_under_load_ends_calls_and_nothing_else(serving_token: ServingToken) -> None:
    errors, rounds = in_own_process(close_under_load, serving_token.config)
    assert errors == {"hsm_unavailable"}
    assert rounds > 0


def test_a_missing_module_and_a_wrong_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(HsmUnavailable, match="no PKCS#11 module"):
        Module(tmp_path / "none.so", None)
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(HsmUnavailable, match="not a PKCS#11 module"):
        Module(tmp_path / "text.so", None)
    with pytest.raises(HsmUnavailable, match="not a PKCS#11 module"):
        Module(_libc(), None)


def _libc() -> Path:
    """A shared library that is no PKCS#11 module."""
    with Path("/proc/self/maps").open() as maps:
        return Path(next(line.split()[-1] for line in maps if "libc.so" in line))


def test_a_token_of_another_serial_is_not_taken(serving_token: ServingToken) -> None:
    """A13: a token is known by label and serial; another one is refused with both named."""
    with pytest.raises(HsmUnavailable, match="0 tokens"):
        in_own_process(opened, replace(serving_token.config, serial="0000000000000000"))
