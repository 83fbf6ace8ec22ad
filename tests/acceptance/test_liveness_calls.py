"""A voice that demands liveness, from the outside: digits, a recording that says them, a pass, and one use of the voice.

The speaker is our own engine, enrolled and heard: a person's digits do not ship with the project. So this test shows too what
liveness does not stop, speech that is made while it is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from installation import Installation, recordings
from spoken import in_words

from service import step
from service.client import Refused, VoiceClient
from service.isolation import establish

TEXT = "Only while its speaker is there."
TEXTS = (
    "Every morning the baker opens his shop before the sun comes up over the river.",
    "You should call the office if the parcel has not arrived by Thursday afternoon.",
    "The old library keeps its maps in a cool room below the reading hall.",
)


def demand(running: Installation, voice: str, *, demanded: bool) -> dict:
    """As `glottis voices liveness` does it."""
    isolation = establish(running.settings.state_dir, running.settings.site)
    groups = isolation.database_groups(embedded=running.settings.embedded)
    request = {"voice": voice, "demanded": demanded, "dry_run": False}
    return step.call(running.settings, isolation.vault, "voices", groups=groups, call="liveness", request=request)


@pytest.fixture(scope="module")
def studio(running: Installation) -> VoiceClient:
    return running.client("studio")


@pytest.fixture(scope="module")
def guarded(running: Installation, studio: VoiceClient, voice: str) -> Iterator[str]:
    """A voice that demands liveness, enrolled from what `voice` says: so that `voice` can say digits in it."""
    expiry = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    consent = studio.record_consent("an engine", ["speak", "compare"], expiry, "made by a machine")
    made = str(studio.enrol("guarded", [studio.speak(voice, text) for text in TEXTS], consent["id"])["id"])
    assert demand(running, made, demanded=True) == {
        "voice": made,
        "tenant": "acceptance",
        "liveness": True,
        "changed": True,
    }
    yield made
    studio.erase(made)


def failures(running: Installation, client: str) -> int:
    """Failed attempts that count against this client's quota in the minute in which it was last counted."""
    url = sa.make_url(running.settings.superuser_file.read_text().strip()).set(database="glottis")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    counted = sa.text("SELECT attempts FROM usage WHERE scope = 'client' AND name = :client")
    with engine.connect() as connection:
        return int(connection.scalar(counted, {"client": client}) or 0)


def saying(studio: VoiceClient, voice: str, digits: str) -> bytes:
    """The digits in this voice, once as much time has passed as a person needs to say them."""
    began = time.monotonic()
    said = studio.speak(voice, in_words(digits))
    time.sleep(max(0.0, len(said) / 48_000 - (time.monotonic() - began)))
    return said


def answered(studio: VoiceClient, guarded: str, voice: str) -> tuple[str, bytes, str]:
    """A challenge, what answered it, and the pass. One answer in a dozen is not recognised: whoever speaks tries again."""
    for _ in range(4):
        asked = studio.ask_liveness(guarded)
        assert len(asked["digits"]) == 6
        answer = saying(studio, voice, asked["digits"])
        try:
            return asked["id"], answer, studio.answer_liveness(guarded, asked["id"], answer)
        except Refused as refusal:
            if refusal.code != "not_live":
                raise
    raise AssertionError("four answers were not recognised")


def refused(expected: tuple[int, str], call, *arguments, **options) -> None:
    with pytest.raises(Refused) as told:
        call(*arguments, **options)
    assert (told.value.status, told.value.code) == expected, told.value


def test_the_voice_opens_for_one_answer_once(running, studio, guarded, voice) -> None:
    refused((403, "liveness_required"), studio.speak, guarded, TEXT)
    refused((403, "liveness_required"), studio.verify, guarded, recordings("1998")[3])

    challenge, answer, passed = answered(studio, guarded, voice)
    stranger = running.client("mallory")
    refused((401, "liveness_invalid"), stranger.speak, guarded, TEXT, liveness=passed)
    refused((401, "liveness_invalid"), studio.speak, voice, TEXT, liveness=passed)
    assert studio.speak(guarded, TEXT, liveness=passed)[:4] == b"RIFF"
    refused((401, "liveness_used"), studio.speak, guarded, TEXT, liveness=passed)

    # The challenge is used up, and the recording too, for whatever digits are asked next.
    refused((401, "liveness_used"), studio.answer_liveness, guarded, challenge, answer)
    again = studio.ask_liveness(guarded)
    time.sleep(len(answer) / 48_000)
    refused((422, "recording_used"), studio.answer_liveness, guarded, again["id"], answer)


def test_what_is_no_answer_passes_nobody(running, studio, guarded, voice) -> None:
    too_soon = studio.ask_liveness(guarded)
    real = recordings("1998")[0]  # a person's recording, made long before
    refused((422, "not_fresh"), studio.answer_liveness, guarded, too_soon["id"], real)

    asked = studio.ask_liveness(guarded)
    other = asked["digits"].translate(str.maketrans("0123456789", "1234567890"))
    wrong = saying(studio, voice, other)
    refused((403, "not_live"), studio.answer_liveness, guarded, asked["id"], wrong)
    assert failures(running, "studio") >= 1

    refused((415, "not_audio"), studio.answer_liveness, guarded, studio.ask_liveness(guarded)["id"], b"not a recording")
    for challenge in ("A" * 62, "x", str(uuid4()), asked["id"][:-1]):
        refused((401, "liveness_invalid"), studio.answer_liveness, guarded, challenge, wrong)
    refused((404, "voice_unknown"), studio.ask_liveness, uuid4())


def test_the_demand_ends_when_the_operator_ends_it(running, studio, voice) -> None:
    demand(running, voice, demanded=True)
    try:
        refused((403, "liveness_required"), studio.speak, voice, TEXT)
        details = json.dumps([{"type": "glottis_voice", "actions": ["read"], "liveness": "A"}])
        form = {"grant_type": "client_credentials", "authorization_details": details}
        with pytest.raises(Refused) as told:
            studio._proved("POST", "/oauth/token", None, data=form)
        assert told.value.code == "invalid_authorization_details"
    finally:
        demand(running, voice, demanded=False)
    assert studio.speak(voice, TEXT)
