"""Notices calls that hang in the module, which no code of this process can end: it marks them, and says so.

A hand-over of each call to a thread of its own would cost more than the call (`docs/hsm-door.md`). So calls run in the
caller's thread, and whoever awaits that thread learns from `stuck` that it need not wait any longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keyvault.breaker import Breaker
from keyvault.errors import HsmTimeout
from keyvault.pkcs11_pool import SessionPool

_LOOKS = 8  # a call that hangs is noticed within an eighth of its time more


class Watch:
    """Looks at the pool's places in a thread of its own until `stop`.

    `stuck` hears the thread whose operation has run for longer than `call_s`; its place stays out of the pool until the call
    comes back. `worn` hears, once, that half of the places are stuck: only another process can help then.
    """

    def __init__(
        self,
        pool: SessionPool,
        breaker: Breaker,
        call_s: float,
        stuck: Callable[[int], None],
        worn: Callable[[Exception], None],
    ) -> None:
        self._pool, self._breaker, self._call_s, self._stuck, self._worn = pool, breaker, call_s, stuck, worn
        self._stop = threading.Event()
        self._told = False
        self._healing_told = 0.0
        self._thread = threading.Thread(target=self._watch, name="hsm-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._call_s / _LOOKS):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for place in self._pool.places:
            began, thread = place.began, place.thread
            if began and not place.stuck and now - began > self._call_s:
                place.stuck = True
                self._hangs(thread)
        since = self._pool.healing_since
        # A recovery may use its whole patience for a token that comes back; longer than that is a call that hangs.
        if since and since != self._healing_told and now - since > 2 * self._call_s:
            self._healing_told = since
            self._hangs(self._pool.healing_thread)
            self._wear()
        if 2 * sum(place.stuck for place in self._pool.places) >= len(self._pool.places):
            self._wear()

    def _hangs(self, thread: int) -> None:
        self._pool.figures.timeouts += 1
        self._breaker.failed(HsmTimeout.code)
        self._stuck(thread)

    def _wear(self) -> None:
        if not self._told:
            self._told = True
            self._worn(HsmTimeout("half of this process's sessions wait for calls that do not come back"))
