"""The use case: blocks one a sentence, facts that say what was spoken, cancellation between sentences."""

from __future__ import annotations

import numpy as np
import pytest

from synth.errors import Cancelled, EmptyInput, SpeedRefused
from synth.scheduler import Scheduler
from synth.speech import Speech

TEXT = "One. Two 电源. Three."


@pytest.fixture
def speech(engine) -> Speech:
    return Speech(engine, Scheduler(at_once=1, waiting=1))


def test_facts_grow_with_what_is_handed_out(speech, enrolled):
    with speech.reserve() as turn:
        spoken = speech.speak(enrolled["2033"], TEXT, turn=turn)
        assert (spoken.facts.spoken, spoken.facts.seconds, spoken.facts.skipped) == (0, 0, ("电源",))
        first = next(spoken)
        assert spoken.facts.seconds == len(first) / speech.sample_rate
        assert spoken.facts.spoken == 1
        rest = list(spoken)
    facts = spoken.facts
    assert (facts.characters, facts.sentences, facts.spoken) == (len(TEXT), 3, 3)
    assert facts.seconds == sum(len(block) for block in (first, *rest)) / speech.sample_rate
    assert "电源" not in repr(facts)


def test_a_script_read_beforehand_sounds_the_same(speech, enrolled):
    with speech.reserve() as turn:
        one = list(speech.speak(enrolled["1998"], speech.read("Hello there."), turn=turn))
        two = list(speech.speak(enrolled["1998"], "Hello there.", turn=turn))
    assert np.array_equal(one[0], two[0])


def test_no_sentence_is_begun_after_cancelling(speech, enrolled):  # report 7
    with speech.reserve() as turn:
        spoken = speech.speak(enrolled["2414"], TEXT, turn=turn)
        next(spoken)
        turn.cancel()
        with pytest.raises(Cancelled):
            next(spoken)
    assert spoken.facts.spoken == 1


def test_refusals_come_at_the_call(speech, own):
    with speech.reserve() as turn:
        with pytest.raises(EmptyInput):
            speech.speak(own, " ", turn=turn)
        with pytest.raises(SpeedRefused):
            speech.speak(own, "Hi.", turn=turn, speed=3)


def test_synthesis_does_not_import_keys():
    """In a fresh process, the use case with its engine leaves the key vault out."""
    import subprocess
    import sys

    program = "import sys, synth.speech, synth.hibari_engine; print(sorted({'keyvault', 'pkcs11'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
