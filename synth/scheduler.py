"""Who speaks next: a fixed number at once, a line of fixed length in the order of arrival, and no waiting beyond a bound.

A caller takes a place before it uses up anything (a token above all): when the line is full the answer comes at once. It
waits for its turn only afterwards, with its voice open, because tokens live shorter than a line may be.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from synth.errors import Busy, Cancelled, TurnLate

_FIRST_GUESS_S = 1.0


class Turn:
    """A place in the line until the `with` block ends. `cancel` may be called from any thread."""

    def __init__(self, changed: threading.Condition, patience_s: float) -> None:
        self._changed, self._patience_s = changed, patience_s
        self.called_at: float | None = None
        self.cancelled = False

    @property
    def called(self) -> bool:
        """The turn has come, and holds one of the places that speak."""
        return self.called_at is not None

    def wait(self) -> None:
        """Return when it is this turn's turn; at once if it was before. Raises Cancelled after `cancel`, TurnLate after a bound."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self.called or self.cancelled, timeout=self._patience_s)
        if self.cancelled:
            raise Cancelled
        if not in_time:
            raise TurnLate(self._patience_s)

    def cancel(self) -> None:
        """The listener has left: no further sentence is begun."""
        with self._changed:
            self.cancelled = True
            self._changed.notify_all()


class Scheduler:
    """At most `at_once` turns at a time, at most `waiting` callers in line, none for longer than `patience_s` seconds."""

    def __init__(
        self, *, at_once: int = 2, waiting: int = 16, patience_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if at_once < 1 or waiting < 0:
            raise ValueError("at least one turn at once, and no negative line")
        self._at_once, self._waiting, self._patience_s, self._clock = at_once, waiting, patience_s, clock
        self._changed = threading.Condition()
        self._line: deque[Turn] = deque()
        self._taken = 0
        self._usual_s = _FIRST_GUESS_S

    @contextmanager
    def reserve(self) -> Iterator[Turn]:
        """Take a place, first come first served. Never waits: raises Busy, with when to retry, if the line is full."""
        turn = Turn(self._changed, self._patience_s)
        with self._changed:
            if self._taken == self._at_once and len(self._line) >= self._waiting:
                raise Busy(self._retry_after_s())
            self._line.append(turn)
            self._call_next()
        try:
            yield turn
        finally:
            self._leave(turn)

    def _call_next(self) -> None:
        while self._line and self._taken < self._at_once:
            self._taken += 1
            self._line.popleft().called_at = self._clock()
            self._changed.notify_all()

    def _leave(self, turn: Turn) -> None:
        with self._changed:
            if turn.called_at is not None:
                self._taken -= 1
                self._usual_s += 0.2 * (self._clock() - turn.called_at - self._usual_s)
            else:
                self._line.remove(turn)
            self._call_next()

    def _retry_after_s(self) -> float:
        """When a place in the line should be free again: the usual time, by how many stand before each turn."""
        return round(max(0.1, self._usual_s * (1 + len(self._line) / self._at_once)), 1)
