"""Is this worker able to serve? A key is really unwrapped and used, the database really answers, the log really moves
(`log_moves`).

Cached for five seconds, so that a health check can't be used to load the HSM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog

CACHE_S = 5.0
PROBE_S = 2.0
"""How long one waits for a probe that another call runs."""

Probe = Callable[[], None]

_log = structlog.get_logger()


class Readiness:
    """Runs named probes; a probe that raises is broken."""

    def __init__(self, probes: Mapping[str, Probe], clock: Callable[[], float] = time.monotonic) -> None:
        self._probes = dict(probes)
        self._clock = clock
        self._lock = threading.Lock()
        self._found: tuple[float, list[str]] | None = None
        self._probing = ""

    def broken(self) -> list[str]:
        """The names of the broken parts; looked at anew when the last look is older than CACHE_S."""
        if not self._lock.acquire(timeout=PROBE_S):
            return [self._probing]  # it hangs: nobody else needs to wait for it
        try:
            now = self._clock()
            if self._found is None or now - self._found[0] >= CACHE_S:
                self._found = (now, [name for name, probe in self._probes.items() if not self._works(name, probe)])
            return list(self._found[1])
        finally:
            self._lock.release()

    def _works(self, name: str, probe: Probe) -> bool:
        self._probing = name
        try:
            probe()
        except Exception as error:  # noqa: BLE001 — whatever a part raises, it is not ready; the log says why
            _log.warning("not_ready", part=name, error=type(error).__name__)
            return False
        return True
