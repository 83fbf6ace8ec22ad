"""The log process whole: a real token of its own, a real database that is killed and comes back, a clean stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from audit_parts import Log
from hsm_fixtures import SO_PIN, ServingToken, in_own_process
from postgres_fixture import PostgresForTests

from keyvault import ceremony, softhsm
from keyvault.ceremony import TokenFacts
from keyvault.errors import SignerRotating
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import KeyName
from keyvault.key_uses import Place
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from policies.audit.export import export
from policies.audit.verify import Verifier
from service.log.keys import make_next
from service.site import Site

PIN = "7719-log-pin"


def make_log_token(folder: Path) -> TokenFacts:
    module = softhsm.find_module()
    serial = softhsm.make_token(module, folder, "log", SO_PIN, PIN)
    return ceremony.log_token(TokenConfig(module, "log", serial, folder), PIN)


def secret(path: Path, content: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(content + "\n")


@pytest.fixture(scope="module")
def log_token(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TokenFacts]:
    folder = tmp_path_factory.mktemp("log") / "tokens" / "log"
    folder.parent.mkdir()
    facts = in_own_process(make_log_token, folder)
    secret(folder / "pin", PIN)
    return folder.parent.parent, facts


class Process:
    """`python -m service.log` on a state folder, its lines in a file."""

    def __init__(self, state: Path, output: Path) -> None:
        self.output = output
        environ = {"GLOTTIS_STATE_DIR": str(state), "PATH": os.environ["PATH"], "GLOTTIS_LOG_LEVEL": "debug"}
        with output.open("ab") as file:
            self.popen = subprocess.Popen([sys.executable, "-m", "service.log"], env=environ, stdout=file, stderr=file)

    def said(self, event: str) -> int:
        return sum(json.loads(line)["event"] == event for line in self.output.read_text().splitlines())


@pytest.fixture
def site(log: Log, log_token: tuple[Path, TokenFacts], serving_token: ServingToken, tmp_path: Path) -> Iterator[Site]:
    state, facts = log_token
    site = Site(UUID(int=1), {"serving": serving_token.facts, "log": facts, "officer": TokenFacts("officer", "0")})
    (state / "site.json").write_text(site.to_json())
    secret(state / "db" / "log.url", log.database.url.render_as_string(hide_password=False))
    (state / "audit").mkdir(exist_ok=True)
    yield site
    (state / "audit" / "checkpoint").unlink(missing_ok=True)


@pytest.fixture
def start(log_token: tuple[Path, TokenFacts], site: Site, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def run() -> Process:
        started.append(Process(log_token[0], tmp_path / f"log-{len(started)}.log"))
        return started[-1]

    yield run
    for process in started:
        process.popen.kill()
        process.popen.wait()


def until(condition: Callable[[], bool], process: Process, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.popen.poll() is None, process.output.read_text()
        assert time.monotonic() < deadline, process.output.read_text()
        time.sleep(0.05)


def exported(log: Log, site: Site, path: Path) -> int:
    with path.open("w") as file:
        export(log.database, site.audit_key, file)
    with path.open("rb") as bundle:
        return Verifier(site.audit_key.fingerprint).verify(bundle).size


def test_it_follows_the_database_and_stops_when_asked(
    log: Log, site: Site, start: Callable[[], Process], postgres: PostgresForTests, tmp_path: Path
) -> None:
    log.append()
    process = start()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(1,)], process)
    started = time.monotonic()
    log.append()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(2,)], process)
    assert time.monotonic() - started < 5  # 0.2 s and a little, on a machine that is not shared

    log.database.dispose()
    postgres.stop(signal.SIGKILL)
    until(lambda: process.said("log_interrupted") > 0, process)
    postgres.start()
    log.append()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(3,)], process)
    assert process.said("log_opened") == 2
    assert exported(log, site, tmp_path / "bundle") == 3

    limits = Path(f"/proc/{process.popen.pid}/limits").read_text()
    assert next(line for line in limits.splitlines() if line.startswith("Max core file size")).split()[4:6] == ["0", "0"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(10) == 0
    assert process.said("log_closed") == 1
    for hidden in (PIN, postgres.password):
        assert hidden not in process.output.read_text()


def test_killed_and_started_again_it_goes_on(log: Log, site: Site, start: Callable[[], Process], tmp_path: Path) -> None:
    log.append()
    first = start()
    until(lambda: first.said("checkpoint_signed") > 0, first)
    first.popen.kill()
    first.popen.wait()
    log.append()
    second = start()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(2,)], second)
    assert exported(log, site, tmp_path / "bundle") == 2


def test_a_changed_history_ends_it_with_its_code(log: Log, site: Site, start: Callable[[], Process]) -> None:
    log.append()
    process = start()
    until(lambda: process.said("checkpoint_signed") > 0, process)
    log.sql("UPDATE leaf SET entry = set_byte(entry, 9, 0)")
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(10) == 0
    again = start()
    assert again.popen.wait(40) != 0
    last = json.loads(again.output.read_text().splitlines()[-1])
    assert (last["code"], "keep it as evidence" in last["fix"]) == ("audit_diverged", True)
    assert "fork: the first 1 leaves" in again.output.read_text()
    assert "Traceback" not in again.output.read_text()


def make_next_key(folder: Path, facts: TokenFacts) -> list[str | int]:
    token = Pkcs11Hsm.open(TokenConfig(softhsm.find_module(), "log", facts.serial, folder), PIN, expected_masters=())
    hsm, found = GuardedHsm(token, Place.LOG_KEY, lambda _: None), list[str | int]()
    for _ in range(2):
        try:
            found.append(make_next(hsm))
        except SignerRotating as error:
            found.append(error.code)
    token.close()
    return found


def versions(folder: Path, facts: TokenFacts) -> tuple[int, ...]:
    token = Pkcs11Hsm.open(TokenConfig(softhsm.find_module(), "log", facts.serial, folder), PIN, expected_masters=())
    held = token.signer_versions(KeyName.CHECKPOINT_SIGNER)
    token.close()
    return held


def test_the_running_log_hands_over_to_the_next_key_and_destroys_the_one_before(
    log: Log, site: Site, start: Callable[[], Process], log_token: tuple[Path, TokenFacts], tmp_path: Path
) -> None:
    state, facts = log_token
    folder = state / "tokens" / "log"
    log.append()
    process = start()
    until(lambda: process.said("checkpoint_signed") > 0, process)
    kept = (state / "audit" / "checkpoint").read_text()
    assert in_own_process(make_next_key, folder, facts) == [2, "signer_rotating"]
    until(lambda: process.said("log_handed_over") == 1, process)
    log.append()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(2,)], process)
    assert "hand-over 1 " in log.note()
    assert exported(log, site, tmp_path / "bundle") == 2
    with (tmp_path / "bundle").open("rb") as bundle:
        assert Verifier(site.audit_key.fingerprint, since=kept).verify(bundle).consistent_with == 1
    process.popen.kill()
    process.popen.wait()
    assert in_own_process(versions, folder, facts) == (2,)
    log.append()
    again = start()
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(3,)], again)
    assert exported(log, site, tmp_path / "bundle") == 3
    again.popen.kill()
    again.popen.wait()
    (state / "audit" / "hand-overs").rename(tmp_path / "lost")
    log.append()
    without = start()  # the newest checkpoint carries them too
    until(lambda: log.sql("SELECT max(size) FROM checkpoint") == [(4,)], without)
    without.popen.kill()
    without.popen.wait()
    (state / "audit" / "checkpoint").write_text(kept)
    lost = start()
    assert lost.popen.wait(40) != 0
    assert json.loads(lost.output.read_text().splitlines()[-1])["code"] == "audit_signing_failed"
    (tmp_path / "lost").rename(state / "audit" / "hand-overs")


def test_a_wrong_pin_is_tried_once(log: Log, start: Callable[[], Process], log_token: tuple[Path, TokenFacts]) -> None:
    pin = log_token[0] / "tokens" / "log" / "pin"
    try:
        pin.write_text("0000-wrong\n")
        process = start()
        assert process.popen.wait(40) != 0
    finally:
        pin.write_text(PIN + "\n")
    assert json.loads(process.output.read_text().splitlines()[-1])["code"] == "pin_rejected"
