"""What stays in memory: plaintext in the one buffer while it is open, nothing of it nor of the DEK afterwards.

Scanned from outside, in the process that holds the token, SoftHSM's own heap included. The plaintext is made inside that
process from a seed, and the DEK's bytes come from PIN and files, so that the search itself plants nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hsm_fixtures import USER_PIN, ServingToken
from memory_scan import needles_of, scan
from softhsm_files import dek_bytes

from keyvault.errors import SealBroken, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig

MASTER = RingMaster("main", 1)
SEED, NUMBERS = 20_260_102, 512
OPENINGS = 200


def numbers_into(target: npt.NDArray[np.float32]) -> None:
    np.random.default_rng(SEED).random(dtype=np.float32, out=target)


def holder(pipe: Connection, config: TokenConfig) -> None:
    """The process under scan: does what it is told, says when it has, and keeps nothing."""
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))
    with LockedBuffer(4 * NUMBERS) as buffer:
        while True:
            command, *arguments = pipe.recv()
            if command == "seal":
                numbers_into(buffer.array(NUMBERS))
                with hsm.new_dek(MASTER) as dek:
                    answer: Any = (dek.wrapped, dek.seal(buffer, buffer.size, b"aad"))
                buffer.wipe()
                pipe.send(answer)
            elif command == "open":
                workers = [Thread(target=open_and_refuse, args=(hsm, *arguments)) for _ in range(4)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                pipe.send("done")
            elif command == "hold":
                wrapped, sealed = arguments
                with hsm.open_dek(MASTER, wrapped) as dek:
                    pipe.send(dek.open_into(sealed, b"aad", buffer))
                    pipe.recv()
                buffer.wipe()
                pipe.send("wiped")
            elif command == "plant":
                planted = bytearray(arguments[0])  # the positive control: a copy that somebody forgot
                pipe.send(len(planted))
                pipe.recv()
                return


def open_and_refuse(hsm: Pkcs11Hsm, wrapped: bytes, sealed: bytes) -> None:
    with LockedBuffer(4 * NUMBERS) as target:
        for _ in range(OPENINGS // 4):
            with hsm.open_dek(MASTER, wrapped) as dek:
                dek.open_into(sealed, b"aad", target)
                target.wipe()
                with contextlib.suppress(SealBroken):
                    dek.open_into(sealed, b"another", target)
            with contextlib.suppress(UnwrapRejected), hsm.open_dek(MASTER, wrapped[:-1] + b"?"):
                pass
            hsm.rewrap(wrapped, MASTER, MASTER)


@pytest.fixture
def process(serving_token: ServingToken) -> Iterator[tuple[Any, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = context.Process(target=holder, args=(theirs, serving_token.config), daemon=True)
    started.start()
    yield started, ours
    started.kill()
    started.join()
    ours.close()
    theirs.close()


def ask(pipe: Connection, *command: Any) -> Any:
    pipe.send(command)
    assert pipe.poll(60), "the process under scan did not answer"
    return pipe.recv()


def test_plaintext_and_dek_leave_no_copy(serving_token: ServingToken, process: tuple[Any, Connection]) -> None:
    started, pipe = process
    plaintext = np.empty(NUMBERS, np.float32)
    numbers_into(plaintext)
    runs = needles_of("plaintext", plaintext, count=12)
    numbers = {name: value for name, value in runs.items() if name.endswith("<f4")}  # the key vault knows bytes, no numbers

    wrapped, sealed = ask(pipe, "seal")
    key = dek_bytes(serving_token.folder, USER_PIN, wrapped, MASTER.label)
    secrets = {**numbers, "dek": key, "dek, first half": key[:16], "dek, second half": key[16:]}
    assert scan([started.pid], secrets) == [], "after sealing"

    assert ask(pipe, "open", wrapped, sealed) == "done"
    assert scan([started.pid], secrets) == [], f"after {OPENINGS} openings and {OPENINGS} refusals of each kind"

    assert ask(pipe, "hold", wrapped, sealed) == 4 * NUMBERS
    held = Counter(found.needle for found in scan([started.pid], secrets))
    assert held == dict.fromkeys(numbers, 1), "while open: the one buffer, no copy, no DEK"
    assert ask(pipe, "release") == "wiped"
    assert scan([started.pid], secrets) == [], "after the wipe"

    assert ask(pipe, "plant", key + plaintext.tobytes()) > 0
    found = {found.needle for found in scan([started.pid], secrets)}
    assert found == {*numbers, "dek", "dek, first half", "dek, second half"}, "the scan sees a planted copy"
