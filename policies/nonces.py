"""Server nonces for DPoP (RFC 9449 §8, §9): for clients whose clocks are off, a proof's age is told by ours.

A nonce names a few seconds of our time and carries their record MAC. So nothing is stored, every worker of a site knows every
other's nonces, also after a restart, and the token is asked once for each span of time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hmac import compare_digest

from keyvault.records import RecordMac
from policies import jws

SPAN_S = 10
"""How long one nonce is given out. It tells a proof's age to so many seconds."""


class Nonces:
    """Gives nonces out and reads them. Any thread."""

    def __init__(self, mac: RecordMac, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of = lru_cache(8)(lambda span: jws.encode(mac.make("dpop-nonce", span)))

    def fresh(self) -> str:
        """The nonce of now."""
        return str(self._of(int(self._clock()) // SPAN_S))

    def issued_at(self, nonce: str, longest_s: int) -> int | None:
        """When this nonce began to be given out, seconds since 1970; None for one that is none of the last `longest_s`."""
        now = int(self._clock())
        for span in range(now // SPAN_S, (now - longest_s) // SPAN_S, -1):
            if compare_digest(self._of(span).encode(), nonce.encode()):
                return span * SPAN_S
        return None
