"""What the tests of synthesis share: real speech, locked memory."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from keyvault.locked import LockedBuffer
from synth.engine import Scratch
from synth.hibari_engine import HibariEngine

SPEECH = Path(__file__).parents[2] / "examples" / "speech"
SPEAKERS = ("1998", "2033", "2414")


def flac(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray().ravel() for frame in container.decode(audio=0)]
    return np.concatenate(frames).astype(np.float32) / 32768


def utterances(speaker: str) -> list[np.ndarray]:
    return [flac(path) for path in sorted((SPEECH / speaker).glob("*.flac"))]


class Opened:
    """An opened voice: its numbers in one locked buffer, scratch in another that starts anew each time it is asked for."""

    def __init__(self, engine: HibariEngine, samples: np.ndarray | None = None) -> None:
        self.numbers = LockedBuffer(engine.conditioning_size * 4)
        self.work = LockedBuffer(engine.scratch_bytes)
        self.conditioning = self.numbers.array(engine.conditioning_size)
        if samples is not None:
            engine.measure(samples, self.conditioning, self.scratch)

    @property
    def scratch(self) -> Scratch:
        self.work.wipe()
        return self.work.array


def say(engine: HibariEngine, text: str, voice: Opened, speed: float = 1.0) -> np.ndarray:
    return np.concatenate(list(engine.speak(engine.read(text), voice.conditioning, voice.scratch, speed=speed)))


def to_16k(samples: np.ndarray) -> np.ndarray:
    """24 kHz to 16 kHz by cutting the spectrum."""
    whole = samples[: len(samples) // 3 * 3]
    kept = len(whole) * 2 // 3
    return (np.fft.irfft(np.fft.rfft(whole)[: kept // 2 + 1], kept) * (kept / len(whole))).astype(np.float32)
