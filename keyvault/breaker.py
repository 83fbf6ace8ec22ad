"""A circuit breaker: after several device failures in a row, calls fail at once for a growing pause, then one of them tries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keyvault.errors import HsmUnavailable
from keyvault.events import KeyEvent

FAILURES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


def unheard(_: KeyEvent) -> None:
    """Nobody listens."""


class Breaker:
    """Closed at first. `tell` hears exactly one event when it opens and one when it closes, outside every lock.

    Use it from any thread: `admit` before a call, then `succeeded`, `failed` or `undecided` after it.
    """

    def __init__(
        self,
        tell: Callable[[KeyEvent], None] = unheard,
        clock: Callable[[], float] = time.monotonic,
        *,
        failures: int = FAILURES,
    ) -> None:
        self._tell, self._clock, self._limit = tell, clock, failures
        self._lock = threading.Lock()
        self.failures = 0
        """In a row until now. Zero says at once that nothing needs to be asked or told."""
        self._opened: float | None = None
        self._pause, self._until = FIRST_PAUSE_S, 0.0
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether calls are refused now, but for one that tries."""
        return self._opened is not None

    def admit(self) -> None:
        """Let this call pass. Raises HsmUnavailable while the pause lasts, or while another call is trying."""
        if not self.open:
            return
        with self._lock:
            if self._opened is None:
                return
            left = self._until - self._clock()
            if left > 0 or self._probing:
                raise HsmUnavailable(f"the HSM failed {self.failures} times in a row; it is tried again in {max(left, 0):.1f} s")
            self._probing = True

    def succeeded(self) -> None:
        """The device answered."""
        if not self.failures:
            return
        with self._lock:
            failures, self.failures = self.failures, 0
            opened, self._opened = self._opened, None
            self._pause, self._probing = FIRST_PAUSE_S, False
        if opened is not None:
            self._tell(KeyEvent("hsm.breaker_closed", {"failures": failures, "seconds": round(self._clock() - opened)}))

    def failed(self, answer: str) -> None:
        """The device did not do what it should: `answer` is a code or an answer's name, never content."""
        with self._lock:
            self.failures += 1
            now = self._clock()
            opens = self._opened is None and self.failures >= self._limit
            if opens:
                self._opened, self._until = now, now + self._pause
            elif self._probing:
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
                self._until, self._probing = now + self._pause, False
            failures = self.failures
        if opens:
            self._tell(KeyEvent("hsm.breaker_opened", {"failures": failures, "answer": answer}))

    def undecided(self) -> None:
        """The call never reached the device: whoever comes next may try."""
        with self._lock:
            self._probing = False
