"""A ceremony's steps at one token, each in a child process under the account that owns the token.

`python -m service.ceremony_steps` reads one JSON request a line on standard input and writes one JSON answer a line. PINs
travel on that pipe alone. A step whose session objects must live between two messages takes a second line; where that never
comes, the child ends and its session objects with it. `token_process` is the other end.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from keyvault import ceremony, master_ceremony
from keyvault.breaker import unheard
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import RingMaster
from keyvault.key_uses import Place
from keyvault.master_ceremony import Pins
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Mechanism
from keyvault.pkcs11_start import TokenConfig
from service.errors import StepFailed
from service.isolation import Account, harden_process, start
from service.log_files import last_words
from service.logs import configure_logging
from service.rotation_link import serve_moves
from service.settings import Settings
from service.site import Site, token_config

_SECONDS = 300.0
"""A hardware token may take minutes over an RSA pair."""
Facts = dict[str, Any]


class TokenProcess:
    """One child at work on a token."""

    def __init__(self, child: subprocess.Popen[bytes], step: str) -> None:
        self._child, self._step = child, step
        self._said = b""

    def ask(self, **request: Any) -> Facts:
        """Send one line and wait for its answer. Raises StepFailed with the child's last words."""
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it died: its last words say why
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        while True:
            try:
                said = json.loads(self._line())
            except ValueError:
                continue  # no line of ours
            if isinstance(said, dict) and "answer" in said:
                answer: Facts = said["answer"]
                return answer

    def _line(self) -> bytes:
        assert self._child.stdout is not None
        deadline = time.monotonic() + _SECONDS
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StepFailed(f"the token did not answer {self._step} within {_SECONDS:.0f} s")
            more = os.read(self._child.stdout.fileno(), 1 << 16)
            if not more:
                raise self._ended()
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        words = last_words(line)
        if "code" in words:
            raise StepFailed(words.get("event", self._step), fix=words.get("fix"), cause=words["code"])
        return line

    def _ended(self) -> StepFailed:
        words = last_words(self._said)
        event = words.get("event") or f"{self._step} ended with {self._child.wait()}"
        return StepFailed(event, fix=words.get("fix"), cause=words.get("code", "step_failed"))


@contextmanager
def token_process(settings: Settings, account: Account, step: str, *, pass_fds: Sequence[int] = ()) -> Iterator[TokenProcess]:
    """Start one step's child; it is ended with the block, whatever it does, and its session objects with it."""
    argv = [sys.executable, "-P", "-m", "service.ceremony_steps"]
    environ = settings.environ(worker=step)
    child = start(argv, account, environ=environ, stdin=subprocess.PIPE, output=subprocess.PIPE, pass_fds=pass_fds)
    with child:
        try:
            yield TokenProcess(child, step)
        finally:
            child.kill()
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # what a dead child was not given any more would hide why it died
                child.stdin.close()


def versions(settings: Settings, *, ring: str, user_pin: str, token: str = "serving") -> Facts:  # noqa: S107 — a token's name
    """Every version of the ring that the token holds in any form."""
    return {"versions": master_ceremony.versions(_config(settings, token), user_pin, ring)}


def send(settings: Settings, *, ring: str, version: int, so_pin: str, user_pin: str, transport: str, oaep: str) -> Facts:
    """Make the master and wrap it for each one-time key that `transport` holds, in their order."""
    key = base64.b64decode(transport)
    master, pins = RingMaster(ring, version), Pins(so_pin, user_pin)
    wrapped, attributes = master_ceremony.made_and_wrapped(_config(settings, "serving"), pins, master, key, Mechanism[oaep])
    os.sync()  # the module does not: what the other site is sent must not be missing here after a power cut
    return {"wrapped": base64.b64encode(wrapped).decode(), "attributes": attributes}


def receive(
    settings: Settings,
    *,
    ring: str,
    version: int,
    so_pin: str,
    user_pin: str,
    oaep: str,
    token: str = "serving",  # noqa: S107
) -> Facts:
    """Make the one-time key and say its public half; then take the wrapped master, if it comes."""
    with master_ceremony.receiving(_config(settings, token), Pins(so_pin, user_pin), RingMaster(ring, version)) as receiver:
        _say({"transport": base64.b64encode(receiver.transport).decode()})
        answer = sys.stdin.readline()
        if not answer:
            return {}
        attributes = receiver.take(base64.b64decode(json.loads(answer)["wrapped"]), Mechanism[oaep])
    os.sync()
    return {"attributes": attributes}


def make(settings: Settings, *, ring: str, version: int, so_pin: str, user_pin: str) -> Facts:
    """Make the master of a cluster that has one site."""
    ceremony.add_master(_config(settings, "serving"), so_pin, user_pin, RingMaster(ring, version))
    os.sync()
    return {}


def remove(settings: Settings, *, ring: str, version: int, user_pin: str, token: str = "serving") -> Facts:  # noqa: S107
    """Destroy what an abandoned ceremony left, or the rotation token's half; `objects` says how many there were."""
    gone = master_ceremony.removed(_config(settings, token), user_pin, RingMaster(ring, version))
    os.sync()
    return {"objects": gone}


def move(settings: Settings, *, user_pin: str, link: int) -> Facts:
    """Open the rotation token and move keys for whoever is at the other end of `link`, until it is closed."""
    held = Site.load(settings.site_file).tokens["rotation"].masters
    token = Pkcs11Hsm.open(_config(settings, "rotation"), user_pin, expected_masters=held, required_masters=())
    hsm = GuardedHsm(token, Place.REWRAP, unheard)
    try:
        _say({"masters": [master.label for master in hsm.masters()]})
        serve_moves(hsm, socket.socket(fileno=link))
    finally:
        hsm.close()
    return {}


STEPS: Mapping[str, Callable[..., Facts]] = {
    "versions": versions,
    "send": send,
    "receive": receive,
    "make": make,
    "remove": remove,
    "move": move,
}


def _config(settings: Settings, token: str) -> TokenConfig:
    return token_config(settings, token, Site.load(settings.site_file).tokens[token])


def _say(facts: Facts) -> None:
    sys.stdout.write("\n" + json.dumps({"answer": facts}) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging(settings.worker, settings.log_level)
    harden_process()
    request = json.loads(sys.stdin.readline())
    _say(STEPS[settings.worker](settings, **request))


if __name__ == "__main__":
    main()
