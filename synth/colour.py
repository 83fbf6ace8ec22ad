"""Acting on the model's spectra so that they take a speaker's colour: pitch, a per-phone equaliser, loudness.

Everything that the conditioning can be read from stands in scratch arrays of a fixed, small size: frames are worked on in
blocks. What leaves them is mixed with the speech: target bands, spectra, samples. Arrays that meet here have one shape and lie
in one order, or are single rows: numpy would run others through a buffer of its own, which it gives back unwiped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from synth import bands
from synth.conditioning import Conditioning
from synth.engine import Scratch

Array = npt.NDArray[np.float32]

_BLOCK = 32  # frames
_TAPS = tuple(np.float32(tap) for tap in (0.05, 0.15, 0.2, 0.2, 0.2, 0.15, 0.05))  # a phone's bias fades in over 75 ms
_REACH = len(_TAPS) // 2
_CLIP = np.float32(3.0)  # nats of amplitude
_QUARTER, _HALF = np.float32(0.25), np.float32(0.5)
_PEAK = np.float32(0.95)
_BINS, _BIN_HZ = 601, 20.0
SCRATCH_BYTES = 256 * 1024


class Colour:
    """One voice at work; made for one call of `speak` and used by one thread. Allocates all its scratch at once."""

    def __init__(self, voice: Conditioning, own_pitch: tuple[float, float], scratch: Scratch) -> None:
        self._voice, self._own_pitch = voice, own_pitch
        self._rows = scratch((_BLOCK + 2 * _REACH, bands.BANDS))
        self._smooth = scratch((_BLOCK, bands.BANDS))
        self._part = scratch((_BLOCK, bands.BANDS))
        self._low = scratch((_BLOCK, _BINS))
        self._high = scratch((_BLOCK, _BINS))
        self._gain = scratch(1)

    def pitch(self, curve: Array) -> Array:
        """The model's pitch curve [frames] moved to the speaker's median and spread."""
        return self._voice.moved(curve, self._own_pitch)

    def target(self, log: Array, classes: npt.NDArray[np.intp]) -> Array:
        """Log bands [frames, 40] that the speaker would have where the model has `log`, each frame as loud as before."""
        wanted = np.empty_like(log)
        frames = len(log)
        for start in range(0, frames, _BLOCK):
            count = min(_BLOCK, frames - start)
            around = np.clip(np.arange(start - _REACH, start + count + _REACH), 0, frames - 1)
            rows, smooth, part = self._rows[: len(around)], self._smooth[:count], self._part[:count]
            # mode="clip" writes straight into `out`; the default mode would go through a buffer of numpy's own.
            np.take(self._voice.bias, classes[around], axis=0, out=rows, mode="clip")
            for row in smooth:
                np.copyto(row, self._voice.shift)
            for place, tap in enumerate(_TAPS):
                np.multiply(rows[place : place + count], tap, out=part)
                np.add(smooth, part, out=smooth)
            np.add(log[start : start + count], smooth, out=wanted[start : start + count])
        loudness: Array = np.log(np.exp(log).sum(1, keepdims=True)) - np.log(np.exp(wanted).sum(1, keepdims=True))
        return wanted + loudness

    def equalise(self, target: Array, log: Array, spectra: tuple[Array, ...]) -> None:
        """Add to each log-amplitude spectrum [601, frames], in place, what leads from `log` to `target` [frames, 40]."""
        frames = len(log)
        lower, upper, weight = bands.bin_bands(_BINS, _BIN_HZ)
        weights = np.tile(weight, (_BLOCK, 1))
        for start in range(0, frames, _BLOCK):
            count = min(_BLOCK, frames - start)
            around = np.clip(np.arange(start - 1, start + count + 1), 0, frames - 1)
            rows, smooth, part = self._rows[: len(around)], self._smooth[:count], self._part[:count]
            low, high = self._low[:count], self._high[:count]
            np.subtract(target[around], log[around], out=rows)
            np.multiply(rows, _HALF, out=rows)  # power to amplitude
            np.clip(rows, -_CLIP, _CLIP, out=rows)
            np.multiply(rows[1:-1], _HALF, out=smooth)
            for side in (rows[:-2], rows[2:]):
                np.multiply(side, _QUARTER, out=part)
                np.add(smooth, part, out=smooth)
            np.take(smooth, lower, axis=1, out=low, mode="clip")
            np.take(smooth, upper, axis=1, out=high, mode="clip")
            np.subtract(high, low, out=high)
            np.multiply(high, weights[:count], out=high)
            np.add(low, high, out=low)
            for spectrum in spectra:
                for column, row in zip(spectrum.T[start : start + count], low, strict=True):
                    np.add(column, row, out=column)

    def loudness(self, samples: Array, heard: npt.NDArray[np.bool_]) -> None:
        """Bring the active frames of `samples`, in place, to the speaker's level."""
        hop = len(samples) // len(heard)
        voiced = samples.reshape(len(heard), hop)[heard]
        own = np.sqrt(np.mean(np.square(voiced), dtype=np.float32)) if voiced.size else np.float32(0)
        np.divide(self._voice.level, np.maximum(own, np.float32(1e-6)), out=self._gain)
        np.multiply(samples, self._gain, out=samples)


def keep_below_full_scale(samples: Array) -> None:
    """Scale `samples` in place so that no peak passes 0.95; nothing is clipped."""
    peak = np.max(np.abs(samples), initial=np.float32(0))
    if peak > _PEAK:
        samples *= _PEAK / peak
