"""Pitch: a tracker by autocorrelation and Viterbi search, and the map from the model's pitch to a speaker's.

Autocorrelation divided by the window's own: P. Boersma, "Accurate short-term analysis of the fundamental frequency and the
harmonics-to-noise ratio of a sampled sound", IFA Proceedings 17 (1993).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

LOWEST_HZ, HIGHEST_HZ = 50.0, 420.0
_UNVOICED_BELOW_HZ = np.float32(40.0)  # what the speech model gives for unvoiced frames lies below
_RATE = 8000  # the tracker hears 0 to 1.5 kHz only, so 8 kHz holds it
_CUTOFF_HZ = 1500.0
_WINDOW = _RATE // 20  # 50 ms
_HOP = _RATE // 80  # 12.5 ms, the model's frame
_FFT = 1024
_CANDIDATES = 5
_UNVOICED_SCORE = 0.5  # a frame is voiced when its best autocorrelation peak is above this
_JUMP_COST = 0.8  # per octave
_SWITCH_COST = 0.25  # voiced to unvoiced or back
_OCTAVE_COST = 0.015  # per octave below 420 Hz: a period beats its multiples


def track(samples: Array, rate: int) -> Array:
    """Pitch in Hz [frames] every 12.5 ms, 0 where unvoiced. `rate` must be a multiple of 80."""
    low = _low_band(samples, rate)
    scores, periods = _candidates(low)
    path = _best_path(scores, np.log2(_RATE / periods))
    voiced = path < _CANDIDATES
    pitch = _RATE / periods[np.arange(len(path)), np.minimum(path, _CANDIDATES - 1)]
    return np.where(voiced, pitch, 0).astype(np.float32)


def _low_band(samples: Array, rate: int) -> Array:
    """The band below 1.5 kHz, resampled to 8 kHz by cutting the spectrum."""
    size = -(-len(samples) // rate) * rate
    spectrum = np.fft.rfft(samples, size)
    kept = size * _RATE // rate
    cut = np.zeros(kept // 2 + 1, np.complex128)
    top = int(_CUTOFF_HZ * size / rate)
    cut[:top] = spectrum[:top]
    wanted = -(-len(samples) * _RATE // rate)
    return (np.fft.irfft(cut, kept)[:wanted] * (_RATE / rate)).astype(np.float32)


def _candidates(low: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The five strongest peaks of each frame's autocorrelation: strength [frames, 5], period in samples [frames, 5]."""
    frames = -(-len(low) // _HOP)
    padded = np.zeros((frames - 1) * _HOP + _WINDOW, np.float32)
    used = min(len(low), len(padded) - _WINDOW // 2)
    padded[_WINDOW // 2 : _WINDOW // 2 + used] = low[:used]
    views = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
    window = np.hanning(_WINDOW + 1)[:-1]
    own = np.fft.irfft(np.abs(np.fft.rfft(window, _FFT)) ** 2)
    shortest, longest = int(_RATE / HIGHEST_HZ), int(_RATE / LOWEST_HZ)
    power = np.abs(np.fft.rfft((views - views.mean(1, keepdims=True)) * window, _FFT, axis=1)) ** 2
    correlation = np.fft.irfft(power, axis=1)[:, : longest + 2]
    energy = np.maximum(correlation[:, :1], 1e-12)
    correlation = correlation / energy * (own[0] / own[: longest + 2])
    quiet = energy[:, 0] < np.percentile(energy, 95) * 1e-3
    here = correlation[:, shortest : longest + 1]
    before, after = correlation[:, shortest - 1 : longest], correlation[:, shortest + 1 : longest + 2]
    peak = (here > before) & (here >= after)
    octaves = np.log2(np.arange(shortest, longest + 1) * HIGHEST_HZ / _RATE)
    strength = np.where(peak, here - _OCTAVE_COST * octaves, -1.0)
    best = np.argpartition(strength, -_CANDIDATES, axis=1)[:, -_CANDIDATES:]
    rows = np.arange(frames)[:, None]
    y0, y1, y2 = before[rows, best], here[rows, best], after[rows, best]
    bend = np.minimum(y0 - 2 * y1 + y2, -1e-9)
    shift = np.clip(0.5 * (y0 - y2) / bend, -0.5, 0.5)
    scores = strength[rows, best]
    scores[quiet] = -1.0
    return scores, np.clip(best + shortest + shift, shortest, longest)


def _best_path(scores: npt.NDArray[np.float64], octaves: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Viterbi over each frame's candidates and "unvoiced" (state 5): the path of most strength and least jumping."""
    frames = len(scores)
    states = _CANDIDATES + 1
    gain = np.concatenate([scores, np.full((frames, 1), _UNVOICED_SCORE)], axis=1)
    step = np.full((frames - 1, states, states), _SWITCH_COST)
    step[:, :-1, :-1] = _JUMP_COST * np.abs(octaves[:-1, :, None] - octaves[1:, None, :])
    step[:, -1, -1] = 0
    back = np.empty((frames, states), np.intp)
    total = gain[0]
    for t in range(1, frames):
        options = total[:, None] - step[t - 1]
        back[t] = options.argmax(0)
        total = options.max(0) + gain[t]
    path = np.empty(frames, np.intp)
    path[-1] = total.argmax()
    for t in range(frames - 1, 0, -1):
        path[t - 1] = back[t, path[t]]
    return path


def summarise(pitch: Array, centre: Array, spread: Array) -> None:
    """Median of log2 pitch over voiced frames into `centre` [1]; 1.4826 times the median deviation into `spread` [1]."""
    octaves = np.log2(pitch[pitch > 0])
    middle = (len(octaves) - 1) // 2
    np.copyto(centre, np.partition(octaves, middle)[middle : middle + 1])
    deviation = np.abs(octaves - centre)
    np.multiply(np.partition(deviation, middle)[middle : middle + 1], np.float32(1.4826), out=spread)
    np.clip(spread, np.float32(0.06), np.float32(0.3), out=spread)


def mapped(pitch: Array, own: tuple[float, float], centre: Array, spread: Array) -> Array:
    """Move a pitch curve [frames] (Hz, below 40 unvoiced) from `own` (median, spread of log2) to the speaker's, 50 to 420 Hz."""
    voiced = pitch > _UNVOICED_BELOW_HZ
    score = (np.log2(np.maximum(pitch, _UNVOICED_BELOW_HZ)) - np.float32(own[0])) / np.float32(own[1])
    moved = np.exp2(np.clip(score, -3, 3) * spread + centre)
    return np.where(voiced, np.clip(moved, LOWEST_HZ, HIGHEST_HZ), pitch).astype(np.float32)
