"""Promises 1 and 2 from the outside: after 200 openings and 200 refusals no process holds the voice or its key.

The needles are computed outside: the DEK from the PIN and the token's files, the numbers from the sealed rows. The processes
are undumpable, so only root can look; elsewhere these tests are skipped, by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from installation import Installation
from memory_scan import Found, needles_of, scan
from softhsm_files import dek_bytes
from sqlalchemy import text

from service.client import Refused
from service.schema import opened
from voiceprints.sealing import Binding
from voiceprints.store import RowKind

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the memory of undumpable processes is closed to everybody else"),
]

TIMES, LOOKS = 200, 4
TEXT = "Yes."


@dataclass(frozen=True)
class Secrets:
    """What must be nowhere: runs of the embedding and the conditioning, and the voice's key."""

    embedding: dict[str, bytes]
    conditioning: dict[str, bytes]
    key: dict[str, bytes]

    @property
    def needles(self) -> dict[str, bytes]:
        return self.embedding | self.conditioning | self.key


def secrets_of(installation: Installation, voice: str) -> Secrets:
    settings = installation.settings
    with opened(settings.role_url("owner")) as database, database.connect() as connection:
        key = connection.execute(text("SELECT * FROM wrapped_key WHERE voice_id = :v"), {"v": voice}).one()
        rows = connection.execute(text("SELECT * FROM voiceprint WHERE voice_id = :v"), {"v": voice}).all()
    dek = dek_bytes(
        settings.token_dir("serving"), settings.serving_pin.read(), bytes(key.blob), f"ring/{key.ring}/{key.ring_version}"
    )
    numbers = {}
    for row in rows:
        binding = Binding(row.tenant, UUID(str(row.voice_id)), RowKind(row.kind), row.dek_id, row.dek_version, row.model_id)
        sealed = bytes(row.sealed)
        numbers[row.kind] = np.frombuffer(AESGCM(dek).decrypt(sealed[:12], sealed[12:], binding.aad), dtype="<f4")
    assert numbers["embedding"].shape == (256,)
    halves = {"key": dek, "first half of the key": dek[:16], "second half of the key": dek[16:]}
    return Secrets(needles_of("embedding", numbers["embedding"]), needles_of("conditioning", numbers["conditioning"]), halves)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_directly_after_an_enrolment_no_process_keeps_the_voice_or_its_key(running: Installation) -> None:
    """Before any opening: what an enrolment leaves behind is not yet overwritten by other work."""
    found = scan(running.pids(), secrets_of(running, running.voice("2033")).needles)
    assert not found, _told(found)


@pytest.fixture(scope="module")
def used(running: Installation) -> tuple[str, Secrets]:
    """A voice enrolled by this installation, opened 200 times and refused 200 times."""
    voice, client = running.voice("2414"), running.client("studio")

    def open_and_be_refused(_: int) -> None:
        client.speak(voice, TEXT, response_format="pcm")
        token = client.token("speak", voice=voice, text=TEXT)
        with pytest.raises(Refused):
            client.call("POST", "/v1/audio/speech", token, json={"input": "Not this.", "voice": voice})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(open_and_be_refused, range(TIMES)))
    return voice, secrets_of(running, voice)


def test_no_process_keeps_the_voice_or_its_key(running: Installation, used: tuple[str, Secrets]) -> None:
    found = scan(running.pids(), used[1].needles)
    assert not found, _told(found)


_HOLDER = "import sys; held = bytes(b ^ 255 for b in sys.stdin.buffer.read(int(sys.argv[1]))); print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize("kind", ["embedding", "conditioning", "key"])
def test_a_planted_copy_is_found(used: tuple[str, Secrets], kind: str) -> None:
    """The positive control: the same scan sees one copy in another process, and sees nothing before it is there."""
    needles: dict[str, bytes] = getattr(used[1], kind)
    for name, value in needles.items():
        argv = [sys.executable, "-c", _HOLDER, str(len(value))]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert not scan([holder.pid], {name: value})
            holder.stdin.write(bytes(byte ^ 255 for byte in value))
            holder.stdin.flush()
            holder.stdout.readline()
            assert [found.needle for found in scan([holder.pid], needles)], name


def test_during_an_opening_the_voice_is_in_the_vault_and_nowhere_else(running: Installation, used: tuple[str, Secrets]) -> None:
    """The scan can see a real opening: while one speaks, its locked buffer is found, in a vault worker's memory only."""
    voice, secrets = used
    client, stop = running.client("studio"), threading.Event()

    def speak() -> None:
        while not stop.is_set():
            client.speak(voice, "This sentence is long enough that somebody can look while it is being spoken, twice over. " * 3)

    speaker = threading.Thread(target=speak)
    speaker.start()
    seen: list[tuple[Found, bool]] = []
    try:
        ends = time.monotonic() + 60
        while not seen and time.monotonic() < ends:
            seen = _copies_now(running, secrets)
            # The module works on a copy for microseconds, and a buffer that ends makes room for another between two looks: what is
            # kept in the open stands there unlocked at every look.
            for _ in range(LOOKS) if not all(locked for _, locked in seen) else ():
                open_then = {(copy.pid, copy.address) for copy, locked in _copies_now(running, secrets) if not locked}
                seen = [(copy, locked or (copy.pid, copy.address) not in open_then) for copy, locked in seen]
        elsewhere = scan([pid for pid in running.pids() if pid not in running.pid_of("service.vault")], secrets.needles)
    finally:
        stop.set()
        speaker.join()
    assert seen, "no opening was seen: the scan would miss a breach"
    assert not elsewhere, _told(elsewhere)
    assert all(locked for _, locked in seen), _told([copy for copy, locked in seen if not locked])


def _copies_now(running: Installation, secrets: Secrets) -> list[tuple[Found, bool]]:
    """Each copy of the voice in a vault's memory, and whether it is locked; without those whose mapping is gone already."""
    copies = scan(running.pid_of("service.vault"), secrets.embedding | secrets.conditioning)
    flags = [(copy, _is_locked(copy.pid, copy.address)) for copy in copies]
    return [(copy, locked) for copy, locked in flags if locked is not None]


def _is_locked(pid: int, address: int) -> bool | None:
    """Whether the mapping at this address is locked and left out of dumps (`lo` and `dd` in smaps); None: it is gone already."""
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and ":" not in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
            return "lo" in flags and "dd" in flags
    return None


def _told(found: list[Found]) -> str:
    return "\n".join(f"{f.needle} in {f.program[:60]} (pid {f.pid}) at {f.address:#x} {f.mapping}" for f in found[:40])
