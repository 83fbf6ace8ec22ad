"""Several statements in one round trip, over libpq's pipeline mode, for the few transactions that every request pays for.

The driver's own pipeline looks for answers after each statement and describes every column, which costs more than the
statements do. Here all of them leave in one piece, each prepared once a connection. Source: libpq, "Pipeline Mode".
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import Connection, errors
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

Rows = list[tuple[Any, ...]]

_GOOD = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


class Words:
    """One statement as the server reads it, with `$1` and so on, and the names of its parameters in that order."""

    def __init__(self, name: str, text: str, parameters: Sequence[str], constants: Mapping[str, Any]) -> None:
        self.name, self.text = name.encode(), text.encode()
        self._parameters, self._constants = tuple(parameters), dict(constants)

    def encoded(self, values: Mapping[str, Any]) -> tuple[list[bytes | None], list[int]]:
        """The parameters and their formats: bytes go in binary, all else as text."""
        given = [values[name] if name in values else self._constants[name] for name in self._parameters]
        return [_encoded(value) for value in given], [int(isinstance(value, bytes)) for value in given]


def exchange(
    driver: Connection[Any], prepared: set[bytes], statements: Sequence[tuple[Words, Mapping[str, Any]]], *, commit: bool
) -> list[Rows]:
    """Send BEGIN if no transaction is open, the statements, and COMMIT if asked; the rows of each statement.

    `prepared`: names of the statements that this connection knows, kept by the caller. Raises psycopg.Error: the server ran
    nothing after the statement that failed, and the transaction is to be rolled back; the driver is closed if it is lost.
    """
    link = driver.pgconn
    begins = link.transaction_status == TransactionStatus.IDLE
    new = [words for words, _ in statements if words.name not in prepared]
    commands = [(words.name, *words.encoded(values)) for words, values in statements]
    try:
        link.enter_pipeline_mode()
        if begins:
            link.send_query_params(b"BEGIN", None)
        for words in new:
            link.send_prepare(words.name, words.text)
        for command in commands:
            link.send_query_prepared(*command)
        if commit:
            link.send_query_params(b"COMMIT", None)
        link.pipeline_sync()
        results = _results(link)
        link.exit_pipeline_mode()
    except BaseException:
        driver.close()  # half an exchange cannot be gone on with
        raise
    preparing, running = results[begins : begins + len(new)], results[begins + len(new) :]
    prepared |= {words.name for words, result in zip(new, preparing, strict=True) if result.status in _GOOD}
    for result in results:
        if result.status not in _GOOD:
            raise errors.error_from_result(result)
    return [_rows(driver, result) for result in running[: len(statements)]]


def _results(link: PGconn) -> list[PGresult]:
    """What the server says to each command, up to the end of the pipeline. Other threads run while it is waited for."""
    results: list[PGresult] = []
    poller = select.poll()
    poller.register(link.socket, select.POLLIN)
    unsent = link.flush()
    while True:
        while unsent or link.is_busy():
            poller.modify(link.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            poller.poll()
            link.consume_input()
            unsent = link.flush()
        result = link.get_result()
        if result is not None:  # each command's results end with none
            if result.status == ExecStatus.PIPELINE_SYNC:
                return results
            results.append(result)


def _rows(driver: Connection[Any], result: PGresult) -> Rows:
    if not result.ntuples:
        return []
    loading = Transformer(driver)
    loading.set_pgresult(result)
    return loading.load_rows(0, result.ntuples, tuple)


def _encoded(value: Any) -> bytes | None:
    match value:
        case None | bytes():
            return value
        case str():
            return value.encode()
        case int() | UUID():
            return str(value).encode()
        case datetime():
            return value.isoformat().encode()
        case _:
            raise TypeError(f"no way to send a {type(value).__name__}")
