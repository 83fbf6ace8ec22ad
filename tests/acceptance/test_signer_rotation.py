"""The token signer rotated on a running installation: published at once, unnoticed by clients, no restart."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from installation import VARIABLES, Installation

from keyvault.signing.versions import LEAST_OVERLAP, LOOK_S
from policies import jws
from service.audit_bundles import export_bundle, verify_bundle
from service.exits import Exit
from service.site import Site
from service.sync.admin import SiteRefused, ask

SECONDS = str(LEAST_OVERLAP.total_seconds())


def signer(running: Installation, *arguments: str, code: Exit = Exit.OK) -> dict[str, Any]:
    argv = [sys.executable, "-P", "-m", "service.cli.main", "keys", "signer", *arguments, "--json"]
    environ = VARIABLES | running.settings.environ()
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else {"said": done.stderr}


def states(running: Installation) -> dict[str, str]:
    return {f"{one['name']}/{one['version']}": one["state"] for one in signer(running, "list")["signers"]}


def published(running: Installation) -> tuple[list[str], str]:
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    with httpx.Client(base_url=running.settings.public_base_url, verify=context) as bare:
        answer = bare.get("/.well-known/jwks.json")
    keys = answer.json()["keys"]
    assert all(key.keys() == {"kty", "crv", "x", "y", "kid", "use", "alg"} for key in keys)
    return [key["kid"] for key in keys], answer.headers["cache-control"]


def kid_of(token: str) -> str:
    return str(jws.split(token, limit=4096).header["kid"])


def test_a_rotation_is_published_at_once_and_a_second_one_has_to_wait(running: Installation) -> None:
    client = running.client("studio")
    before, cached = published(running)
    assert cached == "public, max-age=300"
    made = signer(running, "rotate", "--yes", "--overlap-seconds", "3600")
    assert made["state"] == "next"
    time.sleep(LOOK_S + 0.1)
    assert published(running)[0] == [made["kid"], *before]
    assert kid_of(client.token("read")) in before, "it does not sign yet"
    refused = signer(running, "rotate", "--yes", code=Exit.CONFLICT)
    assert "signer_rotating" in refused["said"]
    for version in (made["version"], made["version"] - 1):
        with pytest.raises(SiteRefused) as found:
            ask(running.settings, "signer_retire", name="token-signer", version=version)
        assert found.value.code == "signer_in_use"
    assert client.voices() is not None


@pytest.mark.soak
def test_clients_notice_nothing_from_the_first_publication_to_the_end_of_the_old_key(new_installation: Any) -> None:
    installation: Installation = new_installation()
    installation.start()
    client, stop = installation.client("studio"), Event()
    pids, kids = installation.pid_of("service.vault"), set()

    def call() -> int:
        made = 0
        while not stop.is_set():
            token = client.token("read")
            kids.add(kid_of(token))
            client.call("GET", "/v1/voices", token)
            made += 1
        return made

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(call) for _ in range(3)]
        assert signer(installation, "rotate", "--dry-run")["changed"] is False
        assert len(published(installation)[0]) == 1
        signer(installation, "rotate", "--yes", "--overlap-seconds", SECONDS)
        time.sleep(2 * LEAST_OVERLAP.total_seconds() + 20)  # the site process looks every 15 seconds
        stop.set()
        assert min(one.result() for one in calls) > 10
    assert len(kids) == 2
    assert states(installation)["token-signer/1"] == "destroyed"
    assert len(published(installation)[0]) == 1
    assert installation.pid_of("service.vault") == pids, "no worker was replaced"


@pytest.mark.soak
def test_the_log_hands_over_while_it_runs_and_the_first_fingerprint_still_verifies(new_installation: Any, tmp_path: Path) -> None:
    installation: Installation = new_installation()
    installation.start()
    client, bundle = installation.client("studio"), tmp_path / "bundle"
    log = installation.pid_of("service.log")
    assert signer(installation, "hand-over", "--dry-run")["changed"] is False
    assert signer(installation, "hand-over", "--yes")["version"] == 2
    until = time.monotonic() + 30
    while "hand-over " not in (bundle.read_text() if bundle.exists() else ""):
        assert time.monotonic() < until
        client.voices()
        bundle.unlink(missing_ok=True)
        export_bundle(installation.settings, bundle)
        time.sleep(0.5)
    assert verify_bundle(bundle, Site.load(installation.settings.site_file).audit_key.fingerprint).holds
    assert installation.pid_of("service.log") == log
