"""Speech made by our own engine, for tests that need digits said: no real speaker's digits ship with the project."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from keyvault.locked import LockedBuffer
from synth.hibari_engine import HibariEngine

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
Say = Callable[..., np.ndarray]


def in_words(digits: str) -> str:
    """Digits as they are read out, one by one."""
    return " ".join(WORDS[int(digit)] for digit in digits) + "."


def at_16k(samples: np.ndarray) -> np.ndarray:
    """24 kHz to 16 kHz by cutting the spectrum."""
    whole = samples[: len(samples) // 3 * 3]
    kept = len(whole) * 2 // 3
    return (np.fft.irfft(np.fft.rfft(whole)[: kept // 2 + 1], kept) * (kept / len(whole))).astype(np.float32)


@pytest.fixture(scope="session")
def say() -> Say:
    """Speaks a text at 16 kHz: in the model's own voice, or in that of the recording `like`."""
    engine = HibariEngine()

    def spoken(text: str, like: np.ndarray | None = None) -> np.ndarray:
        with LockedBuffer(engine.conditioning_size * 4) as numbers, LockedBuffer(engine.scratch_bytes) as scratch:
            voice = numbers.array(engine.conditioning_size)
            if like is not None:
                engine.measure(like, voice, scratch.array)
                scratch.wipe()
            return at_16k(np.concatenate(list(engine.speak(engine.read(text), voice, scratch.array))))

    return spoken
