"""Samples to bytes: PCM 16 bit and WAV (RIFF, Microsoft's Multimedia Programming Interface 1.0, 1991), mono, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def pcm16(samples: Array) -> bytes:
    """Float samples in [-1, 1] as signed 16 bit; values beyond are held at the ends, never wrapped."""
    whole: npt.NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * np.float32(32767)).astype("<i2")
    return whole.tobytes()


def header(rate: int, data_bytes: int) -> bytes:
    """The 44 bytes before the samples."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", 36 + data_bytes, b"WAVE") + form + struct.pack("<4sI", b"data", data_bytes)


def wav(blocks: Iterable[Array], rate: int) -> bytes:
    """A whole file: one header with the right sizes, then every block."""
    data = b"".join(pcm16(block) for block in blocks)
    return header(rate, len(data)) + data
