"""Any audio bytes to samples, by way of a jailed child that is started fresh for each upload.

This side never parses the upload. It starts the child with an empty environment and three descriptors (two pipes and
/dev/null), feeds it, reads a bounded answer until a deadline, and always ends and reaps it. The child confines itself
(`jail.py`) before it reads the first byte, and decodes (`decoding_child.py`). Nothing here opens a voiceprint, so the edge
may import it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

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
    """The interpreter's command line: isolated (-I), without site (-S), with two folders to import from."""
    spec = importlib.util.find_spec("av")
    if spec is None or spec.origin is None:
        raise DecoderUnavailable("the media library is not installed")
    return [sys.executable, "-I", "-S", "-c", start, str(Path(__file__).parent.parent), str(Path(spec.origin).parent.parent)]


def _answer(upload: bytes, limits: DecodingLimits) -> bytes:
    arguments = [str(number) for number in (limits.seconds, limits.memory_bytes, limits.cpu_seconds)]
    deadline = time.monotonic() + limits.wall_seconds
    try:
        child = subprocess.Popen(
            [*child_command(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            close_fds=True,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise DecoderUnavailable(f"the decoder could not be started: {error.strerror}") from error
    try:
        return _exchange(child, upload, _LONGEST_LINE + (limits.seconds + 1) * RATE * 4, deadline)
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        child.wait()


def _exchange(child: subprocess.Popen[bytes], upload: bytes, most_bytes: int, deadline: float) -> bytes:
    """Feed the upload and collect the answer, both at once. Raises DecodeTimeout, DamagedAudio for an endless answer."""
    source, sink = child.stdin, child.stdout
    assert source is not None
    assert sink is not None
    answer, rest = bytearray(), memoryview(upload)
    os.set_blocking(source.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_WRITE)
        selector.register(sink, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DecodeTimeout
            for key, _ in ready:
                if key.fileobj is source:
                    rest = _fed(source, rest)
                    if not rest:
                        selector.unregister(source)
                        source.close()
                elif part := sink.read(1 << 20):
                    answer += part
                    if len(answer) > most_bytes:
                        raise DamagedAudio("the decoder's answer has no end")
                else:
                    return bytes(answer)


def _fed(pipe: IO[bytes], rest: memoryview) -> memoryview:
    try:
        return rest[os.write(pipe.fileno(), rest[: 1 << 20]) :]
    except BrokenPipeError:
        return rest[:0]
