"""The demo's second half: a master rotated, the other site away and back, a voice erased for good, an old database adopted.

Everything goes through the command line, as an officer or operator would give it; only the officers' signatures are made
here, with the development installation's own keys, where people would carry files.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyvault.approval_kinds import Request
from keyvault.approvals import signed_by
from service.client import Refused
from service.demo_attacks import DemoFailed, Scene
from service.settings import Settings
from service.sites import development_officers
from service.sync.admin import ask

TEXT = "The key was changed, and the voice is still mine."
_PATIENCE_S = 60.0
_SHUT = ("voice_unknown", "key_version_not_found", "key_state_forbids", "voiceprint_missing")


@dataclass(frozen=True)
class Officers:
    """The command line, and officers' pens, for the first site of the demo."""

    settings: Settings

    def glottis(self, *arguments: str, ends: int = 0) -> str:
        """Give one command; it must end with the code `ends`. Returns what it printed."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GLOTTIS_")} | self.settings.environ()
        argv = [sys.executable, "-P", "-m", "service.cli.main", *arguments]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
        if done.returncode != ends:
            raise DemoFailed(f"glottis {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout if ends == 0 else done.stderr

    def ceremony(self) -> str:
        """Both development officers make the next master at both sites; its label."""
        return str(json.loads(self.glottis("keys", "ceremony", "rehearse", "--json"))["name"])

    def approve(self, request: str) -> None:
        """Two officers sign a request that the site filed."""
        asked = Request.decode(base64.b64decode(ask(self.settings, "approval", name=request)["request"]))
        signed = base64.b64encode(self.signed(asked).encode()).decode()
        ask(self.settings, "approval_add", request=signed)

    def signed(self, asked: Request) -> Request:
        """The same request with two officers' signatures, each over what it says."""
        asked.meaning()
        keys = development_officers(self.settings)
        approvers = [person for person in keys if person != asked.operation.requester][:2]
        return replace(asked, approvals=tuple(signed_by(asked.operation, person, "approve", keys[person]) for person in approvers))

    def sign_file(self, path: Path) -> None:
        """Two officers sign a request that lies in a file."""
        path.write_bytes(self._joined(Request.decode(path.read_bytes())).encode())

    def _joined(self, asked: Request) -> Request:
        return replace(asked, approvals=(*asked.approvals, *self.signed(asked).approvals))

    def destroy(self, master: str) -> None:
        """Have one version destroyed at both sites at once: asked, approved by two officers, carried out."""
        command = ("keys", "destroy", master, "--delay-days", "0", "--reason", "erasure of a voice", "--yes", "--json")
        asked = ask(self.settings, "key_destroy", master=master, reason="erasure of a voice", delay_hours=0)
        self.approve(asked["request"])
        self.glottis(*command)


