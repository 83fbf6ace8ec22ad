"""`glottis up` as a whole: it serves, comes back from every death, and leaves no process, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import time
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from whole_service import Up, brought_up, copied, eventually, glottis, processes, state  # noqa: F401 — fixtures

from service.settings import Settings


@pytest.fixture(scope="module")
def up(brought_up):  # noqa: F811
    """One running Glottis for the tests that leave it as it was."""
    with copied(brought_up) as settings:
        started = Up(settings)
        started.until("serving")
        yield started
        family = started.family()
        code, last = started.rest(signal.SIGTERM)
        assert code == 0, last
        assert eventually(lambda: none_left(family, settings))


def health(settings, path: str = "/healthz") -> int:
    context = ssl.create_default_context(cafile=str(settings.officer_dir / "ca.pem"))
    with httpx.Client(verify=context, trust_env=False, timeout=20.0) as client:
        return client.get(f"https://localhost:{settings.port}{path}").status_code


def pid_of(up: Up, module: str) -> int:
    return next(pid for pid, command in up.family().items() if module in command)


def none_left(pids, settings) -> bool:
    return not [pid for pid, command in processes().items() if pid in pids or str(settings.state_dir) in command]


def test_it_serves_registers_clients_and_examines_itself(up):
    settings = up.settings
    assert health(settings) == 200
    assert health(settings, "/readyz") == 200

    added = glottis(settings, "clients", "add", "studio", "--tenant", "t", "--role", "speaker", "--json")
    assert added.returncode == 0, added.stderr
    folder = Path(json.loads(added.stdout)["folder"])
    assert {path.name for path in folder.iterdir()} == {"client.pem", "client.key", "dpop.key", "ca.pem", "client.json"}
    again = glottis(settings, "clients", "add", "studio", "--tenant", "t", "--role", "speaker")
    assert again.returncode == 6
    assert "client_exists" in again.stderr

    found = glottis(settings, "doctor", "--json")
    assert found.returncode == 0, found.stdout
    parts = {finding["part"]: finding for finding in json.loads(found.stdout)["findings"]}
    assert parts["token serving"]["state"] == parts["database"]["state"] == parts["edge"]["state"] == "ok"
    assert "ring/main/1" in parts["token serving"]["said"]


def test_no_process_is_started_with_a_secret_or_an_inherited_variable(up, monkeypatch):
    for pid in up.family():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {variable.split(b"=")[0].decode() for variable in variables if variable}
        assert not [variable for variable in variables if re.search(rb"://[^/@]*:[^/@]*@|password=", variable)]
        plain = {"PATH", "LC_ALL", "TZ", "OPENBLAS_NUM_THREADS", "ORT_DISABLE_TELEMETRY", "MALLOC_ARENA_MAX"}
        assert names <= plain | {f"GLOTTIS_{field.name.upper()}" for field in fields(Settings)}
    secrets = [path.read_bytes().strip() for path in up.settings.state_dir.glob("tokens/*/pin")]
    secrets += [path.read_bytes().split(b":")[2].split(b"@")[0] for path in up.settings.state_dir.glob("db/*.url")]
    assert len(secrets) == 7
    for pid in up.family():
        shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not [secret for secret in secrets if secret in shown]
    for log in up.settings.log_dir.iterdir():
        assert not [secret for secret in secrets if secret in log.read_bytes()], log


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each part its own user")
def test_vaults_run_undumpable_and_only_the_edge_reaches_their_sockets(up):
    for module, user in (("service.vault", "glottis-vault"), ("service.edge", "glottis-edge"), ("service.log", "glottis-log")):
        pid = pid_of(up, module)
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        import pwd

        assert pwd.getpwuid(int(status["Uid"].split()[0])).pw_name == user
        assert status["NoNewPrivs"] == "1"
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0, "an undumpable process's files belong to root"
    path = up.settings.vault_sockets[0]
    attempt = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert _as("glottis-edge", attempt, path) == 0
    for user in ("glottis-log", "glottis-db", "nobody"):
        assert _as(user, attempt, path) != 0, user


def _as(user: str, code: str, argument: Path) -> int:
    import pwd
    import subprocess

    entry = pwd.getpwnam(user)
    argv = ["/usr/bin/python3", "-c", code, str(argument)]
    return subprocess.run(argv, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], check=False, capture_output=True).returncode


def test_a_second_up_in_the_same_folder_is_refused(up):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        other = probe.getsockname()[1]
    second = glottis(up.settings.__class__.load(up.settings.environ(port=other)), "up")
    assert second.returncode == 6
    assert "already_running" in second.stderr


def test_a_taken_port_is_one_message_and_nothing_is_started(state):  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", state.port))
        taken.listen()
        done = glottis(state, "up")
    assert done.returncode == 6
    assert f"port {state.port}" in done.stderr
    assert "GLOTTIS_PORT" in done.stderr
    assert "Traceback" not in done.stderr
    assert none_left((), state)


def test_a_wrong_pin_stops_everything_with_one_message_after_one_try(state):  # noqa: F811
    state.pin_file("serving").write_text("wrong\n")
    done = glottis(state, "up")
    assert done.returncode == 2
    assert "refused the PIN" in done.stderr
    assert "starting it again" not in done.stdout
    assert "Traceback" not in done.stderr
    assert none_left((), state)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_parts_come_back_a_killed_whole_leaves_nothing_and_ctrl_c_ends_it_quickly(state):  # noqa: F811
    up = Up(state)
    up.until("serving")
    for module in ("service.vault", "service.log", "service.edge", "postgres -D"):
        os.kill(pid_of(up, module), signal.SIGKILL)
        assert "starting it again" in up.until("ended")
    assert eventually(lambda: _ready(state), 60), up.said

    family = up.family()
    up.rest(signal.SIGKILL)
    assert eventually(lambda: none_left(family, state))

    again = Up(state)
    again.until("serving")
    assert _ready(state)
    family, began = again.family(), time.monotonic()
    code, last = again.rest(signal.SIGINT)
    assert code == 0, last
    assert time.monotonic() - began < 10
    assert "Traceback" not in last
    assert eventually(lambda: none_left(family, state))


def _ready(settings) -> bool:
    try:
        return health(settings, "/readyz") == 200
    except httpx.HTTPError:
        return False
