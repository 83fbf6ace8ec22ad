"""The places of a pool of sessions, and who gets the next one that is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from keyvault.errors import CallFailed
from keyvault.pkcs11_start import TokenSession


class Place:
    """One place in the pool: its session, opened when first asked for, and since when its operation runs."""

    __slots__ = ("_give_back", "began", "held", "stuck", "thread")

    def __init__(self, give_back: Callable[[Place], None]) -> None:
        self._give_back = give_back
        self.held: TokenSession | None = None
        self.began = 0.0
        self.thread = 0
        self.stuck = False

    # A block of its own making: this is on the way of every call, where a generator would cost more than the rest.

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back(self)

    def drop(self) -> None:
        """Let go of the session; the next use opens a fresh one."""
        session, self.held = self.held, None
        if session is not None:
            session.alive = False
            with suppress(CallFailed):  # it is lost: closing it may only confirm that
                session.close()


class FreePlaces:
    """Places that nobody uses. Who waits longest is served first: a thread that comes back at once takes no other's turn."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._lock = threading.Lock()
        self._idle = list(places)
        self._waiting: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._idle)

    def idle(self) -> Place | None:
        """A place that is free now: nobody waits for one then."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def take(self, wait_s: float) -> Place | None:
        """A place, or None where none came free in time."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            waiter = _Waiter()
            self._waiting.append(waiter)
        if waiter.ready.wait(wait_s):
            return waiter.place
        with self._lock:
            if waiter.place is None:
                self._waiting.remove(waiter)
            return waiter.place

    def give(self, place: Place) -> None:
        """Hand a place to who waits, or keep it."""
        with self._lock:
            if not self._waiting:
                self._idle.append(place)
                return
            waiter = self._waiting.popleft()
            waiter.place = place
        waiter.ready.set()


class _Waiter:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.place: Place | None = None
