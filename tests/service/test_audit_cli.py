"""`glottis audit check` and `export` against somebody who owns the database: forged entries are named, no file is half written."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from whole_service import Up, brought_up, copied, glottis  # noqa: F401 — fixtures

from service.schema import opened
from service.settings import Settings

FORGED = "00000000-0000-4000-8000-00000000f0f0"


@pytest.fixture(scope="module")
def settings(brought_up) -> Iterator[Settings]:  # noqa: F811
    with copied(brought_up) as copy:
        up = Up(copy)
        up.until("serving")
        added = glottis(copy, "clients", "add", "studio", "--tenant", "t", "--role", "speaker")
        assert added.returncode == 0, added.stderr
        yield copy
        up.rest()


@pytest.fixture
def forged(settings) -> Settings:
    """An intent that no vault wrote, with a MAC of zeros. It is there to stay: what was sequenced cannot be taken back."""
    with opened(settings.owner_url()) as owner, owner.begin() as connection:
        insert = "INSERT INTO intent SELECT :id, 'w', 0, body, decode(repeat('00', 16), 'hex') FROM intent LIMIT 1"
        connection.execute(text(insert), {"id": FORGED})
    return settings


def audit(settings: Settings, *arguments: object):
    return glottis(settings, "audit", *map(str, arguments))


def test_an_honest_log_is_checked_and_exported_whole(settings, tmp_path):
    checked = audit(settings, "check", "--json")
    assert checked.returncode == 0, checked.stderr
    facts = json.loads(checked.stdout)
    assert facts["holds"] is True
    assert facts["records"] > 0
    exported = audit(settings, "export", tmp_path / "bundle", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["checked"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_an_export_that_fails_leaves_nothing_and_follows_no_link(settings, tmp_path):
    kept = tmp_path / "kept"
    kept.write_bytes(b"\xff\xfe\x00")
    for arguments in (("--from", 10**6), ("--since", kept)):
        refused = audit(settings, "export", tmp_path / "bundle", *arguments)
        assert refused.returncode == 1
        assert "unexpected" not in refused.stderr
    assert "not a checkpoint" in refused.stderr
    (tmp_path / "bundle").symlink_to(tmp_path / "elsewhere")
    assert audit(settings, "export", tmp_path / "bundle").returncode == 1
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "bundle"}


def test_a_forged_intent_is_named_by_check_doctor_and_export(forged, tmp_path):
    checked = audit(forged, "check")
    assert checked.returncode == 3
    assert FORGED in checked.stderr
    assert "audit_tampered" in checked.stderr
    as_json = audit(forged, "check", "--json")
    assert as_json.returncode == 3
    assert FORGED in json.loads(as_json.stdout)["said"]
    examined = glottis(forged, "doctor", "--json")
    assert examined.returncode == 3
    (finding,) = [finding for finding in json.loads(examined.stdout)["findings"] if finding["part"] == "audit"]
    assert finding["state"] == "fails"
    assert FORGED in finding["said"]
    assert audit(forged, "export", tmp_path / "bundle").returncode == 3
    assert list(tmp_path.iterdir()) == []
    assert audit(forged, "export", tmp_path / "bundle", "--unchecked").returncode == 0
