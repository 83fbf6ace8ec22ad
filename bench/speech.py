"""How fast speech is made, and how much nearer a measured voice is to its speaker than the model's own voice.

    ORT_DISABLE_TELEMETRY=1 python -m bench.speech [--quick] [--speech FOLDER]

One JSON object a line. Speakers are the folders of FOLDER (default: examples/speech) with at least five utterances: three
enrol, the rest judge. The judge is GE2E, which has no part in the measurement; no gradient or search sees it. Speaking and
measuring are timed in processor seconds, so that a busy machine says the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from bench.lines import report
from keyvault.locked import LockedBuffer
from synth.hibari_engine import REFERENCE, HibariEngine
from voiceprints.embedding import centre
from voiceprints.encoder import Encoder

Array = npt.NDArray[np.float32]
SHIPPED = Path(__file__).parents[1] / "examples" / "speech"
TEXTS = (
    "Every morning the baker opens his shop before the sun comes up.",
    "You should call the office if the parcel has not arrived by Thursday.",
    "A narrow path leads through the forest to a quiet lake.",
    "She counted seventeen boats in the harbor and wrote their names down.",
)


def flac(path: Path) -> Array:
    with av.open(str(path)) as container:
        whole = np.concatenate([frame.to_ndarray().ravel() for frame in container.decode(audio=0)])
    scaled: Array = whole.astype(np.float32) / np.float32(32768)
    return scaled


def to_16k(samples: Array) -> Array:
    whole = samples[: len(samples) // 3 * 3]
    kept = len(whole) * 2 // 3
    cut: Array = (np.fft.irfft(np.fft.rfft(whole)[: kept // 2 + 1], kept) * (kept / len(whole))).astype(np.float32)
    return cut


class Ear:
    """GE2E: recordings to one unit vector."""

    def __init__(self) -> None:
        self._encoder = Encoder()

    def hear(self, recordings: list[Array]) -> Array:
        out = np.zeros(256, np.float32)
        centre(self._encoder.windows(recordings, np.zeros), out)
        return out


class Voice:
    """One enrolled speaker: the numbers, and the processor time that measuring and speaking took."""

    def __init__(self, engine: HibariEngine, recordings: list[Array]) -> None:
        self._engine = engine
        self._memory = LockedBuffer(engine.conditioning_size * 4)
        self._work = LockedBuffer(engine.scratch_bytes)
        self.numbers = self._memory.array(engine.conditioning_size)
        self.spoken_s = self.speaking_s = self.measuring_s = self.measured_s = 0.0
        if recordings:
            samples = np.concatenate(recordings)
            started = time.process_time()
            engine.measure(samples, self.numbers, self._work.array)
            self.measuring_s, self.measured_s = time.process_time() - started, len(samples) / 16000

    def say(self, text: str) -> Array:
        self._work.wipe()
        started = time.process_time()
        samples = np.concatenate(list(self._engine.speak(self._engine.read(text), self.numbers, self._work.array)))
        self.speaking_s += time.process_time() - started
        self.spoken_s += len(samples) / self._engine.sample_rate
        return samples

    @property
    def real_time_factor(self) -> float:
        return self.speaking_s / self.spoken_s


def speakers(folder: Path) -> dict[str, list[Array]]:
    found = {}
    for person in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(person.glob(f"{person.name}-*.flac"))
        if len(files) >= 5:
            found[person.name] = [flac(file) for file in files]
    return found


def similarity(engine: HibariEngine, people: dict[str, list[Array]], texts: tuple[str, ...]) -> None:
    """Cosines and first ranks of what is spoken, adapted against unadapted, and of a real utterance as the ceiling."""
    ear = Ear()
    targets = np.stack([ear.hear(recordings[3:]) for recordings in people.values()])
    own = Voice(engine, [])
    plain = np.stack([ear.hear([to_16k(own.say(text))]) for text in texts]) @ targets.T
    voices = {name: Voice(engine, recordings[:3]) for name, recordings in people.items()}
    adapted = np.stack([[ear.hear([to_16k(voice.say(text))]) for text in texts] for voice in voices.values()]) @ targets.T
    real = np.mean([ear.hear([recordings[0]]) @ target for recordings, target in zip(people.values(), targets, strict=True)])
    mine = np.arange(len(people))
    near, before = adapted[mine, :, mine], plain.T
    report("speech.similarity_adapted", float(near.mean()), "cos", float(before.mean()), 0.7)
    report("speech.similarity_adapted_worst", float(near.min()), "cos", float(before.min()), None)
    report("speech.similarity_of_a_real_utterance", float(real), "cos", float(near.mean()), None)
    first = float((adapted.argmax(2) == mine[:, None]).mean())
    first_before = float(np.mean([(plain.argmax(1) == place).mean() for place in mine]))
    report("speech.first_rank_adapted", first, f"share of {near.size}", first_before, None)
    every = voices.values()
    factor = sum(voice.speaking_s for voice in every) / sum(voice.spoken_s for voice in every)
    report("speech.real_time_factor_adapted", factor, "processor s/s", own.real_time_factor, 0.2, lower_is_better=True)
    enrolment = max(voice.measuring_s * 30 / voice.measured_s for voice in every)
    report("speech.enrolment_of_30_s", enrolment, "processor s", None, 3.0, lower_is_better=True)


def first_block(engine: HibariEngine) -> None:
    """Time from text to the first sentence of a long one, against all of it."""
    script_text = " ".join(REFERENCE)
    voice = Voice(engine, [])
    started = time.perf_counter()
    blocks = engine.speak(engine.read(script_text), voice.numbers, np.zeros)
    next(blocks)
    first = time.perf_counter() - started
    for _ in blocks:
        pass
    report("speech.first_block", first, "s", time.perf_counter() - started, 1.0, lower_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two texts instead of four")
    parser.add_argument("--speech", type=Path, default=SHIPPED, help="a folder of speakers' folders")
    chosen = parser.parse_args()
    started = time.perf_counter()
    engine = HibariEngine()
    report("speech.load", time.perf_counter() - started, "s", None, 5.0, lower_is_better=True)
    first_block(engine)
    similarity(engine, speakers(chosen.speech), TEXTS[:2] if chosen.quick else TEXTS)


if __name__ == "__main__":
    main()
