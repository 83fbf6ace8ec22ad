"""Processes killed in the middle of the work: no token works twice, nothing is heard that was not recorded, service comes back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from installation import Installation
from sqlalchemy import text

from service.client import Refused, VoiceClient
from service.schema import opened

pytestmark = pytest.mark.timeout(300)

TEXT = "Killed in between."
UNAVAILABLE = {"vault_unavailable", "audit_unavailable", "sync_store_unavailable", "busy"}


def spoken(client: VoiceClient, voice: str, token: str) -> str | None:
    """The intent under which this token spoke; None if it was refused or nobody answered."""
    body = {"input": TEXT, "voice": voice, "response_format": "pcm"}
    try:
        answer = client.call("POST", "/v1/audio/speech", token, json=body)
    except (Refused, httpx.HTTPError):
        return None
    assert len(answer.content) > 1000
    return str(answer.headers["x-glottis-intent"])


def recorded(installation: Installation) -> set[str]:
    with opened(installation.settings.role_url("owner")) as database, database.connect() as connection:
        return {str(found) for found in connection.execute(text("SELECT intent_id FROM intent")).scalars()}


def wait_until_serving(client: VoiceClient, voice: str) -> None:
    for _ in range(300):
        with contextlib.suppress(Refused, httpx.HTTPError):
            client.speak(voice, TEXT)
            return
        time.sleep(0.2)
    raise AssertionError("service did not come back within a minute")


def test_a_token_works_once_whatever_is_killed(running: Installation, voice: str) -> None:
    """Each token is tried by two threads at once and a third time later, while vault workers are killed at random moments."""
    client, stop = running.client("studio"), threading.Event()

    def kill() -> None:
        # Fewer deaths in a row than the supervisor takes for a broken installation.
        for _ in range(4):
            stop.wait(1.5)
            os.kill(random.choice(running.pid_of("service.vault")), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    uses: Counter[str] = Counter()
    heard: list[str] = []
    failures = 0
    try:
        with ThreadPoolExecutor(2) as pair:
            for _ in range(40):
                try:
                    token = client.token("speak", voice=voice, text=TEXT)
                except (Refused, httpx.HTTPError):
                    failures += 1
                    continue
                tried = [*pair.map(lambda t: spoken(client, voice, t), [token, token]), spoken(client, voice, token)]
                for intent in filter(None, tried):
                    uses[token] += 1
                    heard.append(intent)
    finally:
        stop.set()
        killer.join()
    assert heard, "nothing was spoken: the test would miss a second use"
    assert max(uses.values()) == 1
    wait_until_serving(client, voice)
    assert set(heard) <= recorded(running)


def test_a_killed_database_refuses_plainly_and_comes_back(running: Installation, voice: str) -> None:
    client = running.client("studio")
    wait_until_serving(client, voice)
    token = client.token("speak", voice=voice, text=TEXT)
    before = recorded(running)
    postmaster = int((running.settings.pg_dir / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGKILL)
    codes = set()
    for _ in range(5):
        try:
            client.call("POST", "/v1/audio/speech", token, json={"input": TEXT, "voice": voice})
        except Refused as refused:
            codes.add(refused.code)
    wait_until_serving(client, voice)
    # Either the restart was quicker than the first try and the token was spent then, or every answer said what is missing.
    assert codes <= UNAVAILABLE | {"token_replayed", "token_expired"}, codes
    assert codes
    assert before <= recorded(running), "a durable intent was lost"


def test_a_killed_edge_and_log_come_back(running: Installation, voice: str) -> None:
    client = running.client("studio")
    for part in ("service.edge", "service.log"):
        (pid,) = running.pid_of(part)
        os.kill(pid, signal.SIGKILL)
    wait_until_serving(client, voice)
    for part in ("service.edge", "service.log"):
        assert len(running.pid_of(part)) == 1


def test_sigkill_of_the_supervisor_leaves_no_process_and_it_starts_again(running: Installation, voice: str) -> None:
    client, before = running.client("studio"), running.pids()
    running.stop(signal.SIGKILL)
    for _ in range(100):
        alive = [pid for pid in before if Path(f"/proc/{pid}").exists() and "zombie" not in _state(pid)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive
    running.start()
    wait_until_serving(client, voice)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()[2]
    except OSError:
        return ""
