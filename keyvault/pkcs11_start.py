"""Starting the PKCS#11 module, one login, and sessions. `pkcs11_pool.py` lends the sessions and heals what is lost.

A PKCS#11 module is one thing per process by its nature: one C_Initialize, one login state per token. `Module` makes that
explicit; start one, in a process that was spawned, never before a fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pkcs11

from keyvault.errors import CallFailed, HsmTimeout, HsmUnavailable, KeyNotFound, ModuleRefused, PinRejected, PromiseBroken
from keyvault.locked import LockedBuffer
from keyvault.pin_throttle import HeldPin, PinThrottle
from keyvault.pkcs11_names import Answer, Attribute, ObjectClass, Role
from keyvault.pkcs11_raw import RawCalls, Template

_PIN_ANSWERS = frozenset(
    answer.name
    for answer in (Answer.PIN_INCORRECT, Answer.PIN_INVALID, Answer.PIN_LEN_RANGE, Answer.PIN_EXPIRED, Answer.PIN_LOCKED)
)


STARTS_S = 45.0
"""How long a start waits for others that start on the same token."""


@dataclass(frozen=True)
class TokenConfig:
    """Where one token is. `folder` holds `softhsm2.conf` for SoftHSM and is None for a module that needs none."""

    module: Path
    label: str
    serial: str
    folder: Path | None = None
    sessions: int = 8
    wait_s: float = 2.0
    """How long a caller waits for a session while all are in use, and for a recovery."""
    profile: str | None = None
    """The quirk profile by name (`keyvault/quirks.py`); None is found by what the module says about itself."""
    rotation: bool = False
    """Whether this is the token that re-wraps, in a profile without TRUSTED masters: it has a PIN of its own."""
    call_s: float = 2.0
    """How long the calls of one operation may take before they count as hanging."""


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

    @property
    def description(self) -> tuple[str, str]:
        """What the module says of itself: manufacturer and library."""
        return str(self._library.manufacturer_id), str(self._library.library_description)

    def restart(self) -> None:
        """C_Finalize and C_Initialize: every session, session object and login of this process is gone. No call may be running."""
        with suppress(CallFailed), answers("C_Finalize"):  # a module that somebody else stopped says so
            self._library.finalize()
        self._started = False
        with answers("C_Initialize"):
            self.calls.start_with_locking(self._library.initialize)
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
def starting_alone(folder: Path | None, wait_s: float = STARTS_S) -> Iterator[None]:
    """One start at a time on a SoftHSM token folder: of several at once, some are answered GENERAL_ERROR (2.6.1, measured).

    Raises HsmUnavailable where the folder is gone, and HsmTimeout where another start takes longer than `wait_s`.
    """
    if folder is None:
        yield
        return
    deadline = time.monotonic() + wait_s
    try:
        descriptor = os.open(folder / ".starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HsmUnavailable(f"the token's folder cannot be used: {error.strerror}") from error
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise HsmTimeout(f"another process has been starting on this token for {wait_s:.0f} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class TokenSession:
    """One open session, and the long-lived keys found through it: a search in a token is slow, so each is done once."""

    def __init__(self, calls: RawCalls, session: Any) -> None:
        self.calls = calls
        self.handle = int(session.handle)
        self.born = time.monotonic()
        self.alive = True
        """False once it was closed or lost: session keys made in it are gone, and their handles may mean others."""
        self._session = session
        self._keys: dict[tuple[str, ObjectClass, bool], int] = {}
        self._page: LockedBuffer | None = None

    def page(self, size: int) -> LockedBuffer:
        """Locked memory for what a call puts out, at least `size` bytes, this session's own: whoever uses it wipes it."""
        if self._page is None or self._page.size < size:
            self._page = LockedBuffer(max(size, mmap.PAGESIZE))
        return self._page

    def find(self, template: Template) -> list[int]:
        """Handles of every object that matches all of `template`."""
        return self.calls.find(self.handle, template)

    def key(self, label: str, kind: ObjectClass, *, trusted: bool = False) -> int:
        """The one key of this name. Raises KeyNotFound, and PromiseBroken where two stand under one name."""
        name = (label, kind, trusted)
        known = self._keys.get(name)
        if known is None:
            found = self.find({Attribute.CLASS: kind, Attribute.LABEL: label})
            if not found:
                raise KeyNotFound(f"the token holds no key {label!r}")
            if len(found) > 1:
                ids = ", ".join(self.calls.read(self.handle, key, Attribute.ID).hex() or "none" for key in found)
                raise PromiseBroken(f"{len(found)} keys stand under the one name {label!r} (ids {ids})")
            if trusted and self.calls.read(self.handle, found[0], Attribute.TRUSTED) != b"\x01":
                raise PromiseBroken(f"{label!r} is not TRUSTED: it was not made by the security officer")
            known = self._keys[name] = found[0]
        return known

    def forget_keys(self) -> None:
        """Find every key again when it is next used."""
        self._keys.clear()

    def close(self) -> None:
        """C_CloseSession; session objects made in it are gone."""
        self.alive = False
        with answers("C_CloseSession"):
            self._session.close()


