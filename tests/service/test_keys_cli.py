"""`glottis keys` against a whole installation of one site: a rotation from ceremony to destruction, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from installation import recordings
from whole_service import Up, brought_up, copied, eventually, glottis  # noqa: F401 — fixtures

from service import clients
from service.client import Refused, VoiceClient
from service.exits import Exit
from service.settings import Settings
from service.sites import DEVELOPMENT_OFFICERS

pytestmark = pytest.mark.timeout(300)  # the first test waits for the whole start


class House:
    """One running installation, its key officer's command line, and its database as an attacker's."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        folder = clients.add(settings, "studio", tenant="acme", roles=clients.ALL_ROLES)
        self.studio = VoiceClient.from_folder(folder)
        expiry = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        consent = self.studio.record_consent("speaker", ["speak", "compare"], expiry, "form")["id"]
        self.voices = [str(self.studio.enrol(f"voice {number}", recordings("1998")[:3], consent)["id"]) for number in range(2)]

    def run(self, *arguments: object, code: Exit = Exit.OK, **changes: object):
        settings = replace(self.settings, **changes)
        done = glottis(settings, "keys", *map(str, arguments))
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "unexpected" not in done.stderr, done.stderr
        return done

    def facts(self, *arguments: object, code: Exit = Exit.OK):
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def version(self, number: int) -> dict:
        return self.facts("show", f"main/{number}")

    def sql(self, statement: str, **values: object):
        url = sa.make_url(self.settings.superuser_file.read_text().strip()).set(database="glottis")
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else []

    def approve(self, request: str) -> None:
        for person in DEVELOPMENT_OFFICERS[:2]:
            key = self.settings.officer_dir / f"{person}.pem"
            done = glottis(self.settings, "approvals", "approve", request, "--key", str(key), "--yes")
            assert done.returncode == 0, done.stderr

    def speaks(self) -> bool:
        return all(len(self.studio.speak(voice, "Hello.")) > 1000 for voice in self.voices)


@pytest.fixture(scope="module")
def house(brought_up: Path) -> Iterator[House]:  # noqa: F811
    with copied(brought_up) as settings:
        up = Up(replace(settings, destroy_delay_hours=0))
        try:
            up.until("serving")
            found = House(settings)
            yield found
            found.studio.close()
        finally:
            up.rest()


def test_the_first_version_serves_and_a_rotation_needs_a_ceremony(house):
    (version,) = house.facts("list")["versions"]
    assert (version["name"], version["state"], version["keys"], version["held_here"]) == ("ring/main/1", "active", 2, True)
    assert "ring/main/1  active  2 keys" in house.run("list").stdout
    refused = house.run("rotate", "--yes", code=Exit.LOCAL)
    assert "nothing_to_install" in refused.stderr
    assert "ceremony" in refused.stderr
    assert house.facts("rewrap") == {"ring": "main", "target": 1, "moved": 0, "left": 0, "bad": [], "held_back": [], "seconds": 0.0}


def test_what_names_no_version_is_refused(house):
    assert "key_version_not_found" in house.run("show", "main/9", code=Exit.LOCAL).stderr
    assert "no version" in house.run("show", "main", code=Exit.LOCAL).stderr
    house.run("rewrap", "none", code=Exit.LOCAL)
    house.run("rewrap", "--to", "9", code=Exit.LOCAL)
    house.run("suspend", "main/1", code=Exit.LOCAL)  # no reason
    house.run("resume", "main/1", "--reason", "why not", "--yes", code=Exit.REFUSED)
    house.run("destroy", "main/1", "--reason", "in use", "--yes", code=Exit.REFUSED)


def test_a_suspended_version_neither_opens_nor_wraps_until_it_resumes(house):
    house.run("suspend", "main/1", "--reason", "a laptop was lost", "--yes")
    shown = house.version(1)
    assert (shown["state"], shown["reason"]) == ("suspended", "a laptop was lost")
    with pytest.raises(Refused, match="key_state_forbids"):
        house.studio.speak(house.voices[0], "Hello.")
    house.run("rewrap", code=Exit.REFUSED)
    house.run("resume", "main/1", "--reason", "found", "--yes")
    assert house.speaks()


def test_a_rotation_changes_this_ring_s_master_alone(house):
    """B16: rotate changes exactly the named tier: no key of a voice, no signer, no PIN, no other object of the token."""
    rows = house.sql("SELECT * FROM wrapped_key ORDER BY dek_id")
    token = house.settings.token_dir("serving")
    public, pin = json.loads(house.settings.site_file.read_text())["tokens"]["serving"]["public_keys"], (token / "pin").read_text()
    assert json.loads(house.run("ceremony", "rehearse", "--json").stdout)["name"] == "ring/main/2"
    assert house.version(2)["state"] == "pre-activation"
    assert house.facts("rotate", "--dry-run") == {"changed": False, "would_serve": "ring/main/2"}
    assert house.version(2)["state"] == "pre-activation"
    assert house.facts("rotate", "--yes")["serves"] == "ring/main/2"
    assert (house.version(1)["state"], house.version(2)["state"]) == ("deactivated", "active")
    assert house.sql("SELECT * FROM wrapped_key ORDER BY dek_id") == rows
    assert json.loads(house.settings.site_file.read_text())["tokens"]["serving"]["public_keys"] == public
    assert (token / "pin").read_text() == pin
    assert house.speaks(), "the version before still opens"


