"""Who speaks next: a fixed number at once, a line of fixed length in the order of arrival, and no waiting beyond a bound.

A caller reserves a turn before it uses up anything (a token above all): when the line is full the answer comes at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from synth.errors import Busy, Cancelled

_FIRST_GUESS_S = 1.0


class Turn:
    """The right to speak until the `with` block ends. `cancel` may be called from any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """The listener has left: no further sentence is begun."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises Cancelled after `cancel`."""
        if self._cancelled.is_set():
            raise Cancelled


class Scheduler:
    """At most `at_once` turns at a time, at most `waiting` callers in line, none for longer than `patience_s` seconds."""

    def __init__(
        self, *, at_once: int = 2, waiting: int = 16, patience_s: float = 4.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if at_once < 1 or waiting < 0:
            raise ValueError("at least one turn at once, and no negative line")
        self._at_once, self._waiting, self._patience_s, self._clock = at_once, waiting, patience_s, clock
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()
        self._taken = 0
        self._usual_s = _FIRST_GUESS_S

    @contextmanager
    def reserve(self) -> Iterator[Turn]:
        """Wait for a turn, first come first served. Raises Busy at once if the line is full, or when patience ends."""
        self._take()
        started = self._clock()
        try:
            yield Turn()
        finally:
            self._give_back(self._clock() - started)

    def _take(self) -> None:
        with self._lock:
            if self._taken < self._at_once and not self._line:
                self._taken += 1
                return
            if len(self._line) >= self._waiting:
                raise Busy(self._retry_after_s())
            mine = threading.Event()
            self._line.append(mine)
        try:
            called = mine.wait(self._patience_s)
        except BaseException:
            if self._leave(mine):
                self._give_back(0.0)
            raise
        if not called and not self._leave(mine):
            raise Busy(self._retry_after_s())

    def _leave(self, mine: threading.Event) -> bool:
        """Step out of the line; True if the turn came in the same moment and is now held."""
        with self._lock:
            if not mine.is_set():
                self._line.remove(mine)
            return mine.is_set()

    def _give_back(self, spent_s: float) -> None:
        with self._lock:
            self._usual_s += 0.2 * (spent_s - self._usual_s)
            if self._line:
                self._line.popleft().set()  # the turn passes on without ever being free for someone who came later
            else:
                self._taken -= 1

    def _retry_after_s(self) -> float:
        """When a place in the line should be free again: the usual time, by how many stand before each turn."""
        return round(max(0.1, self._usual_s * (1 + len(self._line) / self._at_once)), 1)
