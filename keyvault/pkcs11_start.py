"""Starting the PKCS#11 module, one login, and the bounded pool of sessions that everything else borrows from.

A PKCS#11 module is one thing per process by its nature: one C_Initialize, one login state per token. `Module` makes that
explicit; start one, in a process that was spawned, never before a fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pkcs11

from keyvault.errors import CallFailed, HsmUnavailable, KeyNotFound, ModuleRefused, PinRejected, PromiseBroken
from keyvault.pkcs11_names import LOST_KEY, LOST_SESSION, Answer, Attribute, ObjectClass, Role
from keyvault.pkcs11_raw import RawCalls, Template

Result = TypeVar("Result")

_PIN_ANSWERS = frozenset(
    answer.name
    for answer in (Answer.PIN_INCORRECT, Answer.PIN_INVALID, Answer.PIN_LEN_RANGE, Answer.PIN_EXPIRED, Answer.PIN_LOCKED)
)


@dataclass(frozen=True)
class TokenConfig:
    """Where one token is. `folder` holds `softhsm2.conf` for SoftHSM and is None for a module that needs none."""

    module: Path
    label: str
    serial: str
    folder: Path | None = None
    sessions: int = 8
    wait_s: float = 5.0


class Module:
    """The PKCS#11 library of this process, started with OS locking. Raises HsmUnavailable where one was started already."""

    def __init__(self, path: Path, folder: Path | None) -> None:
        if not path.is_file():
            raise ModuleRefused(f"no PKCS#11 module at {path}")
        if folder is not None:
            # SoftHSM reads this at every C_Initialize; there is no other way to tell it.
            os.environ["SOFTHSM2_CONF"] = str(folder / "softhsm2.conf")
        try:
            self.calls = RawCalls(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            raise ModuleRefused(f"{path} is not a PKCS#11 module: {error}") from error
        _require_writable(self.calls.table)
        loaded: list[Any] = []
        with answers("C_Initialize"):
            self.calls.start_with_locking(lambda: loaded.append(pkcs11.lib(str(path))))
        self._library = loaded[0]
        self._started = True

    def token(self, label: str, serial: str | None = None) -> Any:
        """The one token of this label (and serial); slot numbers change from start to start. Raises HsmUnavailable."""
        with answers("C_GetTokenInfo"):
            found = [
                token
                for token in self._library.get_tokens(token_label=label)
                if serial is None or token.serial.decode(errors="replace") == serial
            ]
        if len(found) != 1:
            raise HsmUnavailable(f"{len(found)} tokens labelled {label!r} (serial {serial or 'any'}) in this module, one expected")
        return found[0]

    def empty_slot(self) -> int:
        """A slot whose token was never initialised. Raises HsmUnavailable."""
        with answers("C_GetSlotList"):
            for token in self._library.get_tokens():
                if not token.flags & pkcs11.TokenFlag.TOKEN_INITIALIZED:
                    return int(token.slot.slot_id)
        raise HsmUnavailable("the module offers no slot for a new token")

    def session(self, token: Any) -> TokenSession:
        """A new read-write session; the caller closes it."""
        with answers("C_OpenSession"):
            return TokenSession(self.calls, token.open(rw=True))

    def stop(self) -> None:
        """C_Finalize: every session and session object of this process is gone. Idempotent."""
        if self._started:
            self._started = False
            with answers("C_Finalize"):
                self._library.finalize()


@contextmanager
def starting_alone(folder: Path | None) -> Iterator[None]:
    """One start at a time on a SoftHSM token folder: of several at once, some are answered GENERAL_ERROR (2.6.1, measured)."""
    if folder is None:
        yield
        return
    descriptor = os.open(folder / ".starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TokenSession:
    """One open session, and the long-lived keys found through it: a search in a token is slow, so each is done once."""

    def __init__(self, calls: RawCalls, session: Any) -> None:
        self.calls = calls
        self.handle = int(session.handle)
        self._session = session
        self._keys: dict[tuple[str, ObjectClass, bool], int] = {}

    def find(self, template: Template) -> list[int]:
        """Handles of every object that matches all of `template`."""
        return self.calls.find(self.handle, template)

    def key(self, label: str, kind: ObjectClass, *, trusted: bool = False) -> int:
        """The one key of this name. Raises KeyNotFound, and PromiseBroken where two stand under one name."""
        name = (label, kind, trusted)
        if name not in self._keys:
            found = self.find({Attribute.CLASS: kind, Attribute.LABEL: label})
            if not found:
                raise KeyNotFound(f"the token holds no key {label!r}")
            if len(found) > 1:
                ids = ", ".join(self.calls.read(self.handle, key, Attribute.ID).hex() or "none" for key in found)
                raise PromiseBroken(f"{len(found)} keys stand under the one name {label!r} (ids {ids})")
            if trusted and self.calls.read(self.handle, found[0], Attribute.TRUSTED) != b"\x01":
                raise PromiseBroken(f"{label!r} is not TRUSTED: it was not made by the security officer")
            self._keys[name] = found[0]
        return self._keys[name]

    def forget_keys(self) -> None:
        """Find every key again when it is next used."""
        self._keys.clear()

    def close(self) -> None:
        """C_CloseSession; session objects made in it are gone."""
        with answers("C_CloseSession"):
            self._session.close()


class Token:
    """A token, logged in once for the life of the process, with at most `config.sessions` sessions for its work.

    Sessions are borrowed for one operation at a time, never across a caller's code, so that they cannot run out by nesting.
    """

    def __init__(self, module: Module, config: TokenConfig, pin: str) -> None:
        self._module = module
        self._token = module.token(config.label, config.serial)
        self._sessions, self._wait_s = config.sessions, config.wait_s
        self._pid = os.getpid()
        self._login = self.open_session()
        try:
            self._log_in(pin)
        except HsmUnavailable:
            self._login.close()
            raise
        # None is a permit to open one session: they are opened when first needed and replaced when lost.
        self._free: queue.LifoQueue[TokenSession | None] = queue.LifoQueue()
        for _ in range(config.sessions):
            self._free.put(None)
        self._open = True

    def _log_in(self, pin: str) -> None:
        flags = self._token.flags
        if flags & (pkcs11.TokenFlag.USER_PIN_FINAL_TRY | pkcs11.TokenFlag.USER_PIN_LOCKED):
            raise PinRejected("the token allows one last try or none; it was not used")
        try:
            self._module.calls.login(self._login.handle, Role.USER, pin)
        except CallFailed as error:
            if error.answer in _PIN_ANSWERS:
                raise PinRejected() from error
            raise

    def open_session(self) -> TokenSession:
        """A new session outside the pool, read-write; the caller closes it. Raises HsmUnavailable."""
        self._require_here()
        return self._module.session(self._token)

    @contextmanager
    def new_session(self) -> Iterator[TokenSession]:
        """A session outside the pool until the block ends, which has found no key yet."""
        session = self.open_session()
        try:
            yield session
        finally:
            session.close()

    def _require_here(self) -> None:
        if os.getpid() != self._pid:
            raise HsmUnavailable("the token was opened before a fork: spawn the process and open it there")

    def _logged_in_session(self) -> TokenSession:
        session = self.open_session()
        if not session.calls.is_users(session.handle):
            session.close()
            raise HsmUnavailable("the login is lost; one login is tried per start: start again")
        return session

    def run(self, operation: Callable[[TokenSession], Result]) -> Result:
        """Run one operation on a borrowed session; raises what it raises.

        Where the session or a key's handle turns out lost, the operation is tried once more, on a fresh session or with the
        keys found again. It must therefore be one that a failed first try leaves undone.
        """
        with self._borrowed() as place:
            try:
                return operation(place.session)
            except CallFailed as error:
                if not place.mend(error):
                    raise
            try:
                return operation(place.session)
            except CallFailed as error:
                place.mend(error)
                raise

    @contextmanager
    def _borrowed(self) -> Iterator[_Place]:
        self._require_here()
        if not self._open:
            raise HsmUnavailable("the token was closed")
        try:
            free = self._free.get(timeout=self._wait_s)
        except queue.Empty:
            raise HsmUnavailable(f"every session of the token was busy for {self._wait_s} s") from None
        place = _Place(self._logged_in_session, free)
        try:
            yield place
        finally:
            self._free.put(place.held)

    def close(self) -> None:
        """Let running calls end, log out and stop the module; later calls fail with HsmUnavailable. Idempotent."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        for _ in range(self._sessions):
            try:
                self._free.get(timeout=self._wait_s)
            except queue.Empty:
                return  # a call hangs in the module: to stop it under that call could end the process
        self._module.calls.logout(self._login.handle)
        self._module.stop()


class _Place:
    """One place in the pool while it is borrowed: its session, opened when first asked for."""

    def __init__(self, open_session: Callable[[], TokenSession], held: TokenSession | None) -> None:
        self._open_session = open_session
        self.held = held

    @property
    def session(self) -> TokenSession:
        if self.held is None:
            self.held = self._open_session()
        return self.held

    def mend(self, error: CallFailed) -> bool:
        """Let go of what the answer says is lost, so that the next use starts fresh. False: nothing of ours was lost."""
        if self.held is not None and error.answer in LOST_SESSION:
            with suppress(CallFailed):  # it is lost: closing it may only confirm that
                self.held.close()
            self.held = None
            return True
        if self.held is not None and error.answer in LOST_KEY:
            self.held.forget_keys()
            return True
        return False


@contextmanager
def answers(function: str) -> Iterator[None]:
    """python-pkcs11's errors in our words: CallFailed with the name of the module's answer."""
    try:
        yield
    except pkcs11.PKCS11Error as error:
        name = type(error).__name__
        answer = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() if name != "PKCS11Error" else str(error)
        raise CallFailed(function, answer) from error


def _require_writable(address: int) -> None:
    """Refuse a module whose function table cannot be patched: writing there would end the process."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, mode = line.split()[:2]
            start, end = (int(number, 16) for number in span.split("-"))
            if start <= address < end and mode.startswith("rw"):
                return
    raise HsmUnavailable("the module's function table is read-only: OS locking cannot be switched on")
