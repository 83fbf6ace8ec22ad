"""How often six spoken digits are heard rightly, and in the right voice, as liveness asks for both.

    ORT_DISABLE_TELEMETRY=1 python -m bench.liveness [--quick] [--recordings FOLDER]

One JSON object a line. The voices are the engine's own and those measured on examples/speech, and say random digits: no corpus of
people's digits ships. FOLDER may hold some: FLAC or WAV files named for what they say, `402607-anything.wav`, at 16 kHz, which are
then heard instead.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

from bench.lines import report
from bench.speech import SHIPPED, TEXTS, Array, Voice, speakers, to_16k
from policies.liveness import DIGITS
from synth.hibari_engine import HibariEngine
from voiceprints.activity import Activity
from voiceprints.decoding import decode
from voiceprints.digits import spoken_digits
from voiceprints.embedding import centre
from voiceprints.encoder import Encoder
from voiceprints.matching import Band, Bands

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Ear:
    """Recordings to one unit vector, as a comparison makes it: speech alone, then GE2E."""

    def __init__(self) -> None:
        self._activity, self._encoder = Activity(), Encoder()

    def hear(self, recordings: list[Array]) -> Array:
        out = np.zeros(256, np.float32)
        speech = [self._activity.speech(samples).only(samples) for samples in recordings]
        centre(self._encoder.windows(speech, np.zeros), out)
        return out


def synthetic(tries: int) -> None:
    """Random digits in each voice, against its own voiceprint and the others'."""
    engine, ear, bands, draw = HibariEngine(), Ear(), Bands(), random.Random(11)
    voices = {"own": Voice(engine, [])} | {name: Voice(engine, heard[:3]) for name, heard in speakers(SHIPPED).items()}
    prints = {name: ear.hear([to_16k(voice.say(text)) for text in TEXTS[:3]]) for name, voice in voices.items()}
    heard: list[bool] = []
    mine: list[bool] = []
    others: list[bool] = []
    for name, voice in voices.items():
        for _ in range(tries):
            digits = "".join(str(draw.randrange(10)) for _ in range(DIGITS))
            said = to_16k(voice.say(" ".join(WORDS[int(digit)] for digit in digits) + "."))
            heard.append(spoken_digits(said, DIGITS) == digits)
            vector = ear.hear([said])
            found = {known: bands.of(float(vector @ target)) is Band.MATCH for known, target in prints.items()}
            mine.append(found.pop(name))
            others += found.values()
    count = len(heard)
    report("liveness.digits_heard", float(np.mean(heard)), f"share of {count}", None, 0.8)
    report("liveness.voice_matched", float(np.mean(mine)), f"share of {count}", float(np.mean(others)), 0.9)
    report("liveness.passed", float(np.mean(np.array(heard) & np.array(mine))), f"share of {count}", None, 0.8)
    report("liveness.others_matched", float(np.mean(others)), f"share of {len(others)}", None, 0.05, lower_is_better=True)


def recorded(folder: Path) -> None:
    """What people said, as the names of the files have it."""
    files = sorted(path for path in folder.iterdir() if path.suffix in {".wav", ".flac"} and path.name[0].isdigit())
    said = {path: path.stem.partition("-")[0] for path in files}
    right = [spoken_digits(decode(path.read_bytes()).samples, len(digits)) == digits for path, digits in said.items()]
    report("liveness.recordings_heard", float(np.mean(right)), f"share of {len(right)}", None, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five sequences a voice instead of 25")
    parser.add_argument("--recordings", type=Path, help="a folder of recordings named for the digits that they say")
    chosen = parser.parse_args()
    if chosen.recordings is not None:
        recorded(chosen.recordings)
    else:
        synthetic(5 if chosen.quick else 25)


if __name__ == "__main__":
    main()
