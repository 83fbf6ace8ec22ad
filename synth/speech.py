"""Use case: speak a text in an opened voice, sentence by sentence, and say what was spoken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from synth.engine import Engine, Samples, Scratch
from synth.errors import SpeechTooLong
from synth.scheduler import Scheduler, Turn
from synth.text import Script

MAX_SECONDS = 600
"""Of speech in one request, whatever the text: digits and slow speed make much of little."""


class OpenVoice(Protocol):
    """What an opened voice lends for the length of its `with` block."""

    @property
    def conditioning(self) -> npt.NDArray[np.float32]:
        """The engine's numbers, in locked memory."""

    @property
    def scratch(self) -> Scratch:
        """Locked memory beside them, at least `Engine.scratch_bytes`."""


@dataclass(frozen=True)
class Facts:
    """What was spoken so far: for the audit entry and the answer's headers."""

    characters: int
    sentences: int
    spoken: int
    seconds: float
    skipped: tuple[str, ...] = field(repr=False)


class Spoken:
    """An iterator over blocks of samples, one a sentence; `facts` may be read at any time."""

    def __init__(self, script: Script, blocks: Iterator[Samples], turn: Turn, rate: int) -> None:
        self._script, self._blocks, self._turn, self._rate = script, blocks, turn, rate
        self._samples = self._spoken = 0

    def __iter__(self) -> Spoken:
        return self

    def __next__(self) -> Samples:
        self._turn.wait()
        block = next(self._blocks)
        self._samples += len(block)
        if self._samples > MAX_SECONDS * self._rate:
            raise SpeechTooLong
        self._spoken += 1
        return block

    @property
    def facts(self) -> Facts:
        return Facts(
            characters=self._script.characters,
            sentences=len(self._script.sentences),
            spoken=self._spoken,
            seconds=self._samples / self._rate,
            skipped=self._script.skipped,
        )


class Speech:
    """Joins an engine and a scheduler. A request reads its text, reserves a turn, opens the voice, speaks; in that order.

    script = speech.read(text)              # TextRefused: nothing was used up
    with speech.reserve() as turn:          # Busy: nothing was used up
        ...                                 # consume the token, open the voice
        spoken = speech.speak(voice, script, turn=turn)
        for block in spoken: ...            # the first one waits for its turn
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine, self._scheduler = engine, scheduler

    @property
    def sample_rate(self) -> int:
        return self._engine.sample_rate

    @property
    def scratch_bytes(self) -> int:
        """How much locked memory an opened voice must lend."""
        return self._engine.scratch_bytes

    def read(self, text: str) -> Script:
        """Make the text ready. Raises TextRefused."""
        return self._engine.read(text)

    def reserve(self) -> AbstractContextManager[Turn]:
        """Take a place in the line, at once. Raises Busy."""
        return self._scheduler.reserve()

    def speak(self, voice: OpenVoice, text: str | Script, *, turn: Turn, speed: float = 1.0) -> Spoken:
        """Blocks of float32 samples in the voice's colour; the voice must stay open until the last one.

        Raises TextRefused, SpeedRefused, ConditioningRefused at the call; Cancelled before the next sentence once the
        turn is cancelled.
        """
        script = self.read(text) if isinstance(text, str) else text
        blocks = self._engine.speak(script, voice.conditioning, voice.scratch, speed=speed)
        return Spoken(script, blocks, turn, self._engine.sample_rate)
