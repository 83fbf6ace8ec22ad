"""Memory for secrets: locked in RAM, left out of dumps and forks, overwritten when released.

What it does not do: it cannot reach copies that a library makes for itself (`docs/threat-model.md` names them).
"""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
# Held through, the interpreter's lock costs less here than to give it up and wait for it again.
_held = ctypes.PyDLL(None)
_memset, _memmove = _held.memset, _held.memmove
_memset.argtypes, _memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), None
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
_MADV_DONTFORK, _MADV_DONTDUMP = 10, 16
_ALIGN = 64


class LockedMemoryError(MemoryError):
    """The operating system would not lock this memory (RLIMIT_MEMLOCK)."""


def wipe(address: int, length: int) -> None:
    """Overwrite `length` bytes at `address` with zeros; the caller vouches for that range."""
    _memset(address, 0, length)


def move(target: int, source: int, length: int) -> None:
    """Copy `length` bytes between two addresses; the caller vouches for both ranges."""
    _memmove(target, source, length)


class LockedBuffer:
    """`size` bytes of anonymous memory: mlock, MADV_DONTDUMP, MADV_DONTFORK; zeroed on `wipe()` and on leaving `with`.

    `array()` hands out numpy views inside it, one after another. Views are numbers in the clear: write into them with
    `out=`; never copy them. Raises LockedMemoryError where memory cannot be locked: there is no unlocked fallback.
    """

    def __init__(self, size: int) -> None:
        if size <= 0:
            raise ValueError("a locked buffer needs a positive size")
        self.size = size
        self._used = 0
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        if _libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(size)) != 0:
            raise LockedMemoryError(f"could not lock {size} bytes: errno {ctypes.get_errno()}; raise RLIMIT_MEMLOCK")
        for advice in (_MADV_DONTDUMP, _MADV_DONTFORK):
            if _libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(size), advice) != 0:
                raise LockedMemoryError(f"madvise({advice}) failed: errno {ctypes.get_errno()}")

    def array(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """A zeroed view of `shape` and `dtype` inside the buffer, 64-byte aligned. Raises MemoryError when it is full."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        start = -(-self._used // _ALIGN) * _ALIGN
        end = start + count * kind.itemsize
        if end > self.size:
            raise MemoryError(f"locked buffer of {self.size} bytes is full: {end} needed")
        self._used = end
        view = self._bytes[start:end]
        view[:] = 0
        return view.view(kind).reshape(shape)

    def view(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Bytes [start, end) as a numpy view; nothing is copied."""
        return self._bytes[start:end]

    def wipe(self) -> None:
        """Overwrite every byte with zero and start handing out views from the beginning."""
        ctypes.memset(self.address, 0, self.size)
        self._used = 0

    def __enter__(self) -> LockedBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wipe()

    def __del__(self) -> None:
        # A buffer that was forgotten is still overwritten; the pages go back when the last view does.
        if getattr(self, "address", 0):
            ctypes.memset(self.address, 0, self.size)

    def __repr__(self) -> str:
        return f"LockedBuffer({self.size} bytes)"
