"""What runs inside the jail: one upload in, samples out. The only file that loads the media library (`av`, libav).

Started fresh for each upload by `decoding.py`, reads the upload from standard input and answers on standard output:
one line, `ok CONTAINER CODEC SOURCE_RATE COUNT` or `refused CODE DETAIL`, and after `ok` COUNT float32 samples
(little-endian, mono, 16 kHz). Its imports are few, because they are all paid at every upload.
"""

from __future__ import annotations

import io
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import av.error

from voiceprints.jail import JailUnavailable, confine

RATE = 16_000
_LOWEST_RATE, _HIGHEST_RATE, _MOST_CHANNELS = 8_000, 192_000, 8
_UNREADABLE_PACKETS = 1  # a file cut short ends in half a frame; more than that is damage
_PCM = ("u8", "s16le", "s16be", "s24le", "s24be", "s32le", "s32be", "f32le", "f32be", "f64le", "alaw", "mulaw")
_DECODERS = (*(f"pcm_{kind}" for kind in _PCM), "flac", "alac", "mp3float", "mp3", "aac", "vorbis", "opus")

# Recognised so that the refusal can say what was found.
_STRANGERS = (
    (b"FORM", "aiff"), (b"caff", "caf"), (b".snd", "au"), (b"#!AMR", "amr"), (b"wvpk", "wavpack"), (b"MAC ", "ape"),
    (b"MThd", "midi"), (b"RIFF", "riff"), (b"0&\xb2u", "asf"), (b"%PDF", "pdf"), (b"\x89PNG", "png"), (b"PK\x03\x04", "zip"),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one upload may cost the child."""

    seconds: int
    memory_bytes: int
    cpu_seconds: int


class Refused(Exception):
    """The upload is refused: `code` as in `decoding.py`, and a detail of letters, digits and dots."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code, self.detail = code, detail


def main() -> None:
    """Confine this process, then decode standard input. Ends through `os._exit`: nothing of the interpreter runs after."""
    limits = Limits(*(int(argument) for argument in sys.argv[-3:]))
    rehearse()
    try:
        confine(memory_bytes=limits.memory_bytes, cpu_seconds=limits.cpu_seconds)
        answer = [*decoded(_read_all(), limits.seconds)]
    except JailUnavailable:
        answer = [b"refused decoder_unavailable jail\n"]
    except Refused as refusal:
        answer = [f"refused {refusal}\n".encode()]
    except MemoryError:
        answer = [b"refused damaged_audio memory\n"]
    for part in answer:
        _write_all(part)
    os._exit(0)


def rehearse() -> None:
    """Decode a millisecond of our own silence, so that what the media library loads late is loaded before the filter."""
    silence = struct.pack("<4sI4s4sIHHIIHH4sI32x", b"RIFF", 68, b"WAVE", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", 32)
    decoded(silence, 1)


def decoded(upload: bytes, most_seconds: int) -> tuple[bytes, bytes]:
    """The answer's first line and its samples. Raises Refused."""
    container_name = sniffed(upload)
    try:
        with av.open(io.BytesIO(upload), "r", format=container_name, options=_OPTIONS) as container:
            stream = _speech_stream(container, container_name)
            samples = bytearray()
            for block in _blocks(container, stream):
                samples += block
                if len(samples) > most_seconds * RATE * 4:
                    raise Refused("audio_too_long", str(most_seconds))
            if not samples:
                raise Refused("audio_empty", container_name)
            facts = f"ok {container_name} {stream.codec_context.name} {stream.codec_context.sample_rate} {len(samples) // 4}\n"
            return facts.encode(), bytes(samples)
    except (av.error.FFmpegError, ValueError) as error:
        # ValueError: a stream that changes its own layout half-way, which the resampler refuses.
        raise Refused("damaged_audio", container_name) from error


_OPTIONS = {
    "codec_whitelist": ",".join(_DECODERS),
    "format_whitelist": "wav,flac,ogg,mp3,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac",
    "protocol_whitelist": "none",
    "max_streams": "8",
}


def sniffed(upload: bytes) -> str:
    """The demuxer for these bytes; names and content types are never asked. Raises Refused (not_audio, unsupported_audio)."""
    head = upload[_id3_length(upload) :][:64]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    for magic, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "matroska")):
        if head.startswith(magic):
            return name
    if len(head) >= 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        if head[1] & 0xF6 == 0xF0:
            return "aac"  # ADTS: layer bits are zero
        if head[1] & 0x06 and head[1] & 0x18 != 0x08 and head[2] & 0xF0 != 0xF0 and head[2] & 0x0C != 0x0C:
            return "mp3"  # a layer, a version, a bit rate and a sampling rate that exist
    for magic, name in _STRANGERS:
        if head.startswith(magic):
            raise Refused("unsupported_audio", name)
    raise Refused("not_audio", "unknown")


def _id3_length(upload: bytes) -> int:
    if upload[:3] != b"ID3" or len(upload) < 10:
        return 0
    sizes = upload[6:10]
    return 10 + sum((byte & 0x7F) << shift for byte, shift in zip(sizes, (21, 14, 7, 0), strict=True))


def _speech_stream(container: Any, container_name: str) -> Any:
    if not container.streams.audio:
        raise Refused("unsupported_audio", f"{container_name}.without.sound")
    stream = container.streams.audio[0]
    context = stream.codec_context
    if context is None or context.name not in _DECODERS:
        raise Refused("unsupported_audio", f"{container_name}.{context.name if context else 'unknown'}")
    if not _LOWEST_RATE <= context.sample_rate <= _HIGHEST_RATE:
        raise Refused("unsupported_audio", f"{context.sample_rate}.hz")
    if not 1 <= context.channels <= _MOST_CHANNELS:
        raise Refused("unsupported_audio", f"{context.channels}.channels")
    context.thread_type = "NONE"
    context.thread_count = 1
    return stream


def _blocks(container: Any, stream: Any) -> Iterator[bytes]:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    unreadable = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            unreadable += 1
            if unreadable > _UNREADABLE_PACKETS:
                raise
            continue
        for frame in frames:
            yield from map(_plain, resampler.resample(frame))
    yield from map(_plain, resampler.resample(None))


def _plain(frame: Any) -> bytes:
    return bytes(frame.planes[0])[: frame.samples * 4]


def _read_all() -> bytes:
    parts = []
    while part := os.read(0, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write_all(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]
