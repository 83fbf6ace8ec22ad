"""Any audio bytes become samples by their content alone, and what is not audio is refused by name."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from memory_scan import family
from sound import encoded, flac, samples, wav

from voiceprints.decoding import DecodingLimits, Recording, decode
from voiceprints.errors import (
    AudioTooLong,
    DamagedAudio,
    DecodeTimeout,
    DecodingError,
    EmptyAudio,
    InvalidSamples,
    NotAudio,
    UnsupportedAudio,
    UploadTooLarge,
)


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return samples(flac("1998"))


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Greatest normalised correlation of three seconds over a tenth of a second of delay (coders start late)."""
    a = one[4_000:52_000]
    return max(
        float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b))) for b in (other[4_000 + d : 52_000 + d] for d in range(1_700))
    )


def test_flac_decodes_to_its_exact_samples(speech):
    recording = decode(flac("1998"))
    assert (recording.container, recording.codec, recording.source_rate) == ("flac", "flac", 16_000)
    assert np.array_equal(recording.samples, speech)
    assert recording.seconds == len(speech) / 16_000
    assert not recording.samples.flags.writeable


@pytest.mark.parametrize(
    ("container", "codec", "rate", "least"),
    [
        ("wav", "pcm_s16le", 16_000, 0.999),
        ("wav", "pcm_s24le", 44_100, 0.999),
        ("wav", "pcm_f32le", 48_000, 0.999),
        ("wav", "pcm_mulaw", 8_000, 0.95),
        ("wav", "pcm_alaw", 8_000, 0.95),
        ("ogg", "vorbis", 44_100, 0.95),
        ("ogg", "libopus", 48_000, 0.95),
        ("mp3", "libmp3lame", 44_100, 0.95),
        ("ipod", "aac", 44_100, 0.95),
        ("ipod", "alac", 44_100, 0.999),
        ("webm", "libopus", 48_000, 0.95),
        ("matroska", "pcm_s16le", 16_000, 0.999),
        ("adts", "aac", 48_000, 0.95),
    ],
)
def test_every_accepted_kind_gives_the_same_speech(speech, container, codec, rate, least):
    recording = decode(encoded(speech, container, codec, rate))
    assert recording.source_rate == rate
    assert abs(recording.seconds - len(speech) / 16_000) < 0.12
    assert likeness(speech, recording.samples) > least


def test_name_is_never_asked_so_an_mp3_called_wav_is_an_mp3(speech):
    assert decode(encoded(speech, "mp3", "libmp3lame", 16_000)).container == "mp3"


def test_mp3_behind_an_id3_tag_is_found(speech):
    tag = b"ID3\x04\x00\x00" + bytes([0, 0, 2, 0]) + bytes(256)
    recording = decode(tag + encoded(speech, "adts", "aac", 16_000))
    assert recording.container == "aac"


@pytest.mark.parametrize("said", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE, 10_000_001])
def test_length_comes_from_samples_whatever_the_header_says(speech, said):
    short = speech[:48_000]
    whole = wav(short, said=said)
    if said == 1:  # the header may promise less than there is: then what it promises is all there is
        with pytest.raises(DecodingError):
            decode(whole)
        return
    assert len(decode(whole).samples) == 48_000


def test_header_claims_do_not_allocate(speech):
    lying = wav(speech[:16_000], said=0xFFFFFFF0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode(lying).seconds == 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@pytest.mark.parametrize("cut", [1, 3, 7, 101])
def test_a_truncated_last_frame_is_dropped(speech, cut):
    assert decode(wav(speech)[:-cut]).seconds == pytest.approx(len(speech) / 16_000, abs=0.1)
    assert decode(flac("1998")[: -cut * 10]).seconds == pytest.approx(len(speech) / 16_000, abs=0.6)


def test_damage_in_the_middle_is_refused(speech):
    whole = bytearray(flac("1998"))
    for start in range(40_000, len(whole) - 10_000, 20_000):
        whole[start : start + 6_000] = bytes(6_000)
    with pytest.raises(DamagedAudio):
        decode(bytes(whole))


def test_full_scale_negative_sample_is_full_scale():
    recording = decode(wav(np.array([-1.0, 1.0, 0.0] * 6000, dtype=np.float32)))
    assert float(np.abs(recording.samples).max()) == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 32768.0])
