"""Forgets used tokens and proofs whose time is over, once a minute, in one thread of the vault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from keyvault.database import Database
from policies.errors import AuditUnavailable
from policies.store import PolicyStore, site_wide

EVERY_S = 60.0

_log = structlog.get_logger()


@contextmanager
def sweeping(database: Database, store: PolicyStore, clock: Callable[[], float], every_s: float = EVERY_S) -> Iterator[None]:
    """Sweep until the block ends. A database that is gone is tried again at the next turn."""
    stop = threading.Event()

    def sweep() -> None:
        while not stop.wait(every_s):
            try:
                with site_wide(database) as transaction:
                    store.purge(transaction, clock())
            except AuditUnavailable:
                _log.warning("sweep_failed")

    thread = threading.Thread(target=sweep, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
