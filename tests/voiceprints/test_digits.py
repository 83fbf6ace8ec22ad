"""Digits are heard in a jailed child. Spoken here by our own engine: no real speaker's digits ship with the project."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
from spoken import Say, in_words

from voiceprints import jailed
from voiceprints.digits import HearingLimits, spoken_digits
from voiceprints.errors import DigitsUnreadable, EmptyAudio, InvalidSamples, RecogniserUnavailable

# A child that has loaded the recogniser and confined itself, and then tries what a broken recogniser would be made to try.
PROBE = """
import sys; sys.path += sys.argv[1:3]
import json, os, socket
from voiceprints.digits_child import heard, recogniser
from voiceprints.jail import confine
decoder = recogniser(6)
heard(decoder, bytes(16000))
if sys.argv[-1] == "confined":
    confine(memory_bytes=512 << 20, cpu_seconds=5)
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
print(json.dumps({
    "open": refused(lambda: open("/etc/passwd").close()),
    "create": refused(lambda: os.close(os.open("/tmp", os.O_TMPFILE | os.O_WRONLY))),
    "tcp": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()),
    "fork": refused(lambda: os.fork() or os._exit(0)),
    "hears": not heard(decoder, bytes(32000)).isalpha(),
}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("digits", ["402607", "913558"])
def test_digits_are_heard_as_they_are_said(say: Say, digits):
    assert spoken_digits(say(in_words(digits)), 6) == digits


def test_oh_is_zero(say: Say):
    assert spoken_digits(say("four oh two six oh seven"), 6) == "402607"


def test_what_is_no_digits_is_heard_as_others(anna):
    assert spoken_digits(anna[0][:80_000], 6) != "402607"
    assert spoken_digits(np.zeros(16_000, np.float32), 6) != "402607"


@pytest.mark.parametrize(
    ("samples", "refusal"),
    [
        (np.zeros(0, np.float32), EmptyAudio),
        (np.full(16_000, np.nan, np.float32), InvalidSamples),
        (np.full(16_000, 9.0, np.float32), InvalidSamples),
        (np.zeros((2, 16_000), np.float32), InvalidSamples),
    ],
)
def test_what_is_no_recording_is_refused(samples, refusal):
    with pytest.raises(refusal):
        spoken_digits(samples, 6)


@pytest.mark.parametrize(
    "limits", [HearingLimits(wall_seconds=0.01), HearingLimits(cpu_seconds=0), HearingLimits(memory_bytes=1 << 20)]
)
def test_a_child_that_hits_a_limit_hears_nothing(limits):
    noise = np.random.default_rng(1).normal(0, 0.1, 16_000 * 20).astype(np.float32)
    with pytest.raises(DigitsUnreadable):
        spoken_digits(noise, 6, limits)


def test_without_the_recogniser_nothing_passes(monkeypatch):
    def missing(*_):
        raise jailed.ChildUnavailable("not installed")

    monkeypatch.setattr(jailed, "command", missing)
    with pytest.raises(RecogniserUnavailable):
        spoken_digits(np.zeros(16_000, np.float32), 6)


def test_the_child_reaches_no_file_and_no_network():
    found = {}
    for how in ("free", "confined"):
        argv = [*jailed.command(PROBE, "pocketsphinx"), how]
        done = subprocess.run(argv, env={}, cwd="/", capture_output=True, timeout=30, check=True)
        found[how] = json.loads(done.stdout)
        assert done.stderr == b""  # and it logs nothing
    assert found["confined"] == {"open": True, "create": True, "tcp": True, "fork": True, "hears": True}
    assert not any(found["free"][name] for name in ("open", "create", "tcp", "fork"))


def test_the_grammar_hears_exactly_as_many_digits_as_it_was_told(say: Say):
    said = say(in_words("402607"))
    assert [len(spoken_digits(said, count)) for count in (5, 6)] == [5, 6]
