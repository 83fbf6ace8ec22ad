"""A whole Glottis for tests: `glottis up` as a process of its own, in a state folder that was brought up once and copied.

Import the fixtures where they are used: `from whole_service import brought_up, state`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service import bringup
from service.holding import held
from service.settings import Settings

ROOT = Path(__file__).parents[2]
PYTHON_PATH = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def glottis(settings: Settings, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    argv = [sys.executable, "-P", "-m", "service.cli.main", *arguments]
    environ = PYTHON_PATH | settings.environ()
    return subprocess.run(argv, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110, **options)


class Up:
    """A running `glottis up`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.said: list[str] = []
        argv = [sys.executable, "-P", "-m", "service.cli.main", "up"]
        self.process = subprocess.Popen(
            argv, env=PYTHON_PATH | settings.environ(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, words: str) -> str:
        """Read lines until one has these words, and return it; fails with everything said if the process ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError("".join(self.said))

    def rest(self, how: int | None = signal.SIGINT) -> tuple[int, str]:
        """Send a signal, wait for the end; the exit code and what was said last."""
        if how is not None:
            self.process.send_signal(how)
        assert self.process.stdout is not None
        last = self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(30), last

    def family(self) -> dict[int, str]:
        """Every process that `up` has brought into the world and that lives: pid and command line."""
        return {pid: command for pid, command in processes().items() if pid in descendants(self.process.pid)}


def processes() -> dict[int, str]:
    """Living processes (no zombies) by pid, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(folder.name)] = command
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def descendants(root: int) -> set[int]:
    parents = {}
    for pid in processes():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {root}


def eventually(holds, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds())


@pytest.fixture(scope="session")
def brought_up() -> Iterator[Path]:
    """A state folder after `prepare`, never served from."""
    folder = Path(tempfile.mkdtemp(prefix="glottis-"))
    folder.chmod(0o711)
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(folder / "s"), "GLOTTIS_SITES": "1"})
    with held(settings):
        bringup.prepare(settings)
    yield folder / "s"
    shutil.rmtree(folder)


@contextmanager
def copied(brought_up: Path) -> Iterator[Settings]:
    """Settings with a copy of a state folder that was brought up already, at a port that is free."""
    folder = Path(tempfile.mkdtemp(prefix="glottis-"))
    folder.chmod(0o711)
    target = folder / "s"
    subprocess.run(["cp", "-a", brought_up, target], check=True)
    for conf in target.glob("tokens/*/softhsm2.conf"):
        conf.write_text(conf.read_text().replace(str(brought_up), str(target)))
    for url in (target / "db").iterdir():
        url.write_text(url.read_text().replace(str(brought_up).replace("/", "%2F"), str(target).replace("/", "%2F")))
    variables = {"GLOTTIS_STATE_DIR": str(target), "GLOTTIS_PORT": str(free_port())}
    yield Settings.load(variables | {"GLOTTIS_VAULT_WORKERS": "1", "GLOTTIS_SITES": "1"})
    shutil.rmtree(folder)


@pytest.fixture
def state(brought_up: Path) -> Iterator[Settings]:
    """A state folder of this test's own."""
    with copied(brought_up) as settings:
        yield settings
