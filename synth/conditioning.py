"""A voice's conditioning: the numbers that colour the model's voice, and their measurement from enrolment speech.

Layout, 1844 float32 numbers (biometric data: they exist in locked memory only):

    [0]          pitch: median log2 of the voiced frames' F0 in Hz
    [1]          spread: 1.4826 times the median absolute deviation of that log2, 0.06 to 0.3
    [2]          level: RMS of active frames, 0.025 to 0.16 of full scale
    [3]          mark: 1 for a measured voice
    [4:1804]     bias [45 phones, 40 bands]: log power that the speaker has more than the model, beyond the shift
    [1804:1844]  shift [40 bands]: the same over all speech

All zeros mean the model's own voice. Locked memory is kept to by one rule: an array that holds these numbers, or what they
can be read from without the speech, is `out` or a view of it. numpy operations write with `out=`, in one type and without
stretching these numbers over the rows of a larger array: a cast, and a stretched row as well, would pass through a buffer of
numpy's own, which it gives back unwiped. What applies to every row is a loop over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from synth import bands, prosody
from synth.errors import ConditioningRefused, SpeechTooShort
from synth.phones import PHONES, SILENCE, Phones

Array = npt.NDArray[np.float32]
Classes = npt.NDArray[np.intp]
# The model's own speech in the pitch just measured: log band powers [frames, 40] and each frame's phone [frames], by sentence.
Reference = Callable[["Conditioning"], Iterable[tuple[Array, Classes]]]

SIZE = 4 + PHONES * bands.BANDS + bands.BANDS
RATE = 16000
_LEAST_VOICED_FRAMES = 2 * bands.FRAMES_PER_SECOND
_SILENCE_BELIEF = 0.7  # above this a frame is a pause
_RIDGE = np.float32(3.0)  # frames of evidence that pull each phone's bias toward the shift
_PRIOR = np.float32(5.0)  # frames that pull the model's mean of a rare phone toward its overall mean


@dataclass(frozen=True, repr=False)
class Conditioning:
    """Views into one vector; nothing is copied."""

    vector: Array
    pitch: Array
    spread: Array
    level: Array
    mark: Array
    bias: Array
    shift: Array

    @classmethod
    def of(cls, vector: Array) -> Conditioning:
        """Views of `vector` [1844]. Raises ConditioningRefused for another size or type."""
        if vector.shape != (SIZE,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
            raise ConditioningRefused(f"a conditioning is {SIZE} contiguous float32 numbers")
        return cls(
            vector=vector,
            pitch=vector[0:1],
            spread=vector[1:2],
            level=vector[2:3],
            mark=vector[3:4],
            bias=vector[4 : SIZE - bands.BANDS].reshape(PHONES, bands.BANDS),
            shift=vector[SIZE - bands.BANDS :],
        )

    @property
    def neutral(self) -> bool:
        """All zeros: the model's own voice."""
        return not self.vector.any()

    def moved(self, curve: Array, own: tuple[float, float]) -> Array:
        """A pitch curve [frames] moved from `own` (median, spread of log2) to this voice's."""
        return prosody.mapped(curve, own, self.pitch, self.spread)

    def check(self) -> None:
        """Raises ConditioningRefused for numbers that no measurement gives. Compares in place; takes no copy."""
        inside = (
            bool(np.isfinite(self.vector).all())
            and bool((self.mark == 1).all())
            and bool(((self.pitch > 5) & (self.pitch < 9)).all())
            and bool(((self.spread > 0) & (self.spread < 1)).all())
            and bool(((self.level > 0) & (self.level < 1)).all())
            and bool(((self.vector > -30) & (self.vector < 30)).all())
        )
        if not inside and not self.neutral:
            raise ConditioningRefused


