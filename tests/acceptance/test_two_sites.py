"""Two sites from the outside: founded, compared, one stopped, killed, behind, and serving in the other's place."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from installation import VARIABLES, Installation, free_port
from sqlalchemy import text

from policies.audit import verify as verifier
from service import clients
from service.audit_bundles import export_bundle
from service.cli.main import cli
from service.client import Refused, VoiceClient
from service.schema import opened
from service.settings import Settings
from service.sync.admin import ask

pytestmark = pytest.mark.timeout(600)
"""Two tokens, two databases and a dozen processes come up in the first test."""

TEXT = "The quick brown fox jumps over the lazy dog."


def glottis(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "service.cli.main", *arguments]
    return subprocess.run(argv, env=VARIABLES | settings.environ(), capture_output=True, text=True, check=False, timeout=110)


def status(settings: Settings) -> dict[str, Any]:
    """What `glottis site status --json` prints, whatever it ends with."""
    found: dict[str, Any] = json.loads(glottis(settings, "site", "status", "--json").stdout)
    return found


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def second(first: Installation) -> Settings:
    return first.settings.of_site_b()


def site_process(running: Installation, site: str) -> int:
    """The site process of one site: the second one's lies in a folder inside the first one's."""
    for pid in running.pid_of("service.sync"):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"GLOTTIS_SITE={site}".encode() in environ:
            return pid
    raise AssertionError(f"no site process of site {site}")


def state_of(running: Installation, voice: str) -> str:
    """`awaiting_sync` while the voice does not speak for that reason, else `speaks`."""
    try:
        running.client("studio").speak(voice, TEXT)
    except Refused as refused:
        return refused.code
    return "speaks"


@pytest.fixture(scope="module")
def two(new_installation: Callable[..., Installation]) -> Iterator[Installation]:
    """Two sites, running; tests leave both up and level."""
    found = new_installation(GLOTTIS_SITES="2", GLOTTIS_VAULT_WORKERS="1")
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def voice(two: Installation) -> str:
    return two.voice()


def test_an_empty_folder_becomes_two_sites_that_agree(two: Installation, tmp_path: Path) -> None:
    told = status(two.settings)
    assert (told["sites"], told["endorsed"], told["development"]) == (["a", "b"], True, False)
    (version,) = told["versions"]
    assert (version["name"], version["state"], version["holders"]) == ("ring/main/1", "active", ["a", "b"])
    checked = glottis(two.settings, "site", "verify", "--save", str(tmp_path / "history"), "--json")
    assert checked.returncode == 0, checked.stderr
    heads = {summary["head"] for summary in json.loads(checked.stdout)["sites"].values()}
    assert len(heads) == 1

    folder = tmp_path / "history"
    offline = glottis(two.settings, "verify", "--certificates", str(folder), "--roster", str(folder / "roster"), "--json")
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout)["head"] in heads
    forged = folder / "00000002.certificate"
    changed = bytearray(forged.read_bytes())
    changed[len(changed) // 2] ^= 1
    forged.write_bytes(changed)
    refused = glottis(two.settings, "verify", "--certificates", str(folder), "--roster", str(folder / "roster"))
    assert (refused.returncode, "certificate_invalid" in refused.stderr) == (3, True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each site its own users")
def test_each_sites_keys_belong_to_users_of_its_own(two: Installation) -> None:
    uids = {Path(f"/proc/{site_process(two, site)}/status").read_text().split("Uid:\t")[1].split()[0] for site in "ab"}
    assert len(uids) == 2
    owners = {settings.token_dir("serving").stat().st_uid for settings in (two.settings, second(two))}
    assert len(owners) == 2
    assert two.settings.admin_socket.stat().st_mode & 0o077 == 0


def test_a_new_voice_is_held_by_both_sites_when_its_enroller_hears_of_it(two: Installation, voice: str) -> None:
    assert state_of(two, voice) == "speaks"
    told = status(two.settings)
    assert (told["awaiting_sync"], told["unsynced"]) == (0, 0)
    (there,) = ask(second(two), "status")["versions"]
    assert there["keys"] == 1


def test_a_client_is_known_at_the_other_site_and_its_end_too(two: Installation) -> None:
    def there() -> dict[str, str]:
        return {row["client"]: row["state"] for row in ask(second(two), "list_clients")["clients"]}

    two.client("guest")
    assert eventually(lambda: there().get("guest") == "active", 10)
    clients.revoke(two.settings, "guest")
    assert eventually(lambda: there()["guest"] == "revoked", 10)


def test_while_the_other_site_is_stopped_old_voices_speak_new_ones_wait_and_nothing_rotates(two: Installation, voice: str) -> None:
    """The first site serves on alone; the gap closes by itself when the other is back."""
    stopped = site_process(two, "b")
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert state_of(two, voice) == "speaks"
        waiting = two.voice("2033")
        assert state_of(two, waiting) == "awaiting_sync"
        told = glottis(two.settings, "site", "status", "--json")
        assert told.returncode == 75
        assert json.loads(told.stdout)["awaiting_sync"] == 1
        begun = glottis(two.settings, "site", "resume")
        assert (begun.returncode, "peer_unavailable" in begun.stderr) == (75, True)
        assert state_of(two, voice) == "speaks"
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert eventually(lambda: state_of(two, waiting) == "speaks")
    assert eventually(lambda: status(two.settings)["awaiting_sync"] == 0)


def test_a_voice_that_waits_is_refused_with_a_time_to_come_back(two: Installation) -> None:
    stopped = site_process(two, "b")
    os.kill(stopped, signal.SIGSTOP)
    try:
        client = two.client("studio")
        waiting = two.voice("2414")
        body = {"model": "hibari", "input": TEXT, "voice": waiting, "response_format": "wav"}
        headers = client.headers("POST", "/v1/audio/speech", client.token("speak", voice=waiting, text=TEXT))
        answer = client._http.post("/v1/audio/speech", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "awaiting_sync")
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert eventually(lambda: state_of(two, waiting) == "speaks")


@pytest.mark.soak
@pytest.mark.parametrize("site", ["a", "b"])
def test_a_killed_site_process_comes_back_and_both_agree(two: Installation, voice: str, site: str) -> None:
    for _ in range(2):
        os.kill(site_process(two, site), signal.SIGKILL)
        assert state_of(two, voice) == "speaks"
        time.sleep(random.random())
    assert eventually(lambda: glottis(two.settings, "site", "verify").returncode == 0)
    assert state_of(two, two.voice("2033")) in ("speaks", "awaiting_sync")
    assert eventually(lambda: status(two.settings)["awaiting_sync"] == 0)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_either_site_process_killed_at_many_random_points_loses_no_voice(two: Installation, voice: str) -> None:
    """While voices are enrolled and transactions are resumed; at the end both sites hold and agree on all of it."""
    enrolled = []
    for turn in range(40):
        victim = site_process(two, random.choice("ab"))
        begun = subprocess.Popen(
            [sys.executable, "-P", "-m", "service.cli.main", "site", "resume"],
            env=VARIABLES | two.settings.environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(random.random() * 2)
        os.kill(victim, signal.SIGKILL)
        if turn % 5 == 0:
            enrolled.append(two.voice("2033"))
        assert state_of(two, voice) == "speaks"
        begun.wait(60)
        time.sleep(25)  # a program that ran this long is started again at once, however often it dies
    assert eventually(lambda: glottis(two.settings, "site", "verify").returncode == 0, 120)
    assert eventually(lambda: status(two.settings)["awaiting_sync"] == 0, 120)
    assert {state_of(two, one) for one in enrolled} == {"speaks"}


@pytest.mark.soak
def test_the_second_site_killed_whole_is_started_again(two: Installation, voice: str) -> None:
    whole = next(pid for pid in two.pids() if _is_up_of(pid, second(two)))
    os.kill(whole, signal.SIGKILL)
    assert state_of(two, voice) == "speaks"
    assert eventually(lambda: glottis(two.settings, "site", "verify").returncode == 0, 90)


def _is_up_of(pid: int, settings: Settings) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"up" in command and f"GLOTTIS_STATE_DIR={settings.state_dir}".encode() in environ


def test_each_site_cosigns_the_others_log_and_an_auditor_sees_how_far(two: Installation, voice: str, tmp_path: Path) -> None:
    for site in (two.settings, second(two)):
        assert eventually(lambda site=site: ask(site, "status")["log"]["cosigned"] > 0)  # type: ignore[misc]
    bundle, history = tmp_path / "bundle", tmp_path / "history"
    log = ask(two.settings, "status")["log"]
    export_bundle(two.settings, bundle)
    alone = [str(bundle), "--fingerprint", log["fingerprint"], "--cosigner", log["cosigners"][0]]
    assert verifier.main(alone) == 0
    history.mkdir()
    for epoch, certificate in enumerate(ask(two.settings, "history")["certificates"], 1):
        (history / f"{epoch}.certificate").write_bytes(base64.b64decode(certificate))
    anchor = str(two.settings.roster_file)
    checked = [
        "verify",
        "--certificates",
        str(history),
        "--roster",
        anchor,
        "--audit",
        str(bundle),
        "--fingerprint",
        log["fingerprint"],
    ]
    said = CliRunner().invoke(cli, [*checked, "--json"])
    assert said.exit_code == 0, said.output
    assert list(json.loads(said.stdout)["log"]["cosigned"]) == [log["cosigners"][0].partition("+")[0]]
    assert log["forks"] == []


def test_doctor_names_both_sites(two: Installation) -> None:
    found = glottis(two.settings, "doctor", "--json")
    assert found.returncode == 0, found.stdout
    parts = {finding["part"]: finding for finding in json.loads(found.stdout)["findings"]}
    assert {parts[name]["state"] for name in ("sites", "policies", "other site", "certificates", "clock", "co-signing")} == {"ok"}


@pytest.mark.soak
def test_each_site_serves_in_the_others_place_and_no_key_is_written_again(two: Installation, voice: str) -> None:
    """Enrolled at A, spoken at B while A is down, and at A again: of the stored keys no byte changes."""
    before = _wrapped_keys(two.settings), _wrapped_keys(second(two))
    client = two.client("studio")
    two.stop()
    port = free_port()
    variables = second(two).environ(serves="yes", port=port, public_base_url=f"https://localhost:{port}")
    other = Installation(Settings.load(variables))
    other.start()
    try:
        with VoiceClient.from_folder(two.settings.client_dir("studio"), other.settings.public_base_url) as there:
            assert there.speak(voice, TEXT)[:4] == b"RIFF"
            assert there.voice(voice)["state"] == "active"
    finally:
        other.stop()
    two.start()
    client.close()
    two.clients.clear()
    with VoiceClient.from_folder(two.settings.client_dir("studio")) as again:
        assert again.speak(voice, TEXT)[:4] == b"RIFF"
    assert (_wrapped_keys(two.settings), _wrapped_keys(second(two))) == before


def _wrapped_keys(settings: Settings) -> list[tuple[Any, ...]]:
    """Every stored key of a site, whole, from its running database."""
    with opened(settings.owner_url()) as engine, engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT * FROM wrapped_key ORDER BY dek_id"))]
