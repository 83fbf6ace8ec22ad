"""Only the voice's own speaker, saying the digits just asked for, for the first time. Attacks, each beside what passes.

The speaker here is our own engine: both the enrolled voice and the digits are synthesised. That such speech passes is the limit
that docs/threat-model.md names.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

import numpy as np
import pytest
from hsm_fixtures import ServingToken
from spoken import Say, in_words
from sqlalchemy import Engine
from vault import SmallVault

from keyvault.records import RecordMac
from policies.errors import GrantExpired, GrantMismatch
from policies.grants import Grant, Purpose
from policies.liveness import Challenge
from policies.store import PolicyStore
from voiceprints.activity import Activity
from voiceprints.encoder import Encoder
from voiceprints.errors import (
    AudioTooLong,
    EmptyAudio,
    InvalidSamples,
    NotFresh,
    NotLive,
    QualityRefused,
    RecogniserUnavailable,
    RecordingUsed,
)
from voiceprints.matching import Band
from voiceprints.presence import AT_ONCE, LONGEST_S, Presence, owner_of

DIGITS = "402607"
NOISE = np.random.default_rng(3).normal(0, 0.1, 40_000).astype(np.float32)
TEXTS = (
    "Every morning the baker opens his shop before the sun comes up over the river.",
    "You should call the office if the parcel has not arrived by Thursday afternoon.",
)


def challenge(vault: SmallVault, digits: str = DIGITS, ago: float = 30.0) -> Challenge:
    return Challenge(uuid4(), digits, int(vault.clock() - ago), "")


def presence(vault: SmallVault, **changed: object) -> Presence:
    return replace(Presence(vault.database, PolicyStore(RecordMac(vault.hsm)), vault.matching, vault.clock), **changed)


# --- the whole, with a real voice


def test_only_the_speaker_who_says_the_digits_passes(small, say: Say, ben):
    vault, voice = small, small.enrol([say(text) for text in TEXTS])
    booth, answer = presence(vault), say(in_words(DIGITS))

    def grant(**changed: object) -> Grant:
        return vault.grant(Purpose.LIVENESS, **{"voice": voice.voice_id, "key": voice.key} | changed)

    booth.require(answer, challenge(vault), grant())

    with pytest.raises(NotLive) as refused:
        booth.require(say(in_words(DIGITS), like=np.concatenate(ben)), challenge(vault), grant())
    assert refused.value.failed == "voice"

    with pytest.raises(NotLive) as refused:
        booth.require(answer * np.float32(0.9), challenge(vault, "402608"), grant())
    assert refused.value.failed == "digits"

    # The check at the moment of C_UnwrapKey is the grant's own: the token's time, its key.
    late = grant(issued_at=int(vault.now) - 9, expires_at=int(vault.now) - 4)
    with pytest.raises(GrantExpired):
        booth.require(answer * np.float32(0.8), challenge(vault), late)
    with pytest.raises(GrantMismatch):
        booth.require(answer * np.float32(0.7), challenge(vault), grant(key=replace(voice.key, version=2)))

    deaf = presence(vault, hear=lambda *_: DIGITS)
    with pytest.raises(QualityRefused):
        deaf.require(NOISE * np.float32(1e-3), challenge(vault), grant())


# --- the order and the refusals, where nothing is heard and nothing opened


@dataclass
class Matched:
    """Stands in for the comparison, and knows whether it was asked."""

    band: Band = Band.MATCH
    asked: list[UUID] = field(default_factory=list)

    def compare(self, _: object, voice: UUID, __: object, *, purpose: Purpose) -> Band:
        assert purpose is Purpose.LIVENESS
        self.asked.append(voice)
        return self.band


@dataclass
class Desk:
    vault: SmallVault
    heard: str = DIGITS
    matched: Matched = field(default_factory=Matched)
    voice: UUID = field(default_factory=uuid4)

    def grant(self, purpose: Purpose = Purpose.LIVENESS, **changed: object) -> Grant:
        return self.vault.grant(purpose, **{"voice": self.voice} | changed)

    def require(self, recording: np.ndarray = NOISE, asked: Challenge | None = None, grant: Grant | None = None) -> None:
        booth = presence(self.vault, matching=self.matched, hear=lambda *_: self.heard)
        booth.require(recording, asked or challenge(self.vault), grant or self.grant())


@pytest.fixture(scope="module")
def small(serving_token: ServingToken, module_database: Engine, activity: Activity, encoder: Encoder) -> SmallVault:
    return SmallVault(serving_token, module_database, activity, encoder)


@pytest.fixture
def desk(small: SmallVault) -> Desk:
    """A voice of its own for each test, in one vault."""
    return Desk(small)


def test_a_recording_counts_once_whatever_came_of_it(desk):
    desk.require()
    with pytest.raises(RecordingUsed):
        desk.require()
    desk.require(NOISE * np.float32(0.9))  # another recording: docs/access-control.md says how little that takes
    desk.heard = "111111"
    with pytest.raises(NotLive):
        desk.require(NOISE * np.float32(0.8))
    desk.heard = DIGITS
    with pytest.raises(RecordingUsed):
        desk.require(NOISE * np.float32(0.8))
    desk.require(grant=desk.grant(voice=uuid4()))  # for another voice it is new
    assert len(desk.matched.asked) == 3


@pytest.mark.parametrize("heard", ["", "402608", "704062", "40260", "4026070", "40260x", "４０２６０７"])
def test_other_digits_open_nothing(desk, heard):
    desk.heard = heard
    with pytest.raises(NotLive) as refused:
        desk.require()
    assert refused.value.failed == "digits"
    assert not desk.matched.asked


@pytest.mark.parametrize("band", [Band.UNCERTAIN, Band.NO_MATCH])
def test_nothing_less_than_a_match_passes_and_the_caller_is_not_told_what_failed(desk, band):
    desk.matched.band = band
    with pytest.raises(NotLive) as refused:
        desk.require()
    assert refused.value.failed == "voice"
    assert str(refused.value) == str(NotLive("digits"))


def test_a_recording_that_began_before_its_digits_were_asked_does_not_pass(desk):
    seconds = len(NOISE) / 16_000
    with pytest.raises(NotFresh):
        desk.require(asked=challenge(desk.vault, ago=seconds - 2))
    desk.require(asked=challenge(desk.vault, ago=seconds))


def test_a_long_recording_is_not_listened_to(desk):
    with pytest.raises(AudioTooLong):
        desk.require(np.resize(NOISE, 16_000 * LONGEST_S + 1))
    desk.require(np.resize(NOISE, 16_000 * LONGEST_S))


def test_no_more_listen_at_once_than_there_are_turns(desk):
    listening, most, lock = 0, [0], threading.Lock()

    def slow(*_: object) -> str:
        nonlocal listening
        with lock:
            listening += 1
            most[0] = max(most[0], listening)
        time.sleep(0.05)
        with lock:
            listening -= 1
        return DIGITS

    booth = presence(desk.vault, matching=desk.matched, hear=slow)
    with ThreadPoolExecutor(3 * AT_ONCE) as pool:
        for number in range(3 * AT_ONCE):
            pool.submit(booth.require, NOISE * np.float32(0.5 + number / 100), challenge(desk.vault), desk.grant())
    assert most == [AT_ONCE]
    assert len(desk.matched.asked) == 3 * AT_ONCE


def test_what_is_no_recording_is_refused_before_anything_is_used_up(desk):
    for recording, refusal in ((np.zeros(0, np.float32), EmptyAudio), (np.full(32_000, np.inf, np.float32), InvalidSamples)):
        for _ in range(2):
            with pytest.raises(refusal):
                desk.require(recording)


def test_a_recogniser_that_does_not_work_passes_nobody(desk):
    def broken(*_: object) -> str:
        raise RecogniserUnavailable

    booth = presence(desk.vault, matching=desk.matched, hear=broken)
    with pytest.raises(RecogniserUnavailable):
        booth.require(NOISE, challenge(desk.vault), desk.grant())
    assert not desk.matched.asked


def test_a_grant_for_something_else_hears_nobody_and_uses_nothing_up(desk):
    for grant in (desk.grant(Purpose.SPEAK), desk.grant(Purpose.COMPARE), desk.grant(voice=None)):
        with pytest.raises(GrantMismatch):
            desk.require(grant=grant)
    desk.require()


def test_a_grant_to_hear_neither_speaks_nor_compares(desk):
    grant = desk.grant()
    assert owner_of(grant).voice == desk.voice
    for purpose in (Purpose.SPEAK, Purpose.COMPARE):
        with pytest.raises(GrantMismatch):
            grant.require(purpose, voice=desk.voice)
