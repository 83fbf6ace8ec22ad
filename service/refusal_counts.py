"""Refusals of callers that proved nothing: counted by minute and code, so that strangers cannot fill the audit log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import structlog

_MINUTE_S = 60

_log = structlog.get_logger()


class RefusalCounts:
    """Implements `policies.refusals.Refusals`. One line a minute and code, written when the next minute's first refusal comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._minute = 0
        self._counts: Counter[str] = Counter()

    def count(self, code: str) -> None:
        with self._lock:
            minute = int(self._clock()) // _MINUTE_S
            if minute != self._minute:
                self._write()
                self._minute = minute
            self._counts[code] += 1

    def _write(self) -> None:
        for code, times in sorted(self._counts.items()):
            _log.info("refused_unauthenticated", code=code, times=times, minute=self._minute * _MINUTE_S)
        self._counts.clear()
