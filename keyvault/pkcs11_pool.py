"""The bounded pool of sessions that every operation borrows from, and the healing of what is lost: once, by one thread.

Three kinds of loss, told by the module's answer: a session (another is opened), a key's handle (it is found again), or the
login, token or module (the module is started again, with one more login and the audit of the start). An operation is then
tried once more. Nothing is retried beyond that; failures in a row open a circuit breaker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TypeVar

from keyvault.breaker import Breaker
from keyvault.errors import (
    CallFailed,
    HsmBusy,
    HsmTimeout,
    HsmUnavailable,
    KeyGone,
    KeyVaultError,
    PinRejected,
    PromiseBroken,
    SessionKeyGone,
)
from keyvault.hsm import Figures
from keyvault.pin_throttle import HeldPin
from keyvault.pkcs11_names import LOST, LOST_KEY, LOST_SESSION
from keyvault.pkcs11_places import FreePlaces, Place
from keyvault.pkcs11_start import Module, Token, TokenConfig, TokenSession, starting_alone

Result = TypeVar("Result")

NOT_AGAIN_S = 30.0
"""After a recovery a key that is still not there is not looked for by another one for so long."""
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class SessionPool:
    """At most `config.sessions` sessions of one login. Methods may be called from any thread.

    Sessions are borrowed for one operation at a time, never across a caller's code, so that they cannot run out by nesting.
    """

    def __init__(
        self, module: Module, config: TokenConfig, pin: str, breaker: Breaker, fatal: Callable[[KeyVaultError], None]
    ) -> None:
        """Log in. `fatal` hears, once, what no retry of this process can mend. Raises HsmUnavailable, PinRejected."""
        self.token = Token(module, config, pin)
        self.figures = Figures()
        self._free = FreePlaces()
        self.places = [Place(self._free.give) for _ in range(config.sessions)]
        for place in self.places:
            self._free.give(place)
        self.audit: Callable[[TokenSession], object] = lambda _: None
        """Asked of the token after each recovery, as at start; what it raises, nothing is served after."""
        self._module, self._config, self._pin, self._breaker, self._fatal = module, config, HeldPin(pin), breaker, fatal
        self._open = True
        self._generation = 0
        self._healing = threading.Lock()
        self._healed = -NOT_AGAIN_S
        self.healing_since, self.healing_thread = 0.0, 0
        self._refused: KeyVaultError | None = None

    def run(self, operation: Callable[[TokenSession], Result]) -> Result:
        """Run one operation on a borrowed session; raises what it raises.

        Where a loss can be mended, the operation is tried once more: it must be one that a failed first try leaves undone.
        Raises HsmUnavailable at once while the breaker is open, HsmBusy, and HsmTimeout.
        """
        if self._breaker.failures:
            self._breaker.admit()
        generation = self._generation
        try:
            try:
                result = self._try(operation)
            except (CallFailed, KeyGone) as error:
                if not self._is_lost(error):
                    raise
                self._heal(generation, error)
                result = self._try(operation)
        except (HsmBusy, PinRejected, SessionKeyGone):
            self._breaker.undecided()
            raise
        except HsmUnavailable as error:
            self._breaker.failed(error.answer if isinstance(error, CallFailed) else error.code)
            raise
        except BaseException:
            self._breaker.succeeded()  # the device answered; what it said is the caller's to hear
            raise
        if self._breaker.failures:
            self._breaker.succeeded()
        return result

    def _is_lost(self, error: HsmUnavailable) -> bool:
        if isinstance(error, CallFailed):
            return error.answer in LOST
        return time.monotonic() - self._healed > NOT_AGAIN_S

    def _try(self, operation: Callable[[TokenSession], Result]) -> Result:
        with self._borrowed() as place:
            try:
                return operation(self._session(place))
            except CallFailed as error:
                if not self._mend(place, error):
                    raise
            try:
                return operation(self._session(place))
            except CallFailed as error:
                self._mend(place, error)
                raise

    def _session(self, place: Place) -> TokenSession:
        held = place.held
        if held is not None and held.alive:
            return held
        if held is not None:  # a key could not be destroyed: it goes with its session
            place.drop()
        place.held = self.token.logged_in_session()
        return place.held

    def _mend(self, place: Place, error: CallFailed) -> bool:
        """Let go of what the answer says is lost, so that the next use starts fresh. False: nothing of ours was lost."""
        if place.held is None:
            return False
        if error.answer in LOST_KEY:
            place.held.forget_keys()
            return True
        if error.answer not in LOST_SESSION:
            return False
        age = time.monotonic() - place.held.born
        _log.warning("session replaced: %s answered %s, %.1f s old, tried once more", error.function, error.answer, age)
        self.figures.sessions_replaced += 1
        place.drop()
        return True

    def _borrowed(self) -> Place:
        """A place for one operation, given back when its block ends."""
        self.token.require_here()
        if self._refused is not None:
            raise self._refused
        if not self._open:
            raise HsmUnavailable("the token was closed")
        place = self._free.idle() or self._waited_for()
        place.thread = threading.get_ident()
        place.began = time.monotonic()
        return place

    def _waited_for(self) -> Place:
        if all(place.stuck for place in self.places):
            raise HsmTimeout("every session of the token waits for a call that does not come back")
        place = self._free.take(self._config.wait_s)
        if place is not None:
            return place
        if self.healing_since or any(other.stuck for other in self.places):
            raise HsmTimeout(f"no session came free in {self._config.wait_s} s: calls do not come back")
        raise HsmBusy(f"every session of the token was busy for {self._config.wait_s} s")

    def open_session(self) -> TokenSession:
        """A new session outside the pool; the caller closes it."""
        return self.token.open_session()

    @contextmanager
    def new_session(self) -> Iterator[TokenSession]:
        """A fresh session until the block ends, in a place of the pool: no recovery stops the module meanwhile."""
        with self._borrowed(), closing(self.open_session()) as session:
            yield session

    # Healing

    def _heal(self, generation: int, cause: HsmUnavailable) -> None:
        """Start the module again and log in: done by one thread, waited for by the others. Raises HsmUnavailable, PinRejected."""
        if not self._healing.acquire(timeout=self._config.wait_s):
            raise HsmTimeout("the recovery of the token takes too long") from cause
        try:
            if self._refused is not None:
                raise self._refused
            if self._generation == generation and self._open:
                self.healing_thread, self.healing_since = threading.get_ident(), time.monotonic()
                self._start_again(cause)
        finally:
            self.healing_since = 0.0
            self._healing.release()

    def _start_again(self, cause: HsmUnavailable) -> None:
        deadline = time.monotonic() + self._config.wait_s
        taken = self._all_places(deadline)
        try:
            for place in taken:
                if place.held is not None:
                    place.held.alive = False
                    place.held = None
            self._log_in_again(deadline)
            self._generation += 1
            self._healed = time.monotonic()
            self.figures.recoveries += 1
            _log.warning("token recovered after %s", cause)
        finally:
            for place in taken:
                self._free.give(place)

    def _log_in_again(self, deadline: float) -> None:
        """One C_Login, once the token is there; what a new login finds is audited as at start."""
        with starting_alone(self._config.folder, self._config.wait_s):
            self._restart_module(deadline)
            try:
                self.token = Token(self._module, self._config, self._pin)
                with closing(self.open_session()) as session:
                    self.audit(session)
            except (PinRejected, PromiseBroken) as error:
                self._refuse(error)
                raise

    def _restart_module(self, deadline: float) -> None:
        while True:
            try:
                self._module.restart()
                self._module.token(self._config.label, self._config.serial)
            except HsmUnavailable:
                if time.monotonic() + _PAUSE_S > deadline:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return

    def _refuse(self, error: KeyVaultError) -> None:
        """Nothing is served from now on: what was refused is not tried again by this process."""
        self._refused = error
        self._pin.forget()
        self._fatal(error)

    def _all_places(self, deadline: float) -> list[Place]:
        """Every place, so that no call runs: to stop a module under a call could end the process. Raises HsmTimeout."""
        taken: list[Place] = []
        while len(taken) < len(self.places):
            place = self._free.take(max(0.0, deadline - time.monotonic()))
            if place is None:
                for other in taken:
                    self._free.give(other)
                raise HsmTimeout("the token cannot be recovered: a call does not come back")
            taken.append(place)
        return taken

    def close(self) -> None:
        """Let running calls end, log out and stop the module; later calls fail with HsmUnavailable. Idempotent."""
        if not self._open or not self.token.is_here:
            return
        self._open = False
        self._pin.forget()
        if any(place.stuck for place in self.places):
            return
        with suppress(HsmTimeout):  # a call hangs in the module: to stop it under that call could end the process
            self._all_places(time.monotonic() + self._config.wait_s)
            with suppress(CallFailed):
                self.token.log_out()
            self._module.stop()
