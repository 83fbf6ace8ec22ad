"""Failed attempts by certificate, within one worker: what nobody proved costs no database and no memory that grows.

Two rows of counters, each certificate in one place of either, by a hash that nobody else can compute; the smaller counts
(Cormode and Muthukrishnan's count-min sketch). Two certificates are taken for one only where both places are shared.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Callable
from hashlib import blake2b

from policies.errors import RateLimited
from policies.quotas import MINUTE_S

_PLACES = 4096
_MOST = 2**32 - 1


class Throttle:
    """Refuses a certificate that failed too often in this minute. Any thread."""

    def __init__(self, attempts: int, clock: Callable[[], float]) -> None:
        """`attempts`: how many failed requests a minute are looked at."""
        self._attempts, self._clock = attempts, clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._minute = 0
        self._counts = array("L", bytes(array("L").itemsize * 2 * _PLACES))

    def require(self, certificate: str) -> None:
        """Raise RateLimited where this certificate's requests failed too often; it costs nothing more than that."""
        with self._lock:
            self._turn()
            if min(self._counts[place] for place in self._places(certificate)) >= self._attempts:
                raise RateLimited(("quota.attempts",))

    def failed(self, certificate: str) -> None:
        """One more failed request with this certificate."""
        with self._lock:
            self._turn()
            for place in self._places(certificate):
                self._counts[place] = min(self._counts[place] + 1, _MOST)

    def _turn(self) -> None:
        minute = int(self._clock()) // MINUTE_S
        if minute != self._minute:
            self._minute = minute
            self._counts = array("L", bytes(array("L").itemsize * 2 * _PLACES))

    def _places(self, certificate: str) -> tuple[int, int]:
        digest = blake2b(certificate.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest[:4]) % _PLACES, _PLACES + int.from_bytes(digest[4:]) % _PLACES
