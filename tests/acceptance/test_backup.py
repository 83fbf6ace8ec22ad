"""A site put back from a backup: what is older than the token serves only once officers adopted it, and then catches up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from installation import VARIABLES, Installation
from sqlalchemy import text

from service.client import Refused
from service.schema import opened
from service.settings import Settings

TEXT = "The quick brown fox."


def glottis(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "service.cli.main", *arguments]
    return subprocess.run(argv, env=VARIABLES | settings.environ(), capture_output=True, text=True, check=False, timeout=110)


def done(settings: Settings, *arguments: str) -> str:
    ended = glottis(settings, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def code_of(installation: Installation, voice: str) -> str:
    try:
        installation.client("studio").speak(voice, TEXT)
    except Refused as refused:
        return refused.code
    return "speaks"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_older_database_serves_nothing_until_officers_adopt_it_and_then_catches_up(
    new_installation: Callable[..., Installation], tmp_path: Path
) -> None:
    """C6: last week's database comes back; the start notices, officers adopt it, and the other site brings the rest."""
    site = new_installation(GLOTTIS_SITES="2", GLOTTIS_VAULT_WORKERS="1")
    site.start()
    settings, backup = site.settings, tmp_path / "backup"
    first = site.voice()
    made = json.loads(done(settings, "backup", str(backup), "--json"))
    assert made["site"] == "a"
    assert not [path for path in backup.rglob("*") if "pin" in path.name]
    later = site.voice("2033")
    done(settings, "keys", "ceremony", "rehearse")
    done(settings, "keys", "rotate", "--yes")
    site.stop()

    changed = tmp_path / "changed"
    changed.mkdir()
    for path in backup.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    dump = bytearray((changed / "database.dump").read_bytes())
    dump[-1] ^= 1
    (changed / "database.dump").write_bytes(dump)
    refused = glottis(settings, "restore", "apply", str(changed), "--yes")
    assert "backup_refused" in refused.stderr

    done(settings, "restore", "apply", str(backup), "--only", "database", "--yes")
    with pytest.raises(AssertionError, match=r"older|rolled|does not continue"):
        site.start()
    site.stop()

    request = tmp_path / "request"
    done(settings, "restore", "request", "--reason", "a drill", "--out", str(request))
    alone, asked = tmp_path / "request.2", [request, tmp_path / "request.log"]
    assert asked[1].exists(), "the log signed for more than the database holds"
    for file, number in ((file, number) for file in asked for number in (2, 3)):
        key = settings.officer_dir / f"officer-{number}.pem"
        done(settings, "approvals", "sign", str(file), "--key", str(key), "--out", f"{file}.{number}", "--yes")
    half = glottis(settings, "restore", "adopt", f"{request}.2", f"{request}.3")
    assert "adoption_incomplete" in half.stderr, "what is half adopted would not start"
    one = glottis(settings, "restore", "adopt", str(request), str(alone), *(f"{asked[1]}.{number}" for number in (2, 3)))
    assert "approvals_missing" in one.stderr
    done(settings, "restore", "adopt", *(f"{file}.{number}" for file in asked for number in (2, 3)))

    site.start()
    deadline = time.monotonic() + 60
    while (code_of(site, first), code_of(site, later)) != ("speaks", "speaks") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (code_of(site, first), code_of(site, later)) == ("speaks", "speaks")
    with opened(settings.owner_url()) as engine, engine.connect() as connection:
        states = dict(connection.execute(text("SELECT version, state FROM ring_version")).all())
    assert states == {1: "deactivated", 2: "active"}
    done(settings, "audit", "check")
