"""What it would cost to hand each opening to a thread of its own, so that a caller could stop waiting for a call that hangs.

`python -m bench.hsm_hand_over FOLDER`: makes a token in FOLDER, then times openings through our door called directly, with one
hand-over an opening, and with one hand-over a call (what time-outs of single calls would need). Figures are ratios of processor
time, which other work on the machine changes little.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyvault import ceremony, softhsm
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig

MASTER, ROUNDS, REPEATS = RingMaster("main", 1), 300, 15


class Thread:
    """One thread that calls what it is handed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            function, done, answer = self._work.get()
            answer.append(function())
            done.release()

    def call(self, function: Callable[[], Any]) -> Any:
        done, answer = threading.Lock(), []
        done.acquire()
        self._work.put((function, done, answer))
        done.acquire(timeout=60.0)
        return answer[0]


def main(folder: Path) -> None:
    module = softhsm.find_module()
    serial = softhsm.make_token(module, folder, "bench", "officer-pin", "serving-pin")
    config = TokenConfig(module, "bench", serial, folder)
    ceremony.serving_token(config, "officer-pin", "serving-pin")
    hsm = Pkcs11Hsm.open(config, "serving-pin", expected_masters=(MASTER,))
    with LockedBuffer(1024) as plain, LockedBuffer(1024) as target:
        plain.view(0, 1024)[:] = 7
        with hsm.new_dek(MASTER) as dek:
            wrapped, sealed = dek.wrapped, dek.seal(plain, 1024, b"")
        thread = Thread()

        def direct() -> None:
            with hsm.open_dek(MASTER, wrapped) as dek:
                dek.open_into(sealed, b"", target)

        def by_call() -> None:
            opening = hsm.open_dek(MASTER, wrapped)
            dek = thread.call(opening.__enter__)
            thread.call(lambda: dek.open_into(sealed, b"", target))
            thread.call(lambda: opening.__exit__(None, None, None))

        ways = {"direct": direct, "one hand-over an opening": lambda: thread.call(direct), "one a call": by_call}
        caller = Thread()  # as a request's: not the process's first thread, whose memory is another
        rounds = [
            {name: caller.call(lambda way=way: _seconds(way)) for name, way in ways.items()} for _ in range(REPEATS)
        ]  # in turns: load falls on all
    for name in ways:
        best = min(seconds[name] for seconds in rounds)
        print(f"{name}: {best / min(seconds['direct'] for seconds in rounds):.2f} x direct ({best / ROUNDS * 1e6:.0f} us)")
    hsm.close()


def _seconds(way: Callable[[], Any]) -> float:
    began = time.process_time()
    for _ in range(ROUNDS):
        way()
    return time.process_time() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]))
