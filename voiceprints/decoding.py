"""Any audio bytes to samples, by way of a jailed child that is started fresh for each upload.

This side never parses the upload. `jailed.py` starts the child and reads a bounded answer; the child confines itself (`jail.py`)
before it reads the first byte, and decodes (`decoding_child.py`). Nothing here opens a voiceprint, so the edge may import it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from voiceprints import jailed
from voiceprints.errors import (
    AudioTooLong,
    DamagedAudio,
    DecoderUnavailable,
    DecodeTimeout,
    DecodingError,
    EmptyAudio,
    InvalidSamples,
    NotAudio,
    UnsupportedAudio,
    UploadTooLarge,
)

RATE = 16_000
"""Samples per second of every `Recording`."""

Samples = npt.NDArray[np.float32]

_FULL_SCALE_LIMIT = 4.0  # lossy decoders overshoot 1; integers written as floats are thousands
_LINE = re.compile(rb"(ok|refused) ([a-z0-9_]{1,24}) ([A-Za-z0-9._]{1,48})(?: (\d{1,6}) (\d{1,9}))?\n")
_LONGEST_LINE = 128
_REFUSALS: dict[str, type[DecodingError]] = {
    kind.code: kind for kind in (NotAudio, UnsupportedAudio, DamagedAudio, AudioTooLong, EmptyAudio, DecoderUnavailable)
}
_START = "import sys; sys.path += sys.argv[1:3]; from voiceprints.decoding_child import main; main()"


@dataclass(frozen=True)
class DecodingLimits:
    """What one upload may be and cost. Memory is the child's address space, most of it libraries."""

    upload_bytes: int = 32 * 1024 * 1024
    seconds: int = 300
    wall_seconds: float = 20.0
    cpu_seconds: int = 15
    memory_bytes: int = 640 * 1024 * 1024


@dataclass(frozen=True)
class Recording:
    """Mono speech at 16 kHz, float32, finite; what the file was, for the caller's answer. The samples never show in a repr."""

    samples: Samples = field(repr=False)
    container: str
    codec: str
    source_rate: int

    @property
    def seconds(self) -> float:
        """Length, counted from samples; headers are never believed."""
        return len(self.samples) / RATE


def decode(upload: bytes, limits: DecodingLimits | None = None) -> Recording:
    """Decode one upload in a child of its own. Blocks; safe from any thread. Raises a DecodingError by what is wrong."""
    limits = limits or DecodingLimits()
    if len(upload) > limits.upload_bytes:
        raise UploadTooLarge(f"the upload has {len(upload)} bytes, the limit is {limits.upload_bytes}")
    if not upload:
        raise EmptyAudio("the upload is empty")
    return _recording(_answer(upload, limits), limits)


def checked_samples(samples: Samples) -> Samples:
    """The samples, if they are: one axis, finite, near full scale or below. Raises EmptyAudio, InvalidSamples."""
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise InvalidSamples("samples must be one axis of float32")
    if not samples.size:
        raise EmptyAudio
    # NaN compares false, so this one comparison refuses it too.
    if not float(np.max(np.abs(samples))) <= _FULL_SCALE_LIMIT:
        raise InvalidSamples
    return samples


def _recording(answer: bytes, limits: DecodingLimits) -> Recording:
    line = _LINE.match(answer[:_LONGEST_LINE])
    if line is None:
        # The child died: a limit, a signal, or bytes that broke the media library. All its traces are gone with it.
        raise DamagedAudio("the decoder could not finish this file")
    verdict, first, second, rate, count = line.groups()
    if verdict == b"refused":
        raise _refusal(first.decode(), second.decode(), limits)
    body = memoryview(answer)[line.end() :]
    if count is None or len(body) != int(count) * 4:
        raise DamagedAudio("the decoder's answer is incomplete")
    samples = checked_samples(np.frombuffer(body, dtype="<f4"))
    return Recording(samples, first.decode(), second.decode(), int(rate))


def _refusal(code: str, detail: str, limits: DecodingLimits) -> DecodingError:
    kind = _REFUSALS.get(code, DamagedAudio)
    if kind is AudioTooLong:
        return AudioTooLong(f"the recording is longer than {limits.seconds} seconds")
    if kind is UnsupportedAudio:
        return UnsupportedAudio(f"found {detail.replace('.', ' ')}, which is not accepted")
    return kind()


def child_command(start: str = _START) -> list[str]:
    """The command line of a child that may load the media library. Raises DecoderUnavailable."""
    try:
        return jailed.command(start, "av")
    except jailed.ChildUnavailable as problem:
        raise DecoderUnavailable("the media library is not installed") from problem


def _answer(upload: bytes, limits: DecodingLimits) -> bytes:
    arguments = [str(number) for number in (limits.seconds, limits.memory_bytes, limits.cpu_seconds)]
    most_bytes = _LONGEST_LINE + (limits.seconds + 1) * RATE * 4
    try:
        return jailed.answer([*child_command(), *arguments], upload, most_bytes=most_bytes, wall_seconds=limits.wall_seconds)
    except jailed.ChildUnavailable as problem:
        raise DecoderUnavailable(f"the decoder could not be started: {problem}") from problem
    except jailed.ChildTimeout:
        raise DecodeTimeout from None
    except jailed.AnswerEndless:
        raise DamagedAudio("the decoder's answer has no end") from None
