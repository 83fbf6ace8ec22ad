"""Speech is found where it is; each gate refuses its own fault, with what it measured, and real speech passes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from sound import encoded, flac, samples, wav

from voiceprints.activity import Activity
from voiceprints.decoding import decode
from voiceprints.errors import EmptyAudio, InvalidSamples, ModelRefused, QualityRefused
from voiceprints.models import FOLDER, SILERO
from voiceprints.quality import ENROLMENT, PROBE, Quality, clipped_share, measured, speaker_agreement


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return samples(flac("1998"))


def judged(activity: Activity, *recordings: np.ndarray) -> Quality:
    return measured(recordings, [activity.speech(part) for part in recordings])


def refused(quality: Quality, limits=ENROLMENT) -> list[str]:
    with pytest.raises(QualityRefused) as refusal:
        quality.require(limits)
    return [gate.code for gate in refusal.value.failed]


@pytest.mark.parametrize("speaker", ["1998", "2033", "2414"])
def test_real_speech_passes(activity, speaker):
    recordings = [samples(flac(speaker, number)) for number in range(3)]
    quality = judged(activity, *recordings)
    quality.require(ENROLMENT)
    assert 0.5 < quality.speech_share < 1


def test_speech_is_found_where_it_is(activity, speech):
    silence = np.zeros(32_000, dtype=np.float32)
    found = activity.speech(np.concatenate([silence, speech, silence]))
    assert 31_000 < found.segments[0][0] < 42_000
    assert found.segments[-1][1] <= 32_000 + len(speech) + 4_000
    assert found.mask().sum() / 16_000 == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(activity.speech(speech).seconds, abs=0.5)


def test_pauses_go_and_speech_stays(activity, speech):
    silence = np.zeros(80_000, dtype=np.float32)
    padded = np.concatenate([silence, speech, silence])
    kept = activity.speech(padded).only(padded)
    assert abs(len(kept) - len(activity.speech(speech).only(speech))) < 16_000
    assert len(kept) < len(speech) + 8_000


def test_a_telephone_recording_keeps_its_share_of_speech(activity, speech):
    telephone = decode(encoded(speech, "wav", "pcm_mulaw", 8_000))
    original, copy = judged(activity, speech), judged(activity, telephone.samples)
    assert copy.speech_share == pytest.approx(original.speech_share, abs=0.05)
    assert 3_000 < copy.bandwidth_hz < 5_000
    copy.require(ENROLMENT)


@pytest.mark.parametrize(
    "silent",
    [
        np.zeros(160_000, dtype=np.float32),
        np.full(160_000, 0.3, dtype=np.float32),
        np.random.default_rng(1).integers(-1, 2, 160_000).astype(np.float32) / 32768,
        np.random.default_rng(2).normal(size=160_000).astype(np.float32) * np.float32(0.05),
        (0.5 * np.sin(np.arange(160_000) / 6)).astype(np.float32),
        np.zeros(7, dtype=np.float32),
    ],
    ids=["zeros", "dc", "one-lsb", "noise", "tone", "seven-samples"],
)
def test_what_holds_no_speech_is_no_speech(activity, silent):
    quality = judged(activity, silent)
    assert refused(quality) == ["no_speech"]
    assert refused(quality, PROBE) == ["no_speech"]


@pytest.mark.parametrize("value", [np.nan, np.inf, 9.0])
def test_values_that_are_not_samples_are_not_speech(activity, speech, value):
    bad = speech.copy()
    bad[5] = value
    with pytest.raises(InvalidSamples):
        activity.speech(bad)
    with pytest.raises(EmptyAudio):
        activity.speech(bad[:0])


def test_noise_is_measured_in_decibels_and_refused(activity, speech):
    level = np.sqrt(np.mean(speech[activity.speech(speech).mask()] ** 2))
    noise = np.random.default_rng(3).normal(size=len(speech)).astype(np.float32) * level
    for wanted in (3.0, 6.0, 15.0):
        assert judged(activity, speech + noise * np.float32(10 ** (-wanted / 20))).snr_db == pytest.approx(wanted, abs=2.5)
    noisy = judged(activity, speech + noise * np.float32(10 ** (-6 / 20)))
    assert refused(noisy) == ["too_noisy"]
    noisy.require(PROBE)


def test_clipping_is_seen_also_after_turning_down(activity, speech):
    assert clipped_share(speech) < 0.0005
    hard = np.clip(speech / np.abs(speech).max() * 6, -1, 1)
    for gain in (1.0, 0.4):
        assert refused(judged(activity, hard * np.float32(gain))) == ["clipped"]
    full = decode(wav(hard)).samples
    assert full.min() == -1.0  # the lowest integer is full scale, not silence
    assert clipped_share(full) == pytest.approx(clipped_share(hard), rel=0.05)


def test_a_narrow_band_is_refused(activity, speech):
    spectrum = np.fft.rfft(speech)
    spectrum[int(len(spectrum) * 2_000 / 8_000) :] = 0
    narrow = judged(activity, np.fft.irfft(spectrum, len(speech)).astype(np.float32))
    assert narrow.bandwidth_hz == pytest.approx(2_000, abs=150)
    assert "bandwidth" in refused(narrow)


def test_all_gates_that_fail_are_named_with_their_numbers():
    poor = Quality(total_seconds=400, speech_seconds=2.0, snr_db=4.04, clipped_share=0.1, bandwidth_hz=2_000, speaker_agreement=0.5)
    with pytest.raises(QualityRefused) as refusal:
        poor.require(ENROLMENT)
    failed = {gate.code: (gate.measured, gate.threshold) for gate in refusal.value.failed}
    assert failed == {
        "too_long": (400, 300.0),
        "too_short": (2.0, 5.0),
        "too_little_speech": (0.005, 0.35),
        "too_noisy": (4.0, 10.0),
        "clipped": (0.1, 0.005),
        "bandwidth": (2_000, 3_000.0),
        "not_one_speaker": (0.5, 0.75),
    }
    assert "too_short (measured 2, threshold 5)" in str(refusal.value)


def test_a_probe_is_judged_more_softly(activity, speech):
    short = judged(activity, speech[:32_000])
    short.require(PROBE)
    assert refused(short) == ["too_short"]


def test_one_speaker_agrees_and_two_do_not(activity, encoder):
    def windows(*names: tuple[str, int]) -> np.ndarray:
        return encoder.windows([samples(flac(*name)) for name in names], np.zeros)

    for speaker in ("1998", "2033", "2414"):
        assert (speaker_agreement(windows(*((speaker, number) for number in range(3)))) or 0) > 0.8
    for one, other in (("1998", "2033"), ("2033", "2414"), ("1998", "2414")):
        assert (speaker_agreement(windows((one, 0), (other, 0), (other, 1))) or 1) < 0.75
    assert speaker_agreement(windows(("1998", 1))[:3]) is None


def test_another_activity_model_is_refused(tmp_path):
    with pytest.raises(ModelRefused):
        Activity(tmp_path)
    shutil.copy(FOLDER / SILERO.file, tmp_path)
    with (tmp_path / SILERO.file).open("ab") as model:
        model.write(b"\0")
    with pytest.raises(ModelRefused, match="pinned"):
        Activity(tmp_path)


def test_the_same_samples_give_the_same_answer(activity, speech):
    assert len({activity.speech(speech[:64_000]) for _ in range(5)}) == 1