class Token:
    """One login on a token: made anew, with one more login, where it was lost. C_Login is called once, however it ends."""

    def __init__(self, module: Module, config: TokenConfig, pin: str | HeldPin) -> None:
        """Raises HsmUnavailable, PinRejected, and PinThrottled where the token refused a PIN shortly before."""
        self.module = module
        self._token = module.token(config.label, config.serial)
        self._pid = os.getpid()
        self._throttle = PinThrottle(config.folder, config.serial)
        self._throttle.require_rested()
        self._login = self.open_session()
        try:
            self._log_in(pin if isinstance(pin, str) else pin.read())
        except HsmUnavailable:
            with suppress(CallFailed):
                self._login.close()
            raise

    def _log_in(self, pin: str) -> None:
        flags = self._token.flags
        if flags & (pkcs11.TokenFlag.USER_PIN_FINAL_TRY | pkcs11.TokenFlag.USER_PIN_LOCKED):
            raise PinRejected("the token allows one last try or none; it was not used")
        try:
            self.module.calls.login(self._login.handle, Role.USER, pin)
        except CallFailed as error:
            if error.answer in _PIN_ANSWERS:
                self._throttle.refused()
                raise PinRejected() from error
            raise
        self._throttle.accepted()

    def open_session(self) -> TokenSession:
        """A new read-write session; the caller closes it. Raises HsmUnavailable."""
        self.require_here()
        return self.module.session(self._token)

    def logged_in_session(self) -> TokenSession:
        """The same, seen to be the user's. Raises CallFailed with USER_NOT_LOGGED_IN where the login is lost."""
        session = self.open_session()
        if not session.calls.is_users(session.handle):
            session.close()
            raise CallFailed("C_GetSessionInfo", Answer.USER_NOT_LOGGED_IN.name)
        return session

    @property
    def is_here(self) -> bool:
        """Whether this is the process that logged in, not a fork of it."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        """Raises HsmUnavailable in a fork of the process that logged in."""
        if os.getpid() != self._pid:
            raise HsmUnavailable("the token was opened before a fork: spawn the process and open it there")

    def log_out(self) -> None:
        """C_Logout, for every session of this process."""
        self.module.calls.logout(self._login.handle)


@contextmanager
def answers(function: str) -> Iterator[None]:
    """python-pkcs11's errors in our words: CallFailed with the name of the module's answer."""
    try:
        yield
    except pkcs11.PKCS11Error as error:
        raise CallFailed(function, _answer_of(error)) from error


def _answer_of(error: pkcs11.PKCS11Error) -> str:
    """The answer's name: the library has a class for most, and a text or a number for the rest."""
    name = type(error).__name__
    if name != "PKCS11Error":
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
    if "not initialized" in str(error):
        return Answer.CRYPTOKI_NOT_INITIALIZED.name
    return str(error)


def _require_writable(address: int) -> None:
    """Refuse a module whose function table cannot be patched: writing there would end the process."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, mode = line.split()[:2]
            start, end = (int(number, 16) for number in span.split("-"))
            if start <= address < end and mode.startswith("rw"):
                return
    raise HsmUnavailable("the module's function table is read-only: OS locking cannot be switched on")
