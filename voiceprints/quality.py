"""Quality gates: each has a code, a measured value and a threshold, and all that fail are named at once.

Thresholds are data, with where they come from. Enrolment asks for what published services ask (RingCentral, Azure: seconds
of net speech, signal to noise); a probe is judged more softly, because a refusal there costs a caller a try.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from voiceprints.activity import Speech
from voiceprints.decoding import RATE, Samples
from voiceprints.embedding import Vector
from voiceprints.errors import QualityRefused, Shortfall

_FRAME = 320  # 20 ms
_FFT = 512
_LEAST_PAUSE_FRAMES = 15  # 0.3 s of pauses before their level is believed
_HIGHEST_SNR, _LOWEST_SNR = 80.0, -20.0
_AUDIBLE = 10.0 ** (-60 / 10)  # of the loudest band: below it there is no voice
_LEAST_WINDOWS, _LEAST_SHARE = 12, 0.2  # for telling two speakers apart


@dataclass(frozen=True)
class QualityLimits:
    """What recordings must have. Seconds, decibels, hertz, shares of one, cosine."""

    speech_seconds: float
    total_seconds: float = 300.0
    speech_share: float = 0.35
    snr_db: float = 10.0
    clipped_share: float = 0.005
    bandwidth_hz: float = 3_000.0
    speaker_agreement: float = 0.75


ENROLMENT = QualityLimits(speech_seconds=5.0)
"""5 s of net speech: what clones need at least; more is better, and the API says how much there was."""

PROBE = QualityLimits(speech_seconds=1.0, total_seconds=60.0, speech_share=0.1, snr_db=5.0, clipped_share=0.02)


@dataclass(frozen=True)
class Quality:
    """What was measured over one or more recordings; the worst recording counts for noise, clipping and bandwidth."""

    total_seconds: float
    speech_seconds: float
    snr_db: float
    clipped_share: float
    bandwidth_hz: float
    speaker_agreement: float | None = None

    @property
    def speech_share(self) -> float:
        """Speech over everything."""
        return self.speech_seconds / self.total_seconds if self.total_seconds else 0.0

    def with_agreement(self, agreement: float | None) -> Quality:
        """The same, with what the encoder's windows say about there being one speaker."""
        return replace(self, speaker_agreement=agreement)

    def require(self, limits: QualityLimits) -> None:
        """Raise QualityRefused with every gate that fails."""
        failed = tuple(self._failed(limits))
        if failed:
            raise QualityRefused(failed)

    def _failed(self, limits: QualityLimits) -> Iterator[Shortfall]:
        if self.total_seconds > limits.total_seconds:
            yield Shortfall("too_long", round(self.total_seconds, 2), limits.total_seconds)
        if self.speech_seconds <= 0.0:
            # Without speech the other measures say nothing.
            yield Shortfall("no_speech", 0.0, limits.speech_seconds)
            return
        if self.speech_seconds < limits.speech_seconds:
            yield Shortfall("too_short", round(self.speech_seconds, 2), limits.speech_seconds)
        if self.speech_share < limits.speech_share:
            yield Shortfall("too_little_speech", round(self.speech_share, 3), limits.speech_share)
        if self.snr_db < limits.snr_db:
            yield Shortfall("too_noisy", round(self.snr_db, 1), limits.snr_db)
        if self.clipped_share > limits.clipped_share:
            yield Shortfall("clipped", round(self.clipped_share, 5), limits.clipped_share)
        if self.bandwidth_hz < limits.bandwidth_hz:
            yield Shortfall("bandwidth", round(self.bandwidth_hz), limits.bandwidth_hz)
        if self.speaker_agreement is not None and self.speaker_agreement < limits.speaker_agreement:
            yield Shortfall("not_one_speaker", round(self.speaker_agreement, 2), limits.speaker_agreement)


