"""WAV bytes: one header, right sizes, nothing after the last sample."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np

from synth.audio import pcm16, wav

BLOCKS = [np.linspace(-1, 1, 700, dtype=np.float32), np.zeros(301, np.float32), np.full(5, 0.25, np.float32)]


def test_a_file_reads_back_with_its_rate_and_length():
    with wave.open(io.BytesIO(wav(BLOCKS, 24000))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
        assert file.getnframes() == 1006
        assert file.readframes(2000) == b"".join(pcm16(block) for block in BLOCKS)


def test_sizes_are_those_of_the_file():
    content = wav(BLOCKS, 24000)
    assert struct.unpack_from("<I", content, 4)[0] == len(content) - 8
    assert struct.unpack_from("<I", content, 40)[0] == len(content) - 44
    assert struct.unpack_from("<I", wav([], 24000), 40)[0] == 0


def test_values_beyond_full_scale_are_held_not_wrapped():
    loud = np.array([-2, -1, 0, 1, 2], np.float32)
    assert np.frombuffer(pcm16(loud), "<i2").tolist() == [-32767, -32767, 0, 32767, 32767]
