"""The log process: sequences what the vault recorded and signs checkpoints, until it is asked to stop.

The database may go and come back: the sequencer is opened anew, which reads the whole log again before it signs. What is not
mended by waiting (a changed history, a token that signs wrongly or is gone) ends the process with its code.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy import create_engine
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from keyvault.database import Database
from policies.audit.errors import AuditError, LogOccupied
from policies.audit.sequencer import Sequencer
from service.errors import StateFolderRefused

POLL_S = 0.2
"""How long a record waits at most before it is sequenced, while all is well."""
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits after a lost database; the last one is repeated."""
_STOP = frozenset({signal.SIGTERM, signal.SIGINT})

_log = structlog.get_logger()

Wait = Callable[[float], bool]
"""Sleeps that many seconds, or less when asked to stop, and says whether it was."""


@contextmanager
def stopping() -> Iterator[Wait]:
    """Hold SIGTERM and SIGINT back, so that they are taken between steps and never inside one. For the main thread.

    A library's thread, which holds nothing back, may be given the signal instead: it is then noted, and taken at the next wait.
    """
    noted: list[int] = []
    handlers = {number: signal.signal(number, lambda taken, _: noted.append(taken)) for number in _STOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        yield lambda seconds: bool(noted) or signal.sigtimedwait(_STOP, seconds) is not None or bool(noted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def engine(url: str) -> Database:
    """A database whose connections answer within bounded time or fail."""
    options = "-c statement_timeout=60s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s -c synchronous_commit=on"
    return create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args={"connect_timeout": 5, "options": options})


def run(sequencer: Callable[[], Sequencer], wait: Wait, outdated: Callable[[], bool] = lambda: False) -> None:
    """Keep the log going until `wait` says stop; it is opened anew when `outdated` says that another key is to sign.

    Raises AuditDiverged, SigningFailed and the key vault's errors. A file that cannot be used at the start is for people to mend
    (StateFolderRefused); later, its disk may be full for a while.
    """
    failures, opened = 0, False
    while True:
        try:
            with sequencer() as writer:
                _log.info("log_opened", size=writer.size)
                opened = True
                while True:
                    pause = _step(writer)
                    failures = 0
                    if wait(pause):
                        _log.info("log_closed", size=writer.size)
                        return
                    if outdated():
                        break
        except (OperationalError, InterfaceError, LogOccupied, OSError) as error:
            if isinstance(error, OSError) and not opened:
                raise StateFolderRefused(_cause(error)) from error
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            _log.warning("log_interrupted", cause=_cause(error), retry_s=pause)
        except AuditError as error:
            _log.error("log_refused", code=error.code, detail=error.detail)
            raise
        if wait(pause):
            return


def _step(writer: Sequencer) -> float:
    """One step; returns how long to wait for the next: not at all while there was something to do."""
    step = writer.step()
    for gap in step.gaps:
        _log.error("audit_gap", code="audit_tampered", row=gap)
    if step.signed:
        _log.debug("checkpoint_signed", size=step.size, added=step.added)
    return 0.0 if step.added else POLL_S


def _cause(error: Exception) -> str:
    """The server's or system's own first line; never a statement or a connection string."""
    original = getattr(error, "orig", None) or error
    return f"{type(original).__name__}: {str(original).strip().splitlines()[0] if str(original).strip() else 'no answer'}"
