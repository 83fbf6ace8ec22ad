"""Where a recording holds speech: Silero's detector (ONNX), 32 ms a step, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from voiceprints.decoding import RATE, Samples, checked_samples
from voiceprints.errors import ModelRefused
from voiceprints.models import FOLDER, SILERO, require_no_telemetry

STEP = 512
_CONTEXT = 64
_BEGINS, _ENDS = 0.5, 0.35  # probability that starts speech, and that ends it
_SHORTEST_SPEECH, _SHORTEST_PAUSE, _PAD = 8, 4, 1  # steps: 256 ms, 128 ms, 32 ms
_MARGIN = RATE // 5  # short pauses belong to how somebody speaks: on real speakers they part better with them than without


@dataclass(frozen=True)
class Speech:
    """Speech segments of one recording: [start, end) in samples, in order, apart."""

    segments: tuple[tuple[int, int], ...]
    length: int

    @property
    def seconds(self) -> float:
        """Net speech."""
        return sum(end - start for start, end in self.segments) / RATE

    def mask(self) -> npt.NDArray[np.bool_]:
        """True at each sample [length] that belongs to speech."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for start, end in self.segments:
            mask[start:end] = True
        return mask

    def only(self, samples: Samples) -> Samples:
        """`samples` [length] without its longer pauses: the speech and 0.2 s on either side of each segment."""
        near = np.zeros(self.length, dtype=np.bool_)
        for start, end in self.segments:
            near[max(0, start - _MARGIN) : end + _MARGIN] = True
        return samples[near]


class Activity:
    """The detector. Same samples, same answer; safe from any thread (its state is the call's own)."""

    def __init__(self, folder: Path = FOLDER) -> None:
        require_no_telemetry()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(SILERO.read(folder), options, providers=["CPUExecutionProvider"])
        if float(self.probabilities(np.zeros(4 * STEP, dtype=np.float32)).max()) > _ENDS:
            raise ModelRefused("the voice activity model calls silence speech")

    def speech(self, samples: Samples) -> Speech:
        """Segments of speech in 16 kHz mono. Raises EmptyAudio, InvalidSamples."""
        found = _segments(self.probabilities(checked_samples(samples)))
        held = tuple((start * STEP, min(end * STEP, len(samples))) for start, end in found)
        return Speech(tuple(pair for pair in held if pair[1] > pair[0]), len(samples))

    def probabilities(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Probability of speech in each step of 512 samples, the last one padded with silence."""
        steps = -(-len(samples) // STEP)
        padded = np.zeros(_CONTEXT + steps * STEP, dtype=np.float32)
        padded[_CONTEXT : _CONTEXT + len(samples)] = samples
        state = np.zeros((2, 1, 128), dtype=np.float32)
        rate = np.array(RATE, dtype=np.int64)
        found = np.empty(steps, dtype=np.float32)
        for step in range(steps):
            window = padded[step * STEP : (step + 1) * STEP + _CONTEXT]
            output, state = self._session.run(None, {"input": window[None, :], "state": state, "sr": rate})
            found[step] = output[0, 0]
        if not np.isfinite(found).all():
            raise ModelRefused("the voice activity model gave no number")
        return found


def _segments(probabilities: npt.NDArray[np.float32]) -> list[tuple[int, int]]:
    """[start, end) in steps: runs above the threshold, short pauses bridged, short bursts dropped, padded."""
    runs: list[tuple[int, int]] = []
    start: int | None = None
    for step, value in enumerate((*probabilities.tolist(), 0.0)):
        if start is None and value >= _BEGINS:
            start = step
        elif start is not None and value < _ENDS:
            runs.append((start, step))
            start = None
    joined: list[tuple[int, int]] = []
    for run in runs:
        if joined and run[0] - joined[-1][1] < _SHORTEST_PAUSE:
            joined[-1] = (joined[-1][0], run[1])
        else:
            joined.append(run)
    kept = [run for run in joined if run[1] - run[0] >= _SHORTEST_SPEECH]
    return [(max(0, first - _PAD), min(last + _PAD, len(probabilities))) for first, last in kept]
