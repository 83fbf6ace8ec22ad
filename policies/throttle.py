"""Failed attempts by certificate, counted once over all workers of a site, and costing no database and no memory that grows.

Two rows of counters, each certificate in one place of either, by a hash that nobody else can compute; the smaller counts
(Cormode and Muthukrishnan's count-min sketch). Two certificates are taken for one only where both places are shared.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path

from policies.errors import RateLimited
from policies.quotas import MINUTE_S

ATTEMPTS = "attempts"
"""The name of a site's shared file, among what runs."""
_PLACES = 4096
_MOST = 2**32 - 1
_HEAD = struct.Struct("=32sQ")
"""The key of the hash, and the minute that is counted; the counters follow."""
_SIZE = _HEAD.size + 2 * _PLACES * 4


def fresh_counters() -> bytes:
    """What the file of `Throttle.shared` begins with: a key of its own, and nothing counted."""
    return _HEAD.pack(secrets.token_bytes(32), 0).ljust(_SIZE, b"\0")


class Throttle:
    """Refuses a certificate that failed too often in this minute. Any thread."""

    def __init__(self, attempts: int, clock: Callable[[], float], memory: mmap.mmap | None = None, file: int | None = None) -> None:
        """`attempts`: how many failed requests a minute are looked at. Counts in `memory`, which is `file`'s; else for itself."""
        if memory is None:
            memory = mmap.mmap(-1, _SIZE)
            memory[:] = fresh_counters()
        self._attempts, self._clock, self._file = attempts, clock, file
        self._memory, self._threads = memory, threading.Lock()
        self._key, _ = _HEAD.unpack_from(memory)
        self._counts = memoryview(memory)[_HEAD.size :].cast("I")

    @classmethod
    def shared(cls, attempts: int, clock: Callable[[], float], path: Path) -> Throttle:
        """One that counts together with every process that opened the same file. Raises OSError, ValueError."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return cls(attempts, clock, mmap.mmap(file, _SIZE), file)

    def require(self, certificate: str) -> None:
        """Raise RateLimited where this certificate's requests failed too often; it costs nothing more than that."""
        with self._alone():
            if min(self._counts[place] for place in self._places(certificate)) >= self._attempts:
                raise RateLimited(("quota.attempts",))

    def failed(self, certificate: str) -> None:
        """One more failed request with this certificate."""
        with self._alone():
            for place in self._places(certificate):
                self._counts[place] = min(self._counts[place] + 1, _MOST)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread and no other worker counts meanwhile; and what is counted is of this minute."""
        with self._threads, nullcontext() if self._file is None else _locked(self._file):
            minute = int(self._clock()) // MINUTE_S
            _, counted = _HEAD.unpack_from(self._memory)
            if counted < minute or counted > minute + 1:  # two workers' clocks may differ by a second, at the turn of a minute
                self._memory[:] = _HEAD.pack(self._key, minute).ljust(_SIZE, b"\0")
            yield

    def _places(self, certificate: str) -> tuple[int, int]:
        digest = blake2b(certificate.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest[:4]) % _PLACES, _PLACES + int.from_bytes(digest[4:]) % _PLACES


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """The file's lock; the kernel gives it back when its process ends, however that may be."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)