def test_values_that_are_not_samples_are_refused(speech, value):
    bad = speech[:32_000].copy()
    bad[1_000] = value
    with pytest.raises(InvalidSamples):
        decode(wav(bad, kind="<f4"))
    with pytest.raises(InvalidSamples):
        decode(wav(bad, kind="<f4", rate=44_100))


@pytest.mark.parametrize(
    "body",
    [
        b"/etc/hostname",
        b"examples/speech/1998/1998-15444-0000.flac",
        b"file:///etc/passwd",
        b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\x00" * 100_000,
        b"x",
        b"\xff" * 4096,
        b"<html><body>404</body></html>",
    ],
)
def test_what_is_not_audio_is_refused_and_no_path_is_followed(body):
    with pytest.raises(NotAudio):
        decode(body)


@pytest.mark.parametrize(("body", "found"), [(b"FORM\x00\x00\x00\x00AIFF", "aiff"), (b"#!AMR\n", "amr"), (b"%PDF-1.7", "pdf")])
def test_what_is_audio_of_another_kind_is_named(body, found):
    with pytest.raises(UnsupportedAudio, match=found):
        decode(body + bytes(100))


def test_sampling_rate_outside_the_range_is_refused(speech):
    with pytest.raises(UnsupportedAudio, match="4000"):
        decode(wav(speech[:8_000], rate=4_000))


def test_header_alone_is_empty():
    with pytest.raises(EmptyAudio):
        decode(wav(np.zeros(0, dtype=np.float32)))
    with pytest.raises(EmptyAudio):
        decode(b"")


def test_magic_alone_is_damaged():
    for magic in (b"fLaC", b"OggS", b"RIFF\x00\x00\x00\x00WAVE", b"\x1aE\xdf\xa3", b"\x00\x00\x00\x18ftypM4A "):
        with pytest.raises(DecodingError) as refusal:
            decode(magic + bytes(64))
        assert refusal.value.code in {"damaged_audio", "audio_empty", "unsupported_audio"}


def test_longer_than_the_limit_is_refused_while_decoding():
    silence = np.zeros(16_000 * 4, dtype=np.float32)
    with pytest.raises(AudioTooLong, match="3 seconds"):
        decode(wav(silence), DecodingLimits(seconds=3))


def test_a_small_file_that_decodes_to_hours_is_stopped_early():
    bomb = encoded(np.zeros(16_000 * 1800, dtype=np.float32), "flac", "flac")
    assert len(bomb) < 1_000_000
    with pytest.raises(AudioTooLong):
        decode(bomb)


def test_more_bytes_than_the_limit_start_no_child():
    with pytest.raises(UploadTooLarge):
        decode(bytes(1_001), DecodingLimits(upload_bytes=1_000))


def test_timeout_ends_and_reaps_the_child(speech):
    before = set(family(os.getpid()))  # other fixtures have children too, and an unreaped one stays among them
    with pytest.raises(DecodeTimeout):
        decode(flac("1998"), DecodingLimits(wall_seconds=0.02))
    assert set(family(os.getpid())) <= before


def test_too_little_memory_is_a_refusal_not_a_crash(speech):
    with pytest.raises(DecodingError):
        decode(encoded(np.tile(speech, 8), "flac", "flac"), DecodingLimits(memory_bytes=150 * 1024 * 1024))


def test_no_descriptor_is_left_behind(speech):
    upload = wav(speech[:16_000])
    decode(upload)
    before = set(Path("/proc/self/fd").iterdir())
    for body in (upload, b"nothing", wav(speech[:100], said=0)):
        try:
            decode(body)
        except DecodingError:
            continue
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_uploads_decoded_at_once_do_not_mix():
    uploads = [flac("1998", number) for number in range(3)] + [flac("2033", number) for number in range(3)]
    results: dict[int, Recording] = {}
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, decode(uploads[i]))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, upload in enumerate(uploads):
        assert np.array_equal(results[number].samples, samples(upload))


def test_a_repr_shows_no_samples():
    assert "array" not in repr(decode(wav(np.ones(16_000, dtype=np.float32) / 3)))


def test_the_parent_never_loads_the_media_library():
    program = "import sys, voiceprints.decoding; print(sorted({'av', 'onnxruntime', 'sqlalchemy', 'keyvault'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_decode_starts_fast():
    upload = wav(np.zeros(1600, dtype=np.float32))
    times = []
    for _ in range(3):
        start = time.monotonic()
        decode(upload)
        times.append(time.monotonic() - start)
    assert min(times) < 1.0
