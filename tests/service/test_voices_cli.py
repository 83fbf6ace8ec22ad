"""`glottis voices` and DELETE /v1/voices/{id} against a whole installation of one site, as its operator and clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from installation import recordings
from whole_service import Up, brought_up, copied, glottis  # noqa: F401 — fixtures

from service import clients
from service.client import Refused, VoiceClient
from service.exits import Exit
from service.settings import Settings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # a whole start, and many commands; the demo goes this way each time

NAME = "Annabel Lee of the kingdom by the sea"


class House:
    """One running installation, its operator's command line, and its database as an attacker's."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.studio = self.client("studio", tenant="acme")
        self.rival = self.client("rival", tenant="rival")
        expiry = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        self.consent = self.studio.record_consent("speaker", ["speak", "compare"], expiry, "form")["id"]

    def client(self, name: str, *, tenant: str, roles=clients.ALL_ROLES) -> VoiceClient:
        return VoiceClient.from_folder(clients.add(self.settings, name, tenant=tenant, roles=roles))

    def voice(self, consent: str | None = None) -> str:
        return str(self.studio.enrol(NAME, recordings("1998")[:3], consent or self.consent)["id"])

    def run(self, *arguments: str, code: Exit = Exit.OK):
        done = glottis(self.settings, "voices", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def facts(self, *arguments: str, code: Exit = Exit.OK):
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def sql(self, statement: str, **values: object):
        url = self.settings.superuser_file.read_text().strip()
        engine = sa.create_engine(sa.make_url(url).set(database="glottis"), poolclass=sa.NullPool)
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else []

    def refused(self, code: str, call, *arguments) -> Refused:
        with pytest.raises(Refused) as refusal:
            call(*arguments)
        assert refusal.value.code == code, refusal.value
        return refusal.value


@pytest.fixture(scope="module")
def house(brought_up: Path) -> Iterator[House]:  # noqa: F811
    with copied(brought_up) as settings:
        up = Up(settings)
        try:
            up.until("serving")
            found = House(settings)
            yield found
            found.studio.close()
            found.rival.close()
        finally:
            up.rest()


def test_an_enroller_erases_and_nothing_answers_for_the_voice_again(house):
    voice, other = house.voice(), house.voice()
    assert len(house.studio.speak(voice, "Hello.")) > 1000, "the control"
    house.refused("voice_unknown", house.rival.erase, voice)
    assert house.studio.erase(voice)["id"] == voice
    for call in (
        lambda: house.studio.speak(voice, "Hello."),
        lambda: house.studio.verify(voice, recordings("1998")[3]),
        lambda: house.studio.voice(voice),
        lambda: house.studio.erase(voice),
    ):
        assert house.refused("voice_unknown", call).status == 404
    assert voice not in {one["id"] for one in house.studio.voices()}
    assert len(house.studio.speak(other, "Hello.")) > 1000


def test_a_client_without_the_role_erases_nothing(house):
    voice = house.voice()
    speaker = house.client("speaker", tenant="acme", roles=[clients.Role.SPEAKER])
    assert house.refused("denied", speaker.erase, voice).status == 403
    speaker.close()
    assert house.studio.voice(voice)["id"] == voice


def test_a_token_to_erase_erases_its_voice_alone_and_once(house):
    voice, other = house.voice(), house.voice()
    token = house.studio.token("erase", voice=voice)
    house.refused("voice_mismatch", house.studio.call, "DELETE", f"/v1/voices/{other}", token)
    house.refused("purpose_mismatch", house.studio.call, "GET", f"/v1/voices/{voice}", token)
    speak = house.studio.token("speak", voice=voice, text="Hello.")
    house.refused("purpose_mismatch", house.studio.call, "DELETE", f"/v1/voices/{voice}", speak)
    house.studio.call("DELETE", f"/v1/voices/{voice}", token)
    house.refused("voice_unknown", house.studio.call, "DELETE", f"/v1/voices/{voice}", token)


def test_erase_asks_says_what_goes_and_when_it_is_shredded(house):
    voice = house.voice()
    would = house.facts("erase", voice, "--dry-run")
    assert (would["stage"], would["name"], would["keys"], would["sealed_rows"], would["changed"]) == ("stored", NAME, 1, 2, False)
    assert house.facts("show", voice)["name"] == NAME
    asked = glottis(house.settings, "voices", "erase", voice, input="n\n")
    assert NAME in asked.stderr
    assert asked.returncode != 0
    assert house.studio.voice(voice)["name"] == NAME
    done = house.facts("erase", voice, "--yes")
    assert (done["stage"], done["changed"], done["keys"], done["sealed_rows"], done["findings"]) == ("erased", True, 1, 2, [])
    assert done["peer_erased_at"] == done["erased_at"]
    assert done["shredding"] == {"waits_for": ["main/1"], "at": None, "by": "nothing"}
    said = house.run("erase", voice, "--yes").stdout
    assert "was erased before" in said
    assert "glottis keys destroy main/1" in said
    shown = house.facts("show", voice)
    assert (shown["stage"], shown["name"], shown["keys"]) == ("erased", None, 0)
    assert "There is no such voice." in glottis(house.settings, "voices", "show", str(uuid4())).stderr


def test_damaged_rows_are_named_and_erased(house):
    voice = house.voice()
    house.sql("UPDATE wrapped_key SET blob = 'x' WHERE voice_id = :voice", voice=voice)
    house.sql("UPDATE voice SET name = 'y' WHERE voice_id = :voice", voice=voice)
    listed = house.facts("list", "--tenant", "acme", code=Exit.INTEGRITY)
    assert listed["tampered"] == [voice]
    assert house.refused("authority_row_tampered", house.studio.erase, voice).status == 500
    done = house.facts("erase", voice, "--yes")
    assert done["findings"] == ["key version 1 does not carry its MAC", "the voice's row does not carry its MAC"]
    for table in ("voice", "wrapped_key", "voiceprint"):
        assert house.sql(f"SELECT * FROM {table} WHERE voice_id = :voice", voice=voice) == []


def test_a_withdrawn_consent_takes_its_voices_with_it(house):
    expiry = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    consent = house.studio.record_consent("another speaker", ["speak"], expiry, "form")["id"]
    voices = {house.voice(consent), house.voice(consent)}
    would = house.facts("erase", "--consent", consent, "--dry-run")
    assert set(would["voices"]) == voices
    done = house.facts("erase", "--consent", consent, "--yes")
    assert {one["voice"] for one in done["voices"]} == voices
    for voice in voices:
        house.refused("voice_unknown", house.studio.speak, voice, "Hello.")
    house.refused("consent_withdrawn", house.voice, consent)
    assert house.facts("erase", "--consent", consent, "--yes")["voices"] == []
    house.run("erase", "--yes", code=Exit.LOCAL)


def test_a_new_key_and_the_voice_speaks_on(house):
    voice, gone = house.voice(), str(uuid4())
    done = house.facts("rekey", voice, gone, "--yes", code=Exit.PARTIAL)
    assert {one["voice"]: (one["key_version"], one["code"]) for one in done["voices"]} == {
        voice: (2, None),
        gone: (None, "voice_unknown"),
    }
    assert done["approved_by"] == []
    assert house.studio.voice(voice)["key_version"] == 2
    assert house.studio.verify(voice, recordings("1998")[3]) == "match"
    assert len(house.studio.speak(voice, "Hello.")) > 1000


def test_the_certificate_is_checked_offline(house, tmp_path):
    voice, path = house.voice(), tmp_path / "certificate.json"
    house.run("certificate", voice, code=Exit.REFUSED)
    house.run("erase", voice, "--yes")
    house.run("certificate", voice, "--out", str(path))
    roster = str(house.settings.roster_file)
    alone = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path / "nowhere")})
    checked = glottis(alone, "voices", "certificate", "--verify", str(path), "--roster", roster, "--json")
    assert checked.returncode == Exit.OK, checked.stderr
    found = json.loads(checked.stdout)
    assert (found["voice"], found["tenant"], found["stage"], found["signed_by"]) == (voice, "acme", "erased", ["a"])
    assert found["keys"][0]["version"] == 1
    assert [one["name"] for one in found["ring_versions"]] == ["ring/main/1"]
    assert not (tmp_path / "nowhere").exists()
    path.write_text(path.read_text().replace('"stage": "erased"', '"stage": "shredded"'))
    refused = glottis(alone, "voices", "certificate", "--verify", str(path), "--roster", roster)
    assert refused.returncode == Exit.INTEGRITY
    assert "stage: this is not what was signed" in refused.stderr


def test_the_log_still_holds(house, tmp_path):
    bundle = tmp_path / "bundle.jsonl"
    house.studio.voices()
    exported = glottis(house.settings, "audit", "export", str(bundle))
    assert exported.returncode == Exit.OK, exported.stderr
    assert NAME not in bundle.read_text()
