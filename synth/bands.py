"""Sound as band powers: 40 mel bands every 12.5 ms, on the frame grid of the speech model.

The same physical bins (31.25 Hz apart, 0 to 8 kHz) are taken at 16 kHz (enrolment) and at 24 kHz (what the model renders),
so the two are compared without resampling. Frame t is centred on sample t * hop: it is the model's own frame t.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Precise = npt.NDArray[np.float64]

BANDS = 40
FRAMES_PER_SECOND = 80
BIN_HZ = 31.25
TOP_HZ = 8000.0
_BINS = int(TOP_HZ / BIN_HZ) + 1
_FLOOR = 1e-7
_BLOCK = 512


def mel(hz: Precise) -> Precise:
    """Slaney's mel scale: linear to 1 kHz, logarithmic above (27 steps for a factor of 6.4)."""
    linear = hz * 3 / 200
    return np.where(hz < 1000, linear, 15 + 27 * np.log(np.maximum(hz, 1e-9) / 1000) / np.log(6.4))


def _hz(mels: Precise) -> Precise:
    return np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))


def _edges() -> Precise:
    return _hz(np.linspace(0, float(mel(np.array(TOP_HZ))), BANDS + 2))


@functools.cache
def _filters() -> Array:
    """Triangles [257, 40], each summing to 1, so that a band is the average power of its bins."""
    edges, bins = _edges(), np.arange(_BINS) * BIN_HZ
    up = (bins[:, None] - edges[None, :-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[None, 2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    weights = np.maximum(0, np.minimum(up, down))
    filters: Array = (weights / np.maximum(weights.sum(0), 1e-12)).astype(np.float32)
    return filters


@functools.cache
def bin_bands(bins: int, spacing_hz: float) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]:
    """How `bins` spectrum bins lie between band centres on the mel axis: lower band, upper band, weight of the upper one.

    Bins outside the centres take the nearest band, so that 8 to 12 kHz follows the top one.
    """
    centres = mel(_edges()[1:-1])
    place = np.interp(mel(np.arange(bins, dtype=np.float64) * spacing_hz), centres, np.arange(BANDS))
    lower = np.minimum(place.astype(np.intp), BANDS - 2)
    return lower, lower + 1, (place - lower).astype(np.float32)


def powers(samples: Array, rate: int) -> Array:
    """Band powers [frames, 40] of mono samples at 16 or 24 kHz; frames = ceil(samples / hop)."""
    hop, window = rate // FRAMES_PER_SECOND, rate // 40
    size = int(rate / BIN_HZ)
    shape = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)
    shape /= shape.sum()
    frames = -(-len(samples) // hop)
    padded = np.zeros((frames - 1) * hop + window, np.float32)
    used = min(len(samples), len(padded) - window // 2)
    padded[window // 2 : window // 2 + used] = samples[:used]
    views = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    out = np.empty((frames, BANDS), np.float32)
    for start in range(0, frames, _BLOCK):
        spectrum = np.fft.rfft(views[start : start + _BLOCK] * shape, size, axis=1)[:, :_BINS]
        out[start : start + _BLOCK] = (spectrum.real**2 + spectrum.imag**2).astype(np.float32) @ _filters()
    return out


def active(power: Array, within_db: float) -> npt.NDArray[np.bool_]:
    """Frames whose total power lies within `within_db` of the 95th percentile."""
    total = power.sum(1)
    return np.asarray(total > np.percentile(total, 95) * 10 ** (-within_db / 10))


def mean_active(power: Array) -> np.float32:
    """Mean total power of the frames within 20 dB of the 95th percentile: the unit of relative powers."""
    loud = active(power, 20)
    return np.float32(max(float(power[loud].sum(1).mean()) if loud.any() else 0.0, 1e-20))


def log_relative(power: Array, unit: np.float32) -> Array:
    """Natural log of band powers [frames, 40] over `unit`, floored 70 dB below it."""
    log: Array = np.log(power / unit + np.float32(_FLOOR))
    return log


def log_bands(power: Array, *, denoise: bool) -> Array:
    """`log_relative` to the mean active frame; with `denoise` a steady noise floor is taken out first."""
    unit = mean_active(power)
    if denoise:
        floor = np.percentile(power, 6, axis=0).astype(np.float32) * np.float32(1.3)
        power = np.maximum(power - floor, power * np.float32(0.1))
    return log_relative(power, unit)
