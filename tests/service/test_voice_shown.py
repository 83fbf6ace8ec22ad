"""What an operator is shown of a voice: its row's own terms, and nothing of a row that was changed outside."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest
from house import House

from keyvault.records import RecordMac
from keyvault.tombstones import Tombstones
from policies.authority import VoiceTerm
from policies.hours import Hours
from policies.registry import Registry
from service.key_events import KeyEventRecorder
from service.settings import Settings
from service.voices import Voices, erasure_of


@pytest.fixture
def voices(house: House) -> Voices:
    tombstones = Tombstones(RecordMac(house.hsm), KeyEventRecorder(house.audit))
    erasure = erasure_of(house.hsm, house.store, house.audit, alone=True)
    parts: tuple[Any, ...] = (house.database, house.hsm, house.store, house.audit, tombstones, erasure)
    return Voices(Settings.load({"HOME": "/nonexistent"}), *parts, roster=None)  # type: ignore[arg-type]


def demanded(voices: Voices, voice: UUID) -> tuple[object, object, object]:
    found = voices.shown(voice)
    return found["state"], found["terms"], found["hours"]


def test_terms_hours_and_state_are_shown_as_they_are(house: House, voices: Voices) -> None:
    voice, registry = house.voice(), Registry(house.store, time.time)
    assert demanded(voices, voice) == ("active", [], None)
    with house.database.begin() as transaction:
        registry.set_voice_terms(transaction, voice, {VoiceTerm.LIVENESS, VoiceTerm.DUAL_CONTROL})
    with house.database.begin() as transaction:
        registry.limit_voice(transaction, voice, Hours.of("mon", "08:00", "18:00", "UTC"))
    assert demanded(voices, voice) == ("active", ["dual-control", "liveness"], "mon 08:00-18:00 UTC")


def test_a_row_that_was_changed_is_named_and_not_believed(house: House, voices: Voices) -> None:
    voice = house.voice()
    house.edit("UPDATE voice SET terms = '{bearer}' WHERE voice_id = :voice", voice=voice)
    assert demanded(voices, voice) == (None, None, None)
    assert "the voice's row does not carry its MAC" in voices.shown(voice)["findings"]
