"""The encoder: the published front end, the pinned model, the same bits each time, and embeddings that are embeddings."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest
from sound import flac, samples

from keyvault.locked import LockedBuffer
from voiceprints.embedding import SIZE, centre, checked_embedding, cosine
from voiceprints.encoder import BATCH, Encoder
from voiceprints.errors import EmbeddingInvalid, EmptyAudio, InvalidSamples, ModelRefused
from voiceprints.mel import slaney_filters, window_count, windowed_mel
from voiceprints.models import FOLDER, GE2E


def embedding(encoder: Encoder, *speech: np.ndarray) -> np.ndarray:
    """A copy on the ordinary heap: tests only."""
    out = np.zeros(SIZE, dtype=np.float32)
    centre(encoder.windows(speech, np.zeros), out)
    return out


@pytest.mark.parametrize(
    ("band", "peak_bin", "peak", "total"),
    # From librosa 0.11.0: filters.mel(sr=16000, n_fft=400, n_mels=40).
    [
        (0, 2, 0.012404520995914936, 0.024809040129184723),
        (5, 11, 0.013329954817891121, 0.025734474882483482),
        (12, 24, 0.012818343006074429, 0.025255346670746803),
        (13, 26, 0.01144351065158844, 0.024641206488013268),
        (20, 44, 0.007191917393356562, 0.025219751521945),
        (39, 185, 0.0017249403754249215, 0.02497875690460205),
    ],
)
def test_filters_equal_librosa(band, peak_bin, peak, total):
    filters = slaney_filters()
    assert int(filters[band].argmax()) == peak_bin
    assert float(filters[band].max()) == pytest.approx(peak, rel=1e-6)
    assert float(filters[band].sum()) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize(
    ("frame", "band", "value"),
    # From librosa 0.11.0: feature.melspectrogram(sr=16000, n_fft=400, hop_length=160, n_mels=40) of the signal below.
    [(0, 2, 4.08470344543457), (10, 4, 0.13469357788562775), (80, 9, 5.380080223083496)],
)
def test_front_end_equals_librosa(frame, band, value):
    time = np.arange(16_000 * 4) / 16_000
    signal = (0.3 * np.sin(2 * np.pi * (200 + 300 * time) * time) + 0.01 * np.cos(2 * np.pi * 3000 * time)).astype(np.float32)
    assert float(windowed_mel(signal, slaney_filters())[0, frame, band]) == pytest.approx(value, rel=1e-5)


def test_quiet_speech_is_raised_and_loud_speech_is_not():
    tone = np.sin(np.arange(32_000) / 10).astype(np.float32)
    filters = slaney_filters()
    quiet, quieter, loud = (windowed_mel(tone * np.float32(gain), filters) for gain in (0.01, 0.0001, 0.5))
    assert np.allclose(quiet, quieter, rtol=1e-3)
    assert loud.max() > 100 * quiet.max()


@pytest.mark.parametrize(
    ("length", "windows"),
    [(1, 1), (25_599, 1), (25_600, 1), (31_519, 1), (31_520, 2), (37_920, 2), (160_000, 12), (16_000 * 300, 389)],
)
def test_windows_are_counted_as_they_are_made(length, windows):
    assert window_count(length) == windows
    if length < 200_000:
        assert windowed_mel(np.ones(length, dtype=np.float32), slaney_filters()).shape == (windows, 160, 40)


def test_many_runs_give_the_same_bits(encoder, anna):
    speech = anna[1][:32_000]
    first = embedding(encoder, speech)
    assert all(np.array_equal(embedding(encoder, speech), first) for _ in range(25))


def test_the_same_bits_beside_others_at_once(encoder, anna, ben):
    expected = {0: embedding(encoder, anna[1]), 1: embedding(encoder, ben[1])}
    got: list[tuple[int, np.ndarray]] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append((i % 2, embedding(encoder, (anna, ben)[i % 2][1])))) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(np.array_equal(value, expected[which]) for which, value in got)


def test_embeddings_land_in_locked_memory(encoder, anna):
    speech = [anna[1]]
    with LockedBuffer(encoder.locked_bytes(speech)) as buffer:
        windows = encoder.windows(speech, buffer.array)
        assert buffer.address <= windows.ctypes.data < buffer.address + buffer.size
        assert len(windows) == window_count(len(anna[1]))
        assert np.allclose(np.linalg.norm(windows, axis=1), 1, atol=1e-5)
        assert windows.min() >= 0
    assert not windows.any()
    with LockedBuffer(BATCH * SIZE * 4) as small, pytest.raises(MemoryError):
        encoder.windows(speech, small.array)


def test_speakers_part(encoder, anna, ben):
    again, other = embedding(encoder, samples(flac("1998", 3))), embedding(encoder, *ben)
    mine = embedding(encoder, *anna)
    assert cosine(mine, again) > 0.82
    assert cosine(mine, other) < 0.75
    assert cosine(mine, mine) == pytest.approx(1, abs=1e-6)


def test_two_recordings_of_one_name_are_two_embeddings(encoder, anna):
    assert not np.array_equal(embedding(encoder, anna[0]), embedding(encoder, anna[1]))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20])
def test_samples_that_are_none_reach_no_model(encoder, value):
    with pytest.raises(InvalidSamples):
        encoder.windows([np.full(32_000, value, dtype=np.float32)], np.zeros)
    with pytest.raises(EmptyAudio):
        encoder.windows([np.zeros(0, dtype=np.float32)], np.zeros)


def test_silence_and_a_constant_still_give_numbers(encoder):
    for value in (0.0, 0.5, 1 / 32768):
        windows = encoder.windows([np.full(48_000, value, dtype=np.float32)], np.zeros)
        assert np.isfinite(windows).all()


@pytest.mark.parametrize(
    "vector",
    [
        np.full(SIZE, np.nan, dtype=np.float32),
        np.zeros(SIZE, dtype=np.float32),
        np.full(SIZE, np.inf, dtype=np.float32),
        np.full(SIZE, 1.0, dtype=np.float32),
        np.full(SIZE, 1 / 16, dtype=np.float64),
        np.full(SIZE - 1, 1 / np.sqrt(SIZE - 1), dtype=np.float32),
    ],
)
def test_what_is_no_embedding_is_refused(vector):
    with pytest.raises(EmbeddingInvalid):
        checked_embedding(vector)
    with pytest.raises(EmbeddingInvalid):
        cosine(np.full(SIZE, 1 / 16, dtype=np.float32), vector)


def test_one_bad_window_leaves_zeros_not_a_vector():
    for bad in (np.nan, np.inf):
        windows = np.full((3, SIZE), 1 / 16, dtype=np.float32)
        windows[1, 7] = bad
        out = np.zeros(SIZE, dtype=np.float32)
        with pytest.raises(EmbeddingInvalid):
            centre(windows, out)
        assert not out.any()
    with pytest.raises(EmbeddingInvalid):
        centre(np.zeros((3, SIZE), dtype=np.float32), np.zeros(SIZE, dtype=np.float32))


def test_another_model_file_is_refused(tmp_path):
    with pytest.raises(ModelRefused):
        Encoder(tmp_path)
    shutil.copy(FOLDER / GE2E.file, tmp_path)
    changed = bytearray((tmp_path / GE2E.file).read_bytes())
    changed[-1_000] ^= 1
    (tmp_path / GE2E.file).write_bytes(changed)
    with pytest.raises(ModelRefused, match="pinned"):
        Encoder(tmp_path)


def test_the_model_id_names_its_content(encoder):
    assert encoder.model_id == "ge2e/a2577b1e3d7b1b0b"