def test_a_dry_run_counts_by_version_and_shows_no_blob(house):
    """B10: a dry run never prints wrapped keys."""
    said = house.run("rewrap", "--dry-run").stdout + house.run("rewrap", "--dry-run", "--json").stdout
    assert "2 keys would be moved under ring/main/2" in said
    assert '"keys": 2' in said
    assert not re.search("[0-9a-f]{40}", said)
    assert {version["name"]: version["keys"] for version in house.facts("list")["versions"]} == {"ring/main/1": 2, "ring/main/2": 0}


def test_an_hsm_that_does_not_answer_ends_it_with_2(house):
    stopped = house.run("rewrap", code=Exit.HSM, pkcs11_module=Path("/nonexistent/module.so"))
    assert "module.so, which does not exist" in stopped.stderr
    assert house.version(1)["keys"] == 2


def test_a_changed_row_is_named_and_passed_over_and_ends_it_with_5(house):
    """B10: any row's failure gives a non-zero exit; B9: the row is named."""
    ((dek, blob),) = house.sql("SELECT dek_id, blob FROM wrapped_key ORDER BY dek_id LIMIT 1")
    change = "UPDATE wrapped_key SET blob = :blob WHERE dek_id = :dek"
    house.sql(change, blob=bytes(40), dek=dek)
    found = house.facts("rewrap", code=Exit.PARTIAL)
    assert (found["moved"], found["bad"]) == (1, [{"dek": str(dek), "reason": "record_tampered"}])
    again = house.run("rewrap", code=Exit.PARTIAL)
    assert f"not moved: {dek}: record_tampered" in again.stdout
    house.sql(change, blob=blob, dek=dek)
    assert house.facts("rewrap", "--workers", 1, "--rate", 50)["moved"] == 1
    assert house.facts("rewrap")["moved"] == 0
    assert (house.version(1)["keys"], house.version(2)["keys"]) == (0, 2)
    assert house.speaks()


def test_a_destruction_can_be_cancelled_and_then_is_carried_out(house):
    house.run("destroy", "main/2", "--reason", "it serves", "--yes", code=Exit.REFUSED)
    assert house.facts("destroy", "main/1", "--reason", "retired", "--dry-run")["changed"] is False
    assert house.version(1)["destroy_at"] is None
    asked = house.facts("destroy", "main/1", "--reason", "retired", "--yes", code=Exit.TEMPORARY)
    assert house.facts("destroy", "main/1", "--reason", "retired", "--yes", code=Exit.TEMPORARY)["request"] == asked["request"]
    house.approve(asked["request"])
    pending = house.facts("destroy", "main/1", "--reason", "retired", "--yes")
    assert datetime.fromisoformat(pending["destroy_at"]) - datetime.now(UTC) > timedelta(days=6)
    assert "unless cancelled" in house.run("show", "main/1").stdout
    assert house.facts("cancel", "main/1", "--reason", "not yet")["withdrawn"] == [asked["request"]]
    assert "nothing_pending" in house.run("cancel", "main/1", "--reason", "not yet", code=Exit.REFUSED).stderr
    asked = house.facts("destroy", "main/1", "--reason", "retired", "--delay-days", 0, "--yes", code=Exit.TEMPORARY)
    house.approve(asked["request"])
    house.run("destroy", "main/1", "--reason", "retired", "--delay-days", 0, "--yes")
    assert eventually(lambda: house.version(1)["state"] == "destroyed", 60.0)
    assert house.version(1)["held_here"] is False
    assert house.speaks()


def test_a_number_is_never_used_again(house):
    """B17: going back gets a new number, also after the version before was destroyed."""
    assert json.loads(house.run("ceremony", "rehearse", "--json").stdout)["name"] == "ring/main/3"
    house.run("resume", "main/1", "--reason", "back to it", "--yes", code=Exit.REFUSED)


def test_a_compromised_version_wraps_nothing_and_its_keys_move_first(house):
    house.run("compromise", "main/2", "--reason", "the PIN was seen", "--yes")
    with pytest.raises(Refused):
        house.studio.speak(house.voices[0], "Hello.")
    house.run("rotate", "--yes")
    assert house.facts("rewrap")["moved"] == 2
    assert house.version(2)["keys"] == 0
    assert house.speaks()


def test_schedules_are_set_listed_and_removed(house):
    assert house.run("schedule", "list").stdout.strip() == "there is no schedule"
    house.run("schedule", "set", "quarterly", "--action", "rotate", "--after-days", 90)
    house.run("schedule", "set", "move", "--action", "rewrap", "--rate", 200)
    house.run("schedule", "set", "bad", "--action", "rewrap", "--after-days", 3, code=Exit.LOCAL)
    listed = house.facts("schedule", "list")["schedules"]
    assert [(one["name"], one["action"], one["after_days"], one["rate"], one["due"]) for one in listed] == [
        ("move", "rewrap", None, 200.0, None),
        ("quarterly", "rotate", 90, None, None),
    ]
    house.run("schedule", "remove", "move")
    house.run("schedule", "remove", "move", code=Exit.LOCAL)
    assert "quarterly: rotate ring main after 90 days" in house.run("schedule", "list").stdout


def test_every_page_and_change_stands_in_the_audit_log(house):
    (count,) = house.sql("SELECT count(*) FROM intent WHERE convert_from(body, 'UTF8') LIKE '%keys.rewrapped%'")[0]
    assert count >= 4
    checked = glottis(house.settings, "audit", "check", "--json")
    assert json.loads(checked.stdout)["holds"] is True
