"""The pitch tracker on pulse trains of known pitch, and the pitch map."""

from __future__ import annotations

import numpy as np
import pytest

from synth import bands, prosody


def buzz(curve_hz: np.ndarray, rate: int) -> np.ndarray:
    phase = 2 * np.pi * np.cumsum(curve_hz) / rate
    return (sum(np.cos(h * phase) / h for h in range(1, 12)) * 0.1).astype(np.float32)


@pytest.mark.parametrize("rate", [16000, 24000])
@pytest.mark.parametrize("hertz", [65, 110, 200, 380])
def test_a_steady_pitch_is_found(rate, hertz):
    pitch = prosody.track(buzz(np.full(rate * 2, hertz), rate), rate)
    assert len(pitch) == 2 * bands.FRAMES_PER_SECOND
    assert (np.abs(pitch[4:-4] / hertz - 1) < 0.01).mean() > 0.97


def test_a_glide_is_followed_in_noise():
    curve = np.geomspace(90, 250, 32000)
    noisy = buzz(curve, 16000) + 0.02 * np.random.default_rng(1).standard_normal(32000).astype(np.float32)
    pitch = prosody.track(noisy, 16000)[6:-6]
    truth = curve[::200][6:-6]
    assert (np.abs(np.log2(np.maximum(pitch, 1) / truth)) < 0.03).mean() > 0.95


def test_noise_and_silence_have_no_pitch():
    noise = 0.1 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    assert (prosody.track(noise, 16000) > 0).mean() < 0.02
    assert not prosody.track(np.zeros(16000, np.float32), 16000).any()


def test_the_map_moves_median_and_spread_and_keeps_unvoiced_frames():
    chance = np.random.default_rng(2)
    curve = np.exp2(7.5 + 0.2 * chance.standard_normal(2000)).astype(np.float32)
    curve[::3] = 0
    moved = prosody.mapped(curve, (7.5, 0.2), np.array([6.9], np.float32), np.array([0.1], np.float32))
    assert not moved[::3].any()
    octaves = np.log2(moved[moved > 0])
    assert abs(np.median(octaves) - 6.9) < 0.01
    assert abs(np.std(octaves) - 0.1) < 0.01
    assert moved[moved > 0].min() >= 50
    assert moved.max() <= 420


def test_summary_is_median_and_deviation():
    pitch = np.array([0, 100, 200, 200, 200, 400, 0], np.float32)
    centre, spread = np.zeros(1, np.float32), np.zeros(1, np.float32)
    prosody.summarise(pitch, centre, spread)
    assert centre[0] == np.float32(np.log2(200))
    assert spread[0] == np.float32(0.06)


@pytest.mark.parametrize("rate", [16000, 24000])
def test_bands_of_a_tone_do_not_depend_on_the_rate(rate):
    tone = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32)
    power = bands.powers(tone, rate)
    assert power.shape == (80, 40)
    assert np.isclose(
        power[40].max(),
        bands.powers(np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000).astype(np.float32), 16000)[40].max(),
        rtol=0.02,
    )