def measure(samples: Array, phones: Phones, reference: Reference, out: Array) -> None:
    """Write the conditioning of the speaker of `samples` (mono, 16 kHz) into `out` [1844].

    Raises SpeechTooShort with less than two seconds of voiced sound; `out` is zero then.
    """
    voice = Conditioning.of(out)
    out[:] = 0
    if len(samples) < RATE or not np.isfinite(samples).all():
        raise SpeechTooShort
    try:
        _measure(np.ascontiguousarray(samples, dtype=np.float32), phones, reference, voice)
    except BaseException:
        out[:] = 0
        raise


def _measure(samples: Array, phones: Phones, reference: Reference, voice: Conditioning) -> None:
    power = bands.powers(samples, RATE)
    heard = bands.active(power, 25)
    log = bands.log_bands(power, denoise=True)
    pitch = prosody.track(samples, RATE)
    if np.count_nonzero(pitch) < _LEAST_VOICED_FRAMES:
        raise SpeechTooShort
    prosody.summarise(pitch, voice.pitch, voice.spread)
    _level(samples, heard, voice.level)
    belief = phones.posteriors(log)
    speech = heard & (belief[:, SILENCE] < _SILENCE_BELIEF)
    if np.count_nonzero(speech) < _LEAST_VOICED_FRAMES:
        raise SpeechTooShort
    _timbre(_relative(log[speech]), belief[speech], *_model_means(reference(voice)), voice)
    voice.mark[:] = 1


def _relative(log: Array) -> Array:
    """Log bands less the log of their sum: the shape of a frame without its loudness."""
    loudness: Array = np.log(np.exp(log).sum(1, keepdims=True))
    return log - loudness


def _level(samples: Array, heard: npt.NDArray[np.bool_], out: Array) -> None:
    hop = RATE // bands.FRAMES_PER_SECOND
    whole = len(samples) // hop
    squares = np.square(samples[: whole * hop].reshape(whole, hop)[heard[:whole]]).reshape(1, -1)
    np.add.reduce(squares, axis=1, out=out)
    np.divide(out, np.float32(max(squares.size, 1)), out=out)
    np.sqrt(out, out=out)
    np.clip(out, np.float32(0.025), np.float32(0.16), out=out)


def _model_means(reference: Iterable[tuple[Array, Classes]]) -> tuple[Array, Array]:
    """The model's mean frame by phone [45, 40] and over all speech [40]."""
    frames, labels = [], []
    for log, classes in reference:
        kept = bands.active(np.exp(log), 25) & (classes != SILENCE)
        frames.append(_relative(log[kept]))
        labels.append(classes[kept])
    shapes = np.concatenate(frames)
    members = np.eye(PHONES, dtype=np.float32)[np.concatenate(labels)]
    overall = shapes.mean(0)
    means = (members.T @ shapes + _PRIOR * overall) / (members.sum(0)[:, None] + _PRIOR)
    return means.astype(np.float32), overall.astype(np.float32)


def _timbre(shapes: Array, belief: Array, means: Array, overall: Array, voice: Conditioning) -> None:
    """Ridge regression, in closed form: shapes = weights (means + bias) + shift, each bias pulled toward zero.

    The last step of each number writes into `voice`; before it stand sums over frames and residuals of frames.
    """
    weights = belief.copy()
    weights[:, SILENCE] = 0
    weights /= np.maximum(weights.sum(1, keepdims=True), np.float32(1e-6))
    voice.shift[:] = 0
    for row in shapes:
        np.add(voice.shift, row, out=voice.shift)
    np.divide(voice.shift, np.float32(len(shapes)), out=voice.shift)
    np.subtract(voice.shift, overall, out=voice.shift)
    residual = shapes - weights @ means
    for row in residual:
        np.subtract(row, voice.shift, out=row)
    square = weights.T @ weights + _RIDGE * np.eye(PHONES, dtype=np.float32)
    solver = np.ascontiguousarray(np.linalg.solve(square, weights.T))
    np.matmul(solver, residual, out=voice.bias)
    voice.bias[SILENCE] = 0
