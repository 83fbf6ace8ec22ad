"""A site is gone for good: officers put another in its place, it joins with the whole history, and the voices never stop."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from installation import VARIABLES, Installation, free_port

from keyvault.approval_kinds import Request
from keyvault.approvals import signed_by
from service.settings import Settings
from service.sites import development_officers
from service.sync.admin import SiteRefused, ask


def glottis(settings: Settings, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "service.cli.main", *arguments]
    environ = VARIABLES | settings.environ()
    return subprocess.run(argv, env=environ, input=given, capture_output=True, text=True, check=False, timeout=110)


def told(settings: Settings, *arguments: str, given: str = "", code: int = 0) -> dict[str, Any]:
    done = glottis(settings, *arguments, given=given)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def approve(settings: Settings, request: str) -> None:
    """Two development officers sign what the request says."""
    asked = Request.decode(base64.b64decode(ask(settings, "approval", name=request)["request"]))
    keys = development_officers(settings)
    people = [person for person in keys if person != asked.operation.requester][:2]
    signed = tuple(signed_by(asked.operation, person, "approve", keys[person]) for person in people)
    ask(settings, "approval_add", request=base64.b64encode(replace(asked, approvals=signed).encode()).decode())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_dead_site_is_replaced_and_the_new_one_joins_with_the_history(
    new_installation: Callable[..., Installation], tmp_path: Path
) -> None:
    first = new_installation(GLOTTIS_SITES="2", GLOTTIS_VAULT_WORKERS="1")
    first.start()
    voice = first.voice()
    first.stop()
    shutil.rmtree(first.settings.of_site_b().state_dir)  # for good: token, PIN and database

    ports = free_port(), free_port()
    urls = [f"https://localhost:{port}" for port in ports]
    first.settings = replace(first.settings, peer="external", site_port=ports[0], peer_url=urls[1])
    folder = first.settings.state_dir.parent / "new-b"
    inner = {"GLOTTIS_SITE": "b", "GLOTTIS_PEER": "external", "GLOTTIS_SERVES": "no", "GLOTTIS_PORT": str(free_port())}
    inner |= {"GLOTTIS_STATE_DIR": str(folder), "GLOTTIS_SITE_PORT": str(ports[1]), "GLOTTIS_PEER_URL": urls[0]}
    second = Installation(Settings.load(inner))
    made = glottis(second.settings, "up")
    assert "site_not_admitted" in made.stderr, made.stderr
    introduction = glottis(second.settings, "site", "introduce").stdout

    first.start()
    assert len(first.client("studio").speak(voice, "It speaks while the other site is gone.")) > 1000
    refused = glottis(first.settings, "site", "admit", "-", given=introduction)
    assert (refused.returncode != 0, "introduction_refused" in refused.stderr) == (True, True)

    asked = told(
        first.settings, "site", "replace", "-", "--reason", "its building burned down", "--json", given=introduction, code=75
    )
    with pytest.raises(SiteRefused, match="officers"):
        ask(first.settings, "approval_carry", name=asked["id"])
    approve(first.settings, asked["id"])
    carried = glottis(first.settings, "approvals", "carry-out", asked["id"], "--yes")
    assert carried.returncode == 0, carried.stderr

    welcome = glottis(first.settings, "site", "admit", "-", given=introduction).stdout
    entered = glottis(second.settings, "site", "enter", "-", given=welcome)
    assert entered.returncode == 0, entered.stderr
    try:
        environ = VARIABLES | second.settings.environ()
        log = tmp_path / "second.log"
        with log.open("wb") as out:
            argv = [sys.executable, "-P", "-m", "service.cli.main", "up"]
            second.up = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=out, text=True, start_new_session=True)
        assert second.up.stdout is not None
        lines = []
        for line in second.up.stdout:
            lines.append(line)
            if "serving" in line or "keeps" in line:
                break
        else:
            raise AssertionError("".join(lines) + log.read_text())
        told(first.settings, "site", "exchange", "--json")
        ours, theirs = ask(first.settings, "status"), ask(second.settings, "status")
        assert (ours["head"], ours["epoch"]) == (theirs["head"], theirs["epoch"])
        assert any("burned down" in mark for mark in theirs["marks"])
        (version,) = ours["versions"]
        assert (version["state"], version["holders"]) == ("deactivated", ["a"])
        assert len(first.client("studio").speak(voice, "It speaks on.")) > 1000
        os.kill(second.up.pid, 0)
    finally:
        second.stop()
