"""The process's budget of locked memory: how many voices may be open at once is a number, not an accident.

RLIMIT_MEMLOCK is 8 MiB for ordinary users; it is the hard wall, and this budget stays below it so that a request waits for
a moment, then is refused by name, instead of failing half-way.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keyvault.locked import LockedBuffer, LockedMemoryError
from voiceprints.errors import LockedMemoryExhausted

_LEFT_FOR_OTHERS = 1 << 20
_MOST = 64 << 20
_PAGE = resource.getpagesize()


class Scratch(Protocol):
    """Hands out zeroed arrays in locked memory that is overwritten when the block around it ends (`LockedBuffer.array`)."""

    def __call__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]: ...


class LockedMemory:
    """Hands out locked buffers within `limit` bytes. Safe from any thread."""

    def __init__(self, limit: int | None = None, *, patience_s: float = 2.0) -> None:
        self.limit = default_limit() if limit is None else limit
        self._patience_s = patience_s
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Bytes in buffers that are open now."""
        return self._taken

    @contextmanager
    def buffer(self, size: int) -> Iterator[LockedBuffer]:
        """A locked buffer of `size` bytes, wiped when the block ends. Raises LockedMemoryExhausted after some patience."""
        whole = -(-size // _PAGE) * _PAGE
        self._take(whole)
        try:
            with _locked(whole) as buffer:
                yield buffer
        finally:
            with self._changed:
                self._taken -= whole
                self._changed.notify_all()

    def _take(self, size: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken + size <= self.limit, timeout=self._patience_s):
                raise LockedMemoryExhausted(f"{size} bytes of locked memory asked, {self.limit - self._taken} left")
            self._taken += size


def default_limit() -> int:
    """What RLIMIT_MEMLOCK allows, less a little for keys and PINs; at most 64 MiB."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return _MOST if allowed == resource.RLIM_INFINITY else max(0, min(_MOST, allowed - _LEFT_FOR_OTHERS))


def _locked(size: int) -> LockedBuffer:
    try:
        return LockedBuffer(size)
    except LockedMemoryError as error:
        raise LockedMemoryExhausted(str(error)) from error
