"""What a site does by itself: ships new keys, compares itself with the other site, and takes up what a crash or a gap left open.

Each task runs in a thread of its own, over and over. A fault that waiting may mend (the other site away, a database that
restarts) is logged once when it begins and once when it ends; anything else ends the process with its code, and the supervisor
starts it again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from keyvault.errors import KeyVaultError
from policies.errors import PolicyError
from service.errors import own_code
from service.logs import log_uncaught

PUMP_S = 0.2
"""How long a new voice waits at most before its key is sent, while all is well."""
COMPARE_S = 10.0
"""How often the sites compare themselves; also when what was left open is taken up again."""
SHORTEST_S, LONGEST_S = 0.5, 8.0
"""How long a task that failed waits before it tries again, at first and at most."""
_DOUBLINGS = 4  # from the shortest to the longest

_log = structlog.get_logger()


@dataclass(frozen=True)
class Task:
    """`run` says after how many seconds it wants to be called again; after faults that is ever later."""

    name: str
    run: Callable[[], float]


class Stop(threading.Event):
    """Set when the process is to end."""


@contextmanager
def working(tasks: Sequence[Task]) -> Iterator[None]:
    """Keep the tasks going until the block ends; a task at work finishes its turn first."""
    stop = Stop()
    threads = [threading.Thread(target=_repeat, args=(task, stop), name=task.name, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(5.0)


def _pause_after(failures: int) -> float:
    """Seconds until the next try after that many failed ones; the power stays small, however long the fault lasts."""
    return min(SHORTEST_S * 2.0 ** min(failures, _DOUBLINGS), LONGEST_S)


def _repeat(task: Task, stop: Stop) -> None:
    failures, failing = 0, ""
    while True:
        try:
            pause = task.run()
        except (KeyVaultError, PolicyError, SQLAlchemyError) as error:
            known = own_code(error)
            code = known or type(error).__name__
            if code != failing:
                _log.warning("work_interrupted", task=task.name, code=code, said=str(error) if known else "")
            failing, pause = code, _pause_after(failures)
            failures += 1
        except BaseException as error:  # noqa: BLE001 — see below
            # Our own fault, and not for a thread to keep to itself: these are the process's last words.
            log_uncaught(type(error), error, error.__traceback__)
            os._exit(1)
        else:
            if failing:
                _log.info("work_resumed", task=task.name)
            failing, failures = "", 0
        if stop.wait(pause):
            return
