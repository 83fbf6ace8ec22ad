"""Promise 2, looked at from outside: in the memory of a process that enrolled, opened and compared, no voice is left.

The positive controls are in the same scans: while a voice is open its one buffer is found, and planted copies are found too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy
from hsm_fixtures import ServingToken
from memory_scan import Found, scan
from sound import flac, samples
from vault import SpectrumConditioner

from voiceprints.activity import Activity
from voiceprints.embedding import SIZE, centre
from voiceprints.encoder import BATCH, Encoder

RUN = 4
Runs = dict[str, np.ndarray]


def runs(name: str, vector: np.ndarray, most: int) -> Runs:
    """Runs of four numbers above zero, from all over the vector: a rectified vector has few longer ones."""
    starts = [at for at in range(len(vector) - RUN + 1) if (vector[at : at + RUN] > 0).all()]
    assert len(starts) >= most
    return {f"{name}[{starts[at]}]": vector[starts[at] :][:RUN] for at in np.linspace(0, len(starts) - 1, most).astype(int)}


def needles(found: Runs, kinds: Sequence[str] = ("<f2", "<f4", "<f8")) -> dict[str, bytes]:
    return {f"{name} {kind}": run.astype(kind).tobytes() for name, run in found.items() for kind in kinds}


def scaled_copies(pid: int, wanted: Runs) -> set[str]:
    """Runs that stand in writable memory, multiplied by any one number: what a network holds before it makes unit vectors."""
    found = set()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            if mode.startswith("rw"):
                memory.seek(start)
                block = memory.read(end - start)
                numbers = np.frombuffer(block if block.count(0) < len(block) else b"", np.float32)
                found |= {name for name, run in wanted.items() if _holds_scaled(numbers, run)}
    return found


def _holds_scaled(numbers: np.ndarray, run: np.ndarray) -> bool:
    if len(numbers) < RUN:
        return False
    with np.errstate(all="ignore"):
        likely = np.flatnonzero(np.abs(numbers[1:] * run[0] - numbers[:-1] * run[1]) < 1e-5 * np.abs(numbers[:-1] * run[1]))
        likely = likely[(likely < len(numbers) - RUN) & (numbers[likely] > 1e-12)]
        copies = numbers[likely[:, None] + np.arange(RUN)] / numbers[likely, None]
        return bool((np.abs(copies / (run / run[0]) - 1) < 1e-4).all(axis=1).any())


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    np.save(folder / "enrol0.npy", samples(flac("1998", 0))[:80_000])
    np.save(folder / "enrol1.npy", samples(flac("1998", 1)))
    np.save(folder / "probe.npy", samples(flac("1998", 3)))
    return folder


@pytest.fixture(scope="module")
def secrets(speech: Path, activity: Activity, encoder: Encoder) -> tuple[Runs, Runs]:
    """What must not be found: the stored numbers and the probe's embedding; and the windows of each last batch."""
    vectors: Runs = {}
    last: Runs = {}
    for name, files in (("stored", ("enrol0", "enrol1")), ("probe", ("probe",))):
        parts = [np.load(speech / f"{file}.npy") for file in files]
        kept = [activity.speech(part).only(part) for part in parts]
        windows = encoder.windows(kept, np.zeros)
        embedding = np.zeros(SIZE, dtype=np.float32)
        centre(windows, embedding)
        vectors |= runs(f"{name} embedding", embedding, 2)
        for number in range((len(windows) - 1) // BATCH * BATCH, len(windows)):
            last |= runs(f"{name} window {number}", windows[number], 1)
        if name == "stored":
            colour = np.zeros(48, dtype=np.float32)
            SpectrumConditioner().measure(np.concatenate(kept), colour, np.zeros)
            vectors |= runs("conditioning", colour, 2)
    return vectors, last


class Child:
    """The other process; `tell` waits until it has done as told."""

    def __init__(self, token: ServingToken, url: str, speech: Path) -> None:
        config = token.config
        arguments = [
            config.module,
            config.label,
            config.serial,
            token.folder,
            token.pin,
            token.hsm.masters()[0].version,
            url,
            speech,
        ]
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "forgetting_child.py", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            bufsize=1,
        )

    def tell(self, *lines: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for line in lines:
            self.process.stdin.write(line + "\n")
            assert self.process.stdout.readline() == "done\n"

    def find(self, secrets: dict[str, bytes]) -> list[Found]:
        return scan([self.process.pid], secrets)


@pytest.fixture
def child(serving_token: ServingToken, database: sqlalchemy.Engine, speech: Path) -> Iterator[Child]:
    started = Child(serving_token, database.url.render_as_string(hide_password=False), speech)
    with started.process:
        yield started
        started.process.kill()


@pytest.mark.timeout(300)
def test_no_voice_is_left_after_its_block(child: Child, secrets: tuple[Runs, Runs]):
    vectors, last = secrets
    child.tell("enrol")
    enrolled = {name: run for name, run in last.items() if name.startswith("stored")}
    assert scaled_copies(child.process.pid, enrolled) == set()
    child.tell("open 20", "compare")
    assert child.find(needles(vectors) | needles(last, ["<f4"])) == []

    child.tell("hold")
    held = child.find(needles(vectors))
    assert {found.needle.split("[")[0] for found in held} == {"stored embedding", "conditioning"}
    assert max(found.address for found in held) - min(found.address for found in held) < 2 * 4096

    child.tell("plant <f4", "plant <f8", "plant <f2", "scale 3.7", "release")
    planted = child.find(needles(vectors))
    assert {found.needle.split()[-1] for found in planted} == {"<f2", "<f4", "<f8"}
    assert {found.needle.split("[")[0] for found in planted} == {"stored embedding"}
    child.tell("drop")


@pytest.mark.timeout(300)
def test_a_scaled_copy_would_be_found(child: Child, secrets: tuple[Runs, Runs]):
    stored = {name: run for name, run in secrets[0].items() if name.startswith("stored")}
    child.tell("enrol", "hold", "scale 3.7", "release")
    assert scaled_copies(child.process.pid, stored) == set(stored)
