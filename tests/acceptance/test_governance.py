"""What officers govern, from the outside: a set of policies activated and reset on a running installation, by its command line."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from click.testing import CliRunner
from installation import Installation

from policies.engine import SHIPPED
from policies.sets.policy_set import PERMISSIONS
from service import clients
from service.cli.main import cli
from service.client import Refused, VoiceClient
from service.settings import Settings
from service.sync.admin import SiteRefused

EACH_WORKER_SEVERAL_TIMES = 8
ONE_CLIENT = """
// This client does not look.
@id("own.not-this-one")
forbid (principal == Client::"{name}", action == Action::"read", resource);
"""


def glottis(settings: Settings, *arguments: str, code: int = 0) -> str:
    """One command, in this process: starting another for each would take longer than all of them."""
    done = CliRunner().invoke(cli, arguments, env=settings.environ(), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def approve(settings: Settings, request: str, *numbers: int) -> None:
    for number in numbers:
        glottis(settings, "approvals", "approve", request, "--key", str(settings.officer_dir / f"officer-{number}.pem"), "--yes")


def own_set(folder: Path, name: str) -> Path:
    """The shipped permissions, and a prohibition for one client, with the row that expects it."""
    (folder / "cases").mkdir(parents=True)
    (folder / PERMISSIONS).write_text((SHIPPED / PERMISSIONS).read_text())
    (folder / "own.cedar").write_text(ONE_CLIENT.format(name=name))
    row = {"name": name, "action": "read", "client": {"client_id": name}, "allowed": False, "decided_by": ["own.not-this-one"]}
    (folder / "cases" / "own.json").write_text(json.dumps({"cases": [row]}))
    return folder


def test_an_activated_set_decides_at_every_worker_from_the_next_request_on(running: Installation, tmp_path: Path) -> None:
    settings, name = running.settings, f"app-{uuid4().hex[:8]}"
    with VoiceClient.from_folder(clients.add(settings, name, tenant="acceptance", roles=[clients.Role.READER])) as client:
        client.voices()
        filed = json.loads(glottis(settings, "policy", "propose", str(own_set(tmp_path / "set", name)), "--json", code=75))
        shown = glottis(settings, "approvals", "show", filed["request"])
        assert filed["set"] in shown
        assert "every decision about" in shown
        assert "own.not-this-one, which forbids: This client does not look." in shown
        with pytest.raises(SiteRefused) as missing:
            glottis(settings, "policy", "activate", filed["request"], "--yes")
        assert missing.value.code == "approvals_missing"
        client.voices()
        approve(settings, filed["request"], 1)
        glottis(settings, "policy", "activate", filed["request"], "--yes")
        try:
            for _ in range(EACH_WORKER_SEVERAL_TIMES):
                with pytest.raises(Refused) as refused:
                    client.voices()
                assert (refused.value.status, refused.value.code) == (403, "denied")
            running.client("studio").voices()
            assert "own.not-this-one" in glottis(settings, "policy", "show", "--active")
        finally:
            back = json.loads(glottis(settings, "policy", "reset", "--json", code=75))["request"]
            approve(settings, back, 2)
            glottis(settings, "policy", "activate", back, "--yes")
        for _ in range(EACH_WORKER_SEVERAL_TIMES):
            client.voices()
    assert "the set that ships is in force already" in glottis(settings, "policy", "reset")
    assert [one["shipped"] for one in json.loads(glottis(settings, "policy", "list", "--json"))["activations"]][-2:] == [
        False,
        True,
    ]
