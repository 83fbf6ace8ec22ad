"""The engine in our words: text and conditioning numbers in, samples out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from synth.text import Script

Samples = npt.NDArray[np.float32]


class Scratch(Protocol):
    """Hands out arrays in locked memory that is overwritten when the voice is closed (`LockedBuffer.array`)."""

    def __call__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]: ...


class Engine(Protocol):
    """Speaks text in the colour that the conditioning gives. Safe to call from several threads."""

    @property
    def sample_rate(self) -> int:
        """Samples per second of what `speak` yields."""

    @property
    def conditioning_size(self) -> int:
        """How many float32 numbers a voice's conditioning has."""

    @property
    def scratch_bytes(self) -> int:
        """How much locked memory one `speak` or `measure` asks of its `scratch`, at most, whatever the text."""

    @property
    def model_id(self) -> str:
        """Name and content hash of the model; stands in the AAD of what is sealed for it."""

    def measure(self, samples: Samples, out: npt.NDArray[np.float32], scratch: Scratch) -> None:
        """Enrolment: from 16 kHz mono speech, write the voice's conditioning into `out` [conditioning_size] (locked memory).

        Raises SpeechTooShort; `out` is zero then.
        """

    def read(self, text: str) -> Script:
        """Make a text ready, before anything is opened for it. Raises TextRefused."""

    def speak(
        self, script: Script, conditioning: npt.NDArray[np.float32], scratch: Scratch, *, speed: float = 1.0
    ) -> Iterator[Samples]:
        """Yield one block of float32 samples in [-1, 1] for each of the script's sentences.

        All zeros as conditioning give the model's own voice. The same script, numbers and speed give the same samples.
        Raises SpeedRefused, ConditioningRefused at the call; SynthError from the iterator if the model fails.
        """
