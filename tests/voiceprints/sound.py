"""Real speech and files made from it, for the tests of voiceprints."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np

SPEECH = Path(__file__).parents[2] / "examples" / "speech"


def flac(speaker: str, number: int = 0) -> bytes:
    """The bytes of one utterance of a speaker in examples/speech."""
    return sorted((SPEECH / speaker).glob("*.flac"))[number].read_bytes()


def samples(upload: bytes, rate: int = 16_000) -> np.ndarray:
    """Decoded by the media library directly: what the jailed child should give."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    with av.open(io.BytesIO(upload)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)] + resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def encoded(speech: np.ndarray, container: str, codec: str, rate: int = 16_000) -> bytes:
    """`speech` (16 kHz float32 mono) as a file of this container and codec at `rate`."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as sink:
        stream = sink.add_stream(codec, rate=rate)
        stream.layout = layout = "stereo" if codec == "vorbis" else "mono"  # the encoder at hand knows stereo only
        if codec == "vorbis":
            stream.codec_context.options = {"strict": "experimental"}
        frame = av.AudioFrame.from_ndarray(speech[None, :].astype(np.float32), format="flt", layout="mono")
        frame.sample_rate = 16_000
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            sink.mux(stream.encode(part))
        sink.mux(stream.encode(None))
    return out.getvalue()


def wav(speech: np.ndarray, *, rate: int = 16_000, kind: str = "<i2", said: int | None = None) -> bytes:
    """A WAV file by hand: 16-bit from [-1, 1], or 32-bit float; `said` is the data size its header claims."""
    if kind == "<i2":
        body = np.clip(np.round(speech * 32768), -32768, 32767).astype(kind).tobytes()
    else:
        body = speech.astype(kind).tobytes()
    width = np.dtype(kind).itemsize
    size = len(body) if said is None else said
    form = 1 if kind == "<i2" else 3
    return (
        struct.pack(
            "<4sI4s4sIHHIIHH",
            b"RIFF",
            (36 + size) & 0xFFFFFFFF,
            b"WAVE",
            b"fmt ",
            16,
            form,
            1,
            rate,
            rate * width,
            width,
            8 * width,
        )
        + struct.pack("<4sI", b"data", size)
        + body
    )
