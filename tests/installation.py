"""A whole Glottis for the acceptance tests: `glottis up` in a process of its own, and clients that call it like anybody."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from memory_scan import family

from service import clients
from service.client import VoiceClient
from service.settings import Settings

SPEECH = Path(__file__).parents[1] / "examples" / "speech"
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}

ORIGIN = "https://app.example"
"""Where the page of the shared installation's browsers is served from."""


def recordings(speaker: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((SPEECH / speaker).glob("*.flac"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Installation:
    """A running installation. `pids()` are all its processes now."""

    settings: Settings
    up: subprocess.Popen[str] | None = None
    clients: dict[str, VoiceClient] = field(default_factory=dict)

    def start(self) -> None:
        environ = VARIABLES | self.settings.environ()
        argv = [sys.executable, "-P", "-m", "service.cli.main", "up"]
        self.up = subprocess.Popen(
            argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.up.stdout is not None
        said = []
        for line in self.up.stdout:
            said.append(line)
            if "serving" in line:
                return
        raise AssertionError("glottis up ended:\n" + "".join(said))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.up is not None:
            self.up.send_signal(how)
            self.up.wait(20)
            assert self.up.stdout is not None
            self.up.stdout.close()
            self.up = None

    def pids(self) -> list[int]:
        assert self.up is not None
        return family(self.up.pid)

    def pid_of(self, module: str) -> list[int]:
        """Processes whose command line names `module` (`service.vault`)."""
        return [pid for pid in self.pids() if module.encode() in _command(pid)]

    def client(self, name: str) -> VoiceClient:
        """A registered client with every role in tenant `acceptance`."""
        if name not in self.clients:
            folder = clients.add(self.settings, name, tenant="acceptance", roles=clients.ALL_ROLES)
            self.clients[name] = VoiceClient.from_folder(folder)
        return self.clients[name]

    def voice(self, speaker: str = "1998", count: int = 3) -> str:
        """A newly enrolled voice's id."""
        client = self.client("studio")
        expiry = (datetime.now(UTC) + timedelta(days=30)).isoformat()
        consent = client.record_consent(f"speaker {speaker}", ["speak", "compare"], expiry, "CC BY 4.0")
        return str(client.enrol(f"speaker {speaker}", recordings(speaker)[:count], consent["id"])["id"])


def _command(pid: int) -> list[bytes]:
    """A process's command line; empty for one that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.fixture(scope="session")
def new_installation() -> Iterator[Callable[..., Installation]]:
    """Makes installations in folders that other users may enter; stops and deletes them at the end."""
    made: list[Installation] = []
    base = Path(tempfile.mkdtemp(prefix="glottis-test-"))
    base.chmod(0o711)

    def make(**variables: str) -> Installation:
        folder = base / str(len(made))
        installation = Installation(
            Settings.load({"GLOTTIS_STATE_DIR": str(folder), "GLOTTIS_PORT": str(free_port()), "GLOTTIS_SITES": "1", **variables})
        )
        made.append(installation)
        return installation

    yield make
    for installation in made:
        for client in installation.clients.values():
            client.close()
        installation.stop()
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="session")
def running(new_installation: Callable[..., Installation]) -> Installation:
    """One running installation for every test that leaves it as it was."""
    found = new_installation(GLOTTIS_BROWSER_ORIGINS=ORIGIN)
    found.start()
    return found


@pytest.fixture(scope="session")
def voice(running: Installation) -> str:
    """An enrolled voice of speaker 1998."""
    return running.voice()
