"""Which digits does a recording say? Heard by `pocketsphinx` in a jailed child, which holds no key and is started for each one.

English digits, "oh" for zero too, in wideband speech: what a telephone or an 8 kHz recorder leaves of a voice is not heard rightly,
and so passes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from voiceprints import jailed
from voiceprints.decoding import Samples, checked_samples
from voiceprints.errors import DigitsUnreadable, RecogniserUnavailable

_LINE = re.compile(rb"ok ([0-9]*)\n")
_LONGEST_LINE = 1024
_START = "import sys; sys.path += sys.argv[1:3]; from voiceprints.digits_child import main; main()"


@dataclass(frozen=True)
class HearingLimits:
    """What listening to one recording may cost. Memory is the child's address space."""

    wall_seconds: float = 15.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 1024 * 1024


def spoken_digits(samples: Samples, count: int, limits: HearingLimits | None = None) -> str:
    """The digits that a recording (16 kHz mono) says, in order, heard as `count` of them. Blocks; safe from any thread.

    Anything else in it is heard as digits too; none are answered where nothing fits. Raises EmptyAudio, InvalidSamples,
    DigitsUnreadable, RecogniserUnavailable.
    """
    limits = limits or HearingLimits()
    pcm = (np.clip(checked_samples(samples), -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    try:
        numbers = (count, limits.memory_bytes, limits.cpu_seconds)
        argv = [*jailed.command(_START, "pocketsphinx"), *(str(number) for number in numbers)]
        said = jailed.answer(argv, pcm, most_bytes=_LONGEST_LINE, wall_seconds=limits.wall_seconds)
    except jailed.ChildUnavailable as problem:
        raise RecogniserUnavailable from problem
    except (jailed.ChildTimeout, jailed.AnswerEndless):
        raise DigitsUnreadable from None
    if said == b"refused jail\n":
        raise RecogniserUnavailable
    line = _LINE.fullmatch(said)
    if line is None:
        raise DigitsUnreadable  # the child died: a limit, a signal, or samples that broke the recogniser
    return line.group(1).decode()