def measured(recordings: Sequence[Samples], speech: Sequence[Speech]) -> Quality:
    """What the signal itself shows; `speech[i]` is the voice activity of `recordings[i]`."""
    pairs = [(samples, found) for samples, found in zip(recordings, speech, strict=True) if found.segments]
    return Quality(
        total_seconds=sum(len(samples) for samples in recordings) / RATE,
        speech_seconds=sum(found.seconds for found in speech),
        snr_db=min((signal_to_noise(*pair) for pair in pairs), default=_LOWEST_SNR),
        clipped_share=max((clipped_share(samples) for samples, _ in pairs), default=0.0),
        bandwidth_hz=min((bandwidth(*pair) for pair in pairs), default=0.0),
    )


def signal_to_noise(samples: Samples, speech: Speech) -> float:
    """Decibels of speech over what is heard in the pauses; over the quietest twentieth where there are hardly any pauses."""
    count = len(samples) // _FRAME
    if not count:
        return _LOWEST_SNR
    frames = (samples[: count * _FRAME] - np.mean(samples)).reshape(count, _FRAME).astype(np.float64)
    power = np.einsum("fs,fs->f", frames, frames) / _FRAME
    voiced = speech.mask()[: count * _FRAME].reshape(count, _FRAME)
    speaking, pausing = voiced.all(axis=1), ~voiced.any(axis=1)
    noise = float(np.median(power[pausing])) if pausing.sum() >= _LEAST_PAUSE_FRAMES else float(np.quantile(power, 0.05))
    signal = float(np.mean(power[speaking])) - noise if speaking.any() else 0.0
    if noise <= 0.0:
        return _HIGHEST_SNR
    return float(np.clip(10 * np.log10(max(signal, 1e-30) / noise), _LOWEST_SNR, _HIGHEST_SNR))


def clipped_share(samples: Samples) -> float:
    """Share of samples at full scale, or crowded at the recording's own peak, as after clipping and turning down."""
    size = np.abs(samples)
    return float(np.mean(size >= min(0.98, 0.99 * float(size.max()))))


def bandwidth(samples: Samples, speech: Speech) -> float:
    """The highest frequency, in hertz, at which the speech is less than 60 dB below its loudest band."""
    spoken = np.concatenate([samples[start:end] for start, end in speech.segments])
    count = len(spoken) // _FFT
    if not count:
        return 0.0
    frames = spoken[: count * _FFT].reshape(count, _FFT) * np.hanning(_FFT).astype(np.float32)
    bins = np.abs(np.fft.rfft(frames, axis=1)).astype(np.float64)
    spectrum = np.einsum("fb,fb->b", bins, bins)[1:]
    heard = np.flatnonzero(spectrum > _AUDIBLE * spectrum.max())
    return float((heard[-1] + 1) * RATE / _FFT) if len(heard) else 0.0


def speaker_agreement(windows: Vector) -> float | None:
    """Cosine of the two most different groups of windows [n, 256]; None for too few windows to tell.

    One speaker's two groups stay alike; two speakers' fall apart. Works on the windows' mutual cosines only: einsum, because
    a matrix product would copy the windows into the BLAS library's own memory.
    """
    if len(windows) < _LEAST_WINDOWS:
        return None
    alike = np.einsum("id,jd->ij", windows, windows, optimize=False)
    one, other = np.unravel_index(int(np.argmin(alike)), alike.shape)
    first = alike[one] >= alike[other]
    for _ in range(8):
        if not _LEAST_SHARE <= float(first.mean()) <= 1 - _LEAST_SHARE:
            return 1.0  # a few odd windows, not a second speaker
        nearer = _towards(alike, first) >= _towards(alike, ~first)
        if np.array_equal(nearer, first):
            break
        first = nearer
    within = float(alike[np.ix_(first, first)].sum()) * float(alike[np.ix_(~first, ~first)].sum())
    return float(alike[np.ix_(first, ~first)].sum()) / math.sqrt(within)


def _towards(alike: npt.NDArray[np.float32], group: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Each window's cosine to the centre of a group, from mutual cosines alone."""
    length = math.sqrt(float(alike[np.ix_(group, group)].sum()))
    return np.asarray(alike[:, group].sum(axis=1) / length, dtype=np.float32)
