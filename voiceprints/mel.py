"""The encoder's front end, in numpy: 16 kHz mono speech to windows of mel spectrum, as GE2E was trained on.

Raised to -30 dBFS RMS when quieter; power spectrum of 400 points every 160 (periodic Hann, centred with zeros); 40 mel
bands after Slaney's Auditory Toolbox, area-normalised, not logged; windows of 160 frames (1.6 s), 1.3 a second, the last
one left out when less than three quarters of it are there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BANDS, FRAMES = 40, 160

_RATE, _FFT, _HOP = 16_000, 400, 160
_STEP = round(_RATE / 1.3 / _HOP)  # frames from one window to the next: 77
_LEAST_COVERED = 0.75
_LOUDNESS = 10.0 ** (-30.0 / 20.0)
_BLOCK = 1_000  # frames transformed at once: bounds the memory of a long recording
_LINEAR_HZ, _BREAK_HZ, _LOG_STEP = 200.0 / 3, 1_000.0, np.log(6.4) / 27  # Slaney: linear to 1 kHz, then logarithmic

Numbers = npt.NDArray[np.float32]


def window_count(length: int) -> int:
    """How many windows a recording of `length` samples has; at least one."""
    frames = -(-(length + 1) // _HOP)
    count = -(-max(1, frames - FRAMES + _STEP + 1) // _STEP)
    covered = (length - (count - 1) * _STEP * _HOP) / (FRAMES * _HOP)
    return count - 1 if count > 1 and covered < _LEAST_COVERED else count


def windowed_mel(samples: Numbers, filters: Numbers) -> Numbers:
    """Mel windows [n, 160, 40] of one recording."""
    count = window_count(len(samples))
    length = max(len(samples), ((count - 1) * _STEP + FRAMES) * _HOP)
    padded = np.zeros(length + _FFT, dtype=np.float32)
    padded[_FFT // 2 : _FFT // 2 + len(samples)] = samples * _gain(samples)
    mel = _mel(padded, filters)
    return np.stack([mel[start : start + FRAMES] for start in range(0, count * _STEP, _STEP)])


def slaney_filters() -> Numbers:
    """Triangular filters [40, 201] from 0 to 8 kHz, each with an area of one band's width in hertz."""
    edges = _hertz(np.linspace(0.0, _mels(_RATE / 2), BANDS + 2))
    bins = np.linspace(0.0, _RATE / 2, 1 + _FFT // 2)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None], dtype=np.float32)


def _mel(padded: Numbers, filters: Numbers) -> Numbers:
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)).astype(np.float32)
    out = np.empty((len(frames), BANDS), dtype=np.float32)
    for start in range(0, len(frames), _BLOCK):
        spectrum = np.fft.rfft(frames[start : start + _BLOCK] * window, axis=1)
        out[start : start + _BLOCK] = (spectrum.real**2 + spectrum.imag**2) @ filters.T
    return out


def _gain(samples: Numbers) -> np.float32:
    rms = float(np.sqrt(np.mean(samples * samples, dtype=np.float64)))
    return np.float32(_LOUDNESS / rms if 0.0 < rms < _LOUDNESS else 1.0)


def _mels(hertz: float) -> float:
    if hertz < _BREAK_HZ:
        return hertz / _LINEAR_HZ
    return float(_BREAK_HZ / _LINEAR_HZ + np.log(hertz / _BREAK_HZ) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    turn = _BREAK_HZ / _LINEAR_HZ
    return np.where(mels < turn, mels * _LINEAR_HZ, _BREAK_HZ * np.exp(_LOG_STEP * (mels - turn)))
