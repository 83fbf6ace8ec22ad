"""The places of a pool of sessions, and who gets the next one that is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from keyvault.errors import CallFailed
from keyvault.pkcs11_start import TokenSession


class Place:
    """One place in the pool: its session, opened when first asked for, and since when its operation runs."""

    __slots__ = ("_give", "began", "held", "stuck", "thread")

    def __init__(self, give: Callable[[Place], None]) -> None:
        self._give = give
        self.held: TokenSession | None = None
        self.began = 0.0
        self.thread = 0
        self.stuck = False

    # A block of its own making: this is on the way of every call, where a generator would cost more than the rest.

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.began = 0.0
        if self.stuck:  # it came back after all; what its session is worth, nobody knows
            self.stuck = False
            self.drop()
        self._give(self)

    def drop(self) -> None:
        """Let go of the session; the next use opens a fresh one."""
        session, self.held = self.held, None
        if session is not None:
            session.alive = False
            with suppress(CallFailed):  # it is lost: closing it may only confirm that
                session.close()


class FreePlaces:
    """Places that nobody uses. Who waits longest is served first: a thread that comes back at once takes no other's turn.

    While nobody waits, taking and giving are one step each of a list, which threads cannot tear apart; a lock there would
    be what they wait for. Who begins to wait says so first and looks once more then; who gives looks for waiters after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Place] = []
        self._waiting: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._idle)

    def idle(self) -> Place | None:
        """A place that is free now; None while somebody waits, whose turn it is."""
        try:
            return None if self._waiting else self._idle.pop()
        except IndexError:
            return None

    def take(self, wait_s: float) -> Place | None:
        """A place, or None where none came free in time."""
        waiter = _Waiter()
        with self._lock:
            self._waiting.append(waiter)
        self._pass_on()
        if waiter.ready.wait(wait_s):
            return waiter.place
        with self._lock:
            if waiter.place is None:
                self._waiting.remove(waiter)
            return waiter.place

    def give(self, place: Place) -> None:
        """Hand a place to who waits, or keep it."""
        self._idle.append(place)
        if self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        """Places that are free go to those who wait, the longest first."""
        with self._lock:
            while self._waiting:
                try:
                    place = self._idle.pop()
                except IndexError:  # also where another thread was quicker
                    return
                waiter = self._waiting.popleft()
                waiter.place = place
                waiter.ready.set()


class _Waiter:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.place: Place | None = None