def second_site(up: int) -> list[int]:
    """Every process of the second site, which `glottis up`, process `up`, runs beside its own."""
    parents = dict(_processes())
    (first,) = (pid for pid, parent in parents.items() if parent == up and _is_up(pid))
    found = [first]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _processes() -> Iterator[tuple[int, int]]:
    """Each process and its parent."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            yield int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])


def _is_up(pid: int) -> bool:
    with suppress(OSError):
        return b"\0up\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def rotated(scene: Scene, officers: Officers) -> None:
    """The ring's master is replaced by a new one, every voice's key is moved in the token, and the voice speaks again."""
    label = officers.ceremony()
    scene.transcript.fact(f"two officers made {label} at both sites; the messages they signed are kept as a transcript")
    officers.glottis("keys", "rotate", "--yes")
    moved = json.loads(officers.glottis("keys", "rewrap", "--json"))
    audio = scene.honest.speak(scene.voice, TEXT)
    scene.transcript.fact(f"{label} serves: both HSMs proved the same key; {moved['moved']} keys moved; spoken: {len(audio)} bytes")


def alone_and_back(scene: Scene, officers: Officers, pids: Callable[[], Sequence[int]]) -> None:
    """Site B stops answering: the voice speaks on, a rotation waits. B is back: the rotation goes through."""
    label = officers.ceremony()
    with _frozen(pids()):
        audio = scene.honest.speak(scene.voice, TEXT)
        refusal = officers.glottis("keys", "rotate", "--yes", ends=75)
        if "peer_unavailable" not in refusal:
            raise DemoFailed(f"the rotation was refused for another reason: {refusal}")
        state = _version(officers.settings, label)["state"]
        scene.transcript.fact(f"site B stopped: the voice speaks ({len(audio)} bytes); {label} waits, {state}: peer_unavailable")
    _eventually(lambda: _rotates(officers), "the rotation did not go through when site B was back")
    officers.glottis("keys", "rewrap")
    scene.honest.speak(scene.voice, TEXT)
    scene.transcript.fact(f"site B is back: {label} is {_version(officers.settings, label)['state']} at both sites")


def erased_for_good(scene: Scene, officers: Officers, backup: Path, out: Path) -> None:
    """A voice is erased, and shredded at once: every master that ever covered its key is destroyed at both sites."""
    voice = scene.second_voice
    officers.glottis("backup", str(backup))
    officers.glottis("voices", "erase", voice, "--yes")
    label = officers.ceremony()
    officers.glottis("keys", "rotate", "--yes")
    officers.glottis("keys", "rewrap")
    _eventually(lambda: ask(officers.settings, "status")["unsynced"] == 0, "site B did not sign for the moved keys")
    old = [one["name"] for one in ask(officers.settings, "keys")["versions"] if one["name"] != label]
    for master in old:
        officers.destroy(master)
    _eventually(lambda: _stage(officers, voice) == "shredded", "the voice was not shredded")
    scene.transcript.fact(f"erased at both sites; {', '.join(old)} destroyed by two officers' approval: shredded")
    certificate = out / "erasure.json"
    officers.glottis("voices", "certificate", voice, "--out", str(certificate))
    officers.glottis("voices", "certificate", "--verify", str(certificate), "--roster", str(officers.settings.roster_file))
    scene.transcript.fact(f"its certificate, signed by the site's HSM, verifies offline: {certificate}")


def adopted(officers: Officers, backup: Path) -> None:
    """With nothing running: the database of before the erasure comes back, and officers adopt it beside the newer token."""
    request = backup.with_name("adoption.request")
    officers.glottis("restore", "apply", str(backup), "--only", "database", "--yes")
    officers.glottis("restore", "request", "--reason", "a drill", "--out", str(request))
    requests = [request, request.with_name(f"{request.name}.log")]  # the log ended later than the database of before
    for one in requests:
        officers.sign_file(one)
    officers.glottis("restore", "adopt", *map(str, requests))


def still_shut(scene: Scene) -> None:
    """The adopted site caught up from the other one: the kept voice speaks, the erased one does not."""
    _eventually(lambda: _speaks(scene, scene.voice) == "", "the kept voice did not come back after the adoption")
    code = _speaks(scene, scene.second_voice)
    if code not in _SHUT:
        raise DemoFailed(f"the erased voice was answered {code or 'with speech'}")
    scene.transcript.fact(f"the voice that was kept speaks; the erased one, whose rows are in the old database: {code}")


def _speaks(scene: Scene, voice: str) -> str:
    """The code of what a request to speak was refused for; empty when it spoke."""
    try:
        scene.honest.speak(voice, TEXT)
    except Refused as refused:
        return refused.code
    return ""


def _rotates(officers: Officers) -> bool:
    try:
        officers.glottis("keys", "rotate", "--yes")
    except DemoFailed:
        return False
    return True


def _stage(officers: Officers, voice: str) -> str:
    return str(json.loads(officers.glottis("voices", "show", voice, "--json")).get("stage", ""))


def _version(settings: Settings, label: str) -> dict[str, Any]:
    return ask(settings, "key", master=label)


def _eventually(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise DemoFailed(otherwise)
        time.sleep(0.3)


@contextmanager
def _frozen(pids: Sequence[int]) -> Iterator[None]:
    """Processes that do not run while the block does."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
