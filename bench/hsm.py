"""What our door costs to open a voice in the token, against the same steps without it in the same run.

    python -m bench.hsm [--quick]

One JSON object a line. One open is: check the record's MAC in the token, unwrap the voice's key under its master, decrypt
1 KB, destroy the key. No key is kept between two opens. Ours is `VoiceKeys.open`, from the row as stored to the plaintext in
a locked buffer. Its measure is `bench/plain_token.py`: plain ctypes with every buffer made beforehand. Both run in turn for
short spells on one SoftHSM module in one process, so that a busy machine slows both; the figure is the median spell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pkcs11
from pkcs11 import Attribute as A

from bench.lines import report_share
from bench.plain_token import LibraryCalls, Opening, PlainCalls
from bench.rewrap import QUICK_ROWS, ROWS, measure_rewrapping
from keyvault import ceremony, softhsm
from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.hsm import RingMaster, Sealed
from keyvault.keys import FoundKey, VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from keyvault.records import KeyRef, RecordMac, WrappedKey, canonical
from keyvault.states import KeyState
from keyvault.store import KeyStore

GOAL, THREADS = 0.8, (1, 8)
SPELL_S, SPELLS, QUICK_SPELLS = 0.2, 80, 20
MASTER, PIN, SO_PIN = RingMaster("main", 1), "bench-user", "bench-officer"
SIZE, AAD = 1024, b"tenant|voice|embedding|key|1|model".ljust(90, b".")


class Unrecorded:
    """Where events would go; opening emits none."""

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        raise ValueError(f"opening recorded {event.action} in {transaction}")


def make_token(folder: Path) -> TokenConfig:
    """A serving token. For a process of its own."""
    module = softhsm.find_module()
    config = TokenConfig(module, "bench", softhsm.make_token(module, folder, "bench", SO_PIN, PIN), folder, max(THREADS))
    ceremony.serving_token(config, SO_PIN, PIN)
    return config


@contextmanager
def serving() -> Iterator[tuple[Pkcs11Hsm, TokenConfig]]:
    """A token in a temporary folder, open; gone afterwards."""
    base = Path(tempfile.mkdtemp(prefix="glottis-bench-"))
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            config = pool.submit(make_token, base / "token").result()
        hsm = Pkcs11Hsm.open(config, PIN, expected_masters=(MASTER,))
        yield hsm, config
        hsm.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


class Open:
    """One voice's row as the store keeps it, and what one thread needs to open it each of the three ways."""

    def __init__(self, hsm: Pkcs11Hsm, config: TokenConfig) -> None:
        self._hsm, self._config, mac = hsm, config, RecordMac(hsm)
        self._keys = VoiceKeys(hsm, KeyStore(), Unrecorded(), mac)
        with LockedBuffer(SIZE) as plain, hsm.new_dek(MASTER) as dek:
            plain.view(0, SIZE)[:] = 7
            sealed, blob = dek.seal(plain, SIZE, AAD), dek.wrapped
        ref = KeyRef(uuid4(), 1, MASTER.ring, MASTER.version)
        key = WrappedKey(ref, "bench", uuid4(), KeyState.ACTIVE, blob, datetime.now(UTC), MASTER.version)
        self._sealed = sealed
        self._key = FoundKey.of(replace(key, mac=mac.make(WrappedKey.DOMAIN, *key.fields)), KeyState.ACTIVE)
        record = canonical(WrappedKey.DOMAIN, *key.fields)
        self._row = {"sealed": sealed, "aad": AAD, "record": record, "mac": self._key.mac, "blob": blob}
        self._token = pkcs11.lib(str(config.module)).get_token(token_label=config.label)

    def ours(self) -> Callable[[], None]:
        target, keys, key, sealed = LockedBuffer(SIZE), self._keys, self._key, self._sealed

        def once() -> None:
            keys.open(key, [Sealed(sealed, AAD, target)], _permitted)

        return once

    def plain(self) -> Callable[[], None]:
        return PlainCalls(str(self._config.module), self._what())

    def python_pkcs11(self) -> Callable[[], None]:
        return LibraryCalls(self._what())

    def _what(self) -> Opening:
        session = self._token.open(rw=True)  # the process is logged in, and so is every session of it
        mac, master = (self._found(session, label) for label in ("record-mac", MASTER.label))
        return Opening(session, mac, master, self._row)

    def _found(self, session: Any, label: str) -> Any:
        (found,) = session.get_objects({A.LABEL: label})
        return found


def _permitted() -> None:
    """What a caller checks at the last moment; here nothing stands against it."""


def spell(runs: Sequence[Callable[[], None]], seconds: float) -> float:
    """Runs a second of all threads together, each with its own of `runs`."""
    counts, gate = [0] * len(runs), threading.Barrier(len(runs) + 1)

    def work(place: int, run: Callable[[], None]) -> None:
        run()
        gate.wait()
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            run()
            count += 1
        counts[place] = count

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(runs)]
    for thread in threads:
        thread.start()
    gate.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def opens_in_turn(spells: int, *ways: Sequence[Callable[[], None]]) -> list[float]:
    """The medians of each way's spells, taken in turn."""
    found = [[spell(way, SPELL_S) for way in ways] for _ in range(spells)]
    return [statistics.median(rates) for rates in zip(*found, strict=True)]


def measure_opening(hsm: Pkcs11Hsm, config: TokenConfig, spells: int) -> None:
    """Our door and python-pkcs11 against plain calls, at one thread and at eight."""
    voice = Open(hsm, config)
    for threads in THREADS:
        made = ([make() for _ in range(threads)] for make in (voice.ours, voice.plain, voice.python_pkcs11))
        ours, plain, as_it_comes = opens_in_turn(spells, *made)
        report_share(f"hsm.open.{threads}_threads", ours, "opens/s", plain, GOAL)
        report_share(f"hsm.open.{threads}_threads.python_pkcs11", as_it_comes, "opens/s", plain, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SPELLS} spells of each instead of {SPELLS}")
    chosen = parser.parse_args()
    spells = QUICK_SPELLS if chosen.quick else SPELLS
    with serving() as (hsm, config):
        measure_opening(hsm, config, spells)
    measure_rewrapping(QUICK_ROWS if chosen.quick else ROWS)


if __name__ == "__main__":
    main()
