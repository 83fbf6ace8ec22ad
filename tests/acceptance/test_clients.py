"""Clients from the outside: listed, rotated and revoked by the command line, and what each means for the next request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess
from uuid import uuid4

import pytest
from cli_here import glottis_here
from installation import VARIABLES, Installation
from sqlalchemy import text

from service import clients
from service.client import Refused, VoiceClient
from service.errors import ClientMissing
from service.schema import opened

EACH_WORKER_SEVERAL_TIMES = 8


def glottis(running: Installation, *arguments: str, answer: str | None = None) -> CompletedProcess[str]:
    return glottis_here("clients", *arguments, environ=VARIABLES | running.settings.environ(), answer=answer)


def new_client(running: Installation) -> str:
    name = f"app-{uuid4().hex[:8]}"
    clients.add(running.settings, name, tenant="acceptance", roles=clients.ALL_ROLES)
    return name


def client_of(running: Installation, name: str) -> VoiceClient:
    return VoiceClient.from_folder(running.settings.client_dir(name))


def state_of(running: Installation, name: str) -> str:
    found = json.loads(glottis(running, "list", "--json").stdout)["clients"]
    return str(next(client["state"] for client in found if client["client"] == name))


def intents(running: Installation, action: str) -> int:
    """How many intents of this action stand in the database."""
    with opened(running.settings.role_url("owner")) as database, database.connect() as connection:
        bodies = [bytes(row.body) for row in connection.execute(text("SELECT body FROM intent"))]
    return sum(json.loads(body)["action"] == action for body in bodies)


def fetch_for_ever(client: VoiceClient, tokens: list[str]) -> None:
    """Tokens live five seconds: when this is refused, the last of them are fresh."""
    while True:
        tokens.append(client.token("read"))


def test_a_revoked_client_is_refused_by_every_worker_also_with_a_token_in_hand(running: Installation) -> None:
    name = new_client(running)
    before = intents(running, "client.revoked")
    with client_of(running, name) as client, ThreadPoolExecutor(1) as thread:
        revoking = thread.submit(clients.revoke, running.settings, name)
        tokens: list[str] = []
        with pytest.raises(Refused) as refused:
            fetch_for_ever(client, tokens)
        assert (refused.value.status, refused.value.code) == (403, "client_inactive")
        for token in tokens[-EACH_WORKER_SEVERAL_TIMES:]:
            with pytest.raises(Refused) as refused:
                client.call("GET", "/v1/voices", token)
            assert (refused.value.status, refused.value.code) == (403, "client_inactive")
        for _ in range(EACH_WORKER_SEVERAL_TIMES):
            with pytest.raises(Refused) as refused:
                client.token("read")
            assert (refused.value.status, refused.value.code) == (403, "client_inactive")
        assert revoking.result()["changed"]
    assert intents(running, "client.revoked") == before + 1
    assert state_of(running, name) == "revoked"


def test_revoking_asks_first_and_a_dry_run_does_nothing(running: Installation) -> None:
    name = new_client(running)
    tried = glottis(running, "revoke", name, "--dry-run", "--json")
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout)["would_change"] is True
    assert glottis(running, "revoke", name, answer="n\n").returncode == 1
    assert state_of(running, name) == "active"
    done = glottis(running, "revoke", name, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{name} is revoked\n")
    again = glottis(running, "revoke", name, "--yes", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["changed"] is False


def test_a_revoked_client_stays_revoked(running: Installation) -> None:
    name = new_client(running)
    clients.revoke(running.settings, name)
    kept = (running.settings.client_dir(name) / "client.pem").read_bytes()
    refused = glottis(running, "rotate", name)
    assert refused.returncode == 4, refused.stderr
    assert "revoked" in refused.stderr
    assert (running.settings.client_dir(name) / "client.pem").read_bytes() == kept
    taken = glottis(running, "add", name, "--role", "reader")
    assert taken.returncode == 6


def test_rotation_ends_the_old_keys_and_keeps_tenant_and_roles(running: Installation) -> None:
    name = new_client(running)
    with client_of(running, name) as old:
        old.voices()
        done = glottis(running, "rotate", name, "--json")
        assert done.returncode == 0, done.stderr
        with pytest.raises(Refused) as refused:
            old.voices()
        assert (refused.value.status, refused.value.code) == (401, "client_unknown")
    known = json.loads((running.settings.client_dir(name) / "client.json").read_text())
    assert (known["tenant"], set(known["roles"])) == ("acceptance", {role.value for role in clients.ALL_ROLES})
    with client_of(running, name) as new:
        new.voices()
    replaced = glottis(running, "add", name, "--replace")
    assert replaced.returncode == 0, replaced.stderr
    with client_of(running, name) as newest:
        newest.voices()


def test_the_list_says_who_is_registered(running: Installation) -> None:
    name = new_client(running)
    table = glottis(running, "list").stdout.splitlines()
    line = next(line.split() for line in table if line.split()[0] == name)
    assert line[1:3] == ["acceptance", "active"]
    found = json.loads(glottis(running, "list", "--json").stdout)["clients"]
    row = next(client for client in found if client["client"] == name)
    assert set(row) == {"client", "tenant", "roles", "state", "certificate", "jkt", "voice", "hours"}


def test_an_unknown_name_is_told_as_one(running: Installation) -> None:
    for act in (clients.revoke, clients.rotate):
        with pytest.raises(ClientMissing):
            act(running.settings, "nobody")
    refused = glottis(running, "revoke", "nobody", "--dry-run")
    assert refused.returncode == 1
    assert "client_missing" in refused.stderr
    assert not running.settings.client_dir("nobody").exists()


def test_a_quota_holds_from_the_next_request_on_every_worker(running: Installation) -> None:
    name = new_client(running)
    shown = json.loads(glottis(running, "quota", name, "--json").stdout)
    assert shown["requests"] > 100
    with client_of(running, name) as client:
        client.voices()
        told = json.loads(glottis(running, "quota", name, "--requests", "0", "--json").stdout)
        assert told == shown | {"requests": 0}
        for _ in range(EACH_WORKER_SEVERAL_TIMES):
            with pytest.raises(Refused) as refused:
                client.voices()
            assert (refused.value.status, refused.value.code) == (429, "rate_limited")
            assert 1 <= int(refused.value.retry_after or 0) <= 60
        assert glottis(running, "quota", name, "--requests", "1000").stdout.startswith(f"{name} may use 1000 requests and ")
        client.voices()
    assert intents(running, "quota.set") >= 2


def test_a_quota_is_for_somebody_who_is_there(running: Installation) -> None:
    for arguments in (("quota", "nobody-at-all"), ("quota", "not-a-voice", "--voice")):
        done = glottis(running, *arguments, "--requests", "1")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
