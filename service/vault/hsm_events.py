"""What the HSM's circuit breaker did, for the audit log, whenever that can be written.

While the HSM is away nothing can be written there: each entry needs its MAC. And the database may be away as well. So events
wait in memory, in order, with the time at which they happened, and are written as soon as both are there; the process's own
log has each at once. A process that ends before that loses them from the audit log, not from its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from keyvault.database import Database
from keyvault.errors import KeyVaultError
from keyvault.events import KeyEvent, Recorder
from policies.errors import AuditUnavailable
from policies.store import durable

AGAIN_S = 1.0
_END = KeyEvent("")

_log = structlog.get_logger()


class HsmEvents:
    """`hear` events from any thread, at any time; within `writing` they become entries of the audit log."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: queue.SimpleQueue[KeyEvent] = queue.SimpleQueue()
        self._stop = threading.Event()

    def hear(self, event: KeyEvent) -> None:
        """Note an event; returns at once."""
        # In the process's own log no field is called a key (`service/logs.py`): this one is the name of one.
        _log.warning(
            event.action.replace(".", "_"), **{"of" if name == "key" else name: fact for name, fact in event.facts.items()}
        )
        self._waiting.put(replace(event, facts={**event.facts, "happened_at": int(self._clock())}))

    @contextmanager
    def writing(self, database: Database, recorder: Recorder, again_s: float = AGAIN_S) -> Iterator[None]:
        """Write what was heard and what is heard, until the block ends."""
        thread = threading.Thread(target=self._write_all, args=(database, recorder, again_s), name="hsm-events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._waiting.put(_END)
            thread.join()

    def _write_all(self, database: Database, recorder: Recorder, again_s: float) -> None:
        while (event := self._waiting.get()) is not _END:
            while not _written(database, recorder, event):
                if self._stop.wait(again_s):
                    return


def _written(database: Database, recorder: Recorder, event: KeyEvent) -> bool:
    try:
        with durable(database) as transaction:
            recorder.record(transaction, event)
    except (AuditUnavailable, KeyVaultError):
        return False
    return True
