"""`glottis keys ceremony`: two officers at two consoles, who pass files and compare fingerprints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ceremony_sites import CeremonySites, make_sites
from click.testing import CliRunner
from hsm_fixtures import SO_PIN, USER_PIN

from keyvault.errors import CeremonyMessageInvalid
from service.cli.ceremony import ceremony
from service.exits import Exit, exit_for
from service.settings import Settings

PROGRAM = "from service.cli.ceremony import ceremony; ceremony()"


class Console:
    """One officer's console: a folder of its own, where the files that are carried arrive."""

    def __init__(self, sites: CeremonySites, settings: Settings, person: str, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.environ = {**settings.environ(), "PATH": os.environ["PATH"], "PYTHONPATH": str(Path.cwd())}
        self.desk = ["--key", str(sites.folder / f"{person}.pem"), "--roster", str(sites.folder / "roster")]

    def argv(self, command: str, *arguments: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, command, *arguments, *self.desk]

    def run(self, command: str, *arguments: str, typed: str = "") -> dict[str, Any]:
        argv = [*(self.argv(command, *arguments) if command != "list" else [sys.executable, "-c", PROGRAM, command]), "--json"]
        done = subprocess.run(argv, cwd=self.folder, env=self.environ, input=typed, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert SO_PIN not in done.stdout + done.stderr
        return json.loads(done.stdout)

    def started(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.argv(command, *arguments), cwd=self.folder, env=self.environ, text=True, **pipes)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> CeremonySites:
    return make_sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture
def consoles(sites: CeremonySites, tmp_path: Path) -> tuple[Console, Console]:
    return Console(sites, sites.a, "ada", tmp_path / "a"), Console(sites, sites.b, "bo", tmp_path / "b")


def carry(name: str, source: Console, target: Console) -> None:
    shutil.copy(source.folder / name, target.folder / name)


def appears(path: Path, made_by: subprocess.Popen[str]) -> None:
    for _ in range(300):
        if path.exists():
            return
        assert made_by.poll() is None, made_by.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")


def test_two_consoles_make_a_master_and_a_transcript(consoles: tuple[Console, Console], sites: CeremonySites) -> None:
    a, b = consoles
    planned = a.run("begin", "--with", "bo")
    assert planned["file"] == "main-1.1-plan"
    carry("main-1.1-plan", a, b)
    waiting = b.started("offer", "main-1.1-plan", "--so-pin-file", "-", "--pin-file", "-")
    assert waiting.stdin is not None
    waiting.stdin.write(f"{SO_PIN}\n{USER_PIN}\n" + "y\n")  # both PINs, and then: the plan was compared
    waiting.stdin.flush()
    appears(b.folder / "main-1.2-offer", waiting)
    carry("main-1.2-offer", b, a)
    (b.folder / "main-1.3-master").write_bytes((b.folder / "main-1.2-offer").read_bytes())  # not the answer: it waits on
    sent = a.run("send", "main-1.2-offer", "--so-pin-file", "-", typed=f"{SO_PIN}\ny\n")
    time.sleep(1.2)
    carry("main-1.3-master", a, b)
    said, told = waiting.communicate("y\n", timeout=60)
    assert waiting.returncode == 0, told
    assert "is not the answer" in told
    assert sent["fingerprints"]["master"] in told
    assert sent["fingerprints"]["offer"] in said
    assert SO_PIN not in said + told
    carry("main-1.4-receipt", b, a)
    closed = a.run("close", "main-1.4-receipt", "--yes")
    assert closed["complete"]
    carry("main-1.5-close", a, b)
    kept = b.run("keep", "main-1.5-close")
    assert kept["fingerprints"] == closed["fingerprints"]
    assert a.run("list")["open"] == b.run("list")["open"] == []
    verified(a.folder / "main-1.5-close", sites)


def verified(transcript: Path, sites: CeremonySites) -> None:
    """Offline, by the roster's public keys; every change is named."""
    runner, roster = CliRunner(), str(sites.folder / "roster")
    done = runner.invoke(ceremony, ["verify", str(transcript), "--roster", roster])
    assert done.exit_code == 0, done.output
    assert "the whole ceremony holds" in done.output
    sites.a.roster_file.write_bytes((sites.folder / "roster").read_bytes())
    done = runner.invoke(ceremony, ["--verify", str(transcript)], env=sites.a.environ())
    assert done.exit_code == 0, done.output
    whole = transcript.read_bytes()
    for data, words in (
        (whole[:-1], "no whole ceremony message"),
        (whole + b"x", "no whole ceremony message"),
        (transcript.with_name("main-1.4-receipt").read_bytes(), "ends with the receipt"),
        (whole.replace(b"TRUSTED=1", b"TRUSTED=0", 1), "."),
        (whole[:-8] + bytes(8), "close is not signed by ada"),
    ):
        changed = transcript.with_name("changed")
        changed.write_bytes(data)
        refused = runner.invoke(ceremony, ["verify", str(changed), "--roster", roster]).exception
        assert isinstance(refused, CeremonyMessageInvalid)
        assert words in str(refused) or words == "."
        assert exit_for(refused) is Exit.INTEGRITY


def test_saying_no_to_a_fingerprint_stops_everything(consoles: tuple[Console, Console], sites: CeremonySites) -> None:
    a, b = consoles
    a.run("begin", "--with", "bo", "--ring", "doubt")
    carry("doubt-1.1-plan", a, b)
    done = subprocess.run(
        b.argv("offer", "doubt-1.1-plan"), cwd=b.folder, env=b.environ, input="n\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Does the other officer's console show this fingerprint of the plan?" in done.stderr
    assert not (b.folder / "doubt-1.2-offer").exists()


def test_an_open_ceremony_is_named_and_a_dry_run_changes_nothing(consoles: tuple[Console, Console]) -> None:
    a, _ = consoles
    a.run("begin", "--with", "bo", "--ring", "open")
    assert [(story["ring"], story["step"]) for story in a.run("list")["open"] if story["ring"] == "open"] == [("open", "plan")]
    assert a.run("abandon", "open", "1", "--dry-run")["version"] == 1
    assert a.run("list")["open"]
