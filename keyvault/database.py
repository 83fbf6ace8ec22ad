"""The door to the database: one place that knows SQLAlchemy's types, so that others can name them.

Statements that a request always runs go out together, in one round trip: `send`. It uses the driver's pipeline, because most
of what a short transaction costs is waiting for answers that nothing depends on yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import ClauseElement, Connection, Engine, MetaData
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""Every table of every package hangs here, so that the migrated schema can be compared with the whole."""

Database = Engine
"""Opens transactions: `with database.begin() as transaction:`."""

Transaction = Connection
"""A connection inside `begin()`. Stores write into the caller's transaction and never commit."""

Statement = tuple[ClauseElement, Mapping[str, Any]]
"""A statement and the values of its bind parameters."""

Rows = list[tuple[Any, ...]]


def send(transaction: Transaction, *statements: Statement, commit: bool = False) -> list[Rows]:
    """Run the statements in order, in one round trip, and COMMIT in the same one if asked; the rows of each, as tuples.

    Each sees what those before it did, and what others had committed when it began. Raises SQLAlchemy's DBAPIError: none of the
    statements then stands, and nothing was committed, unless the connection was lost during the COMMIT itself.
    """
    driver: Any = transaction.connection.driver_connection
    try:
        with driver.pipeline():
            cursors = [_execute(driver, statement, values) for statement, values in statements]
            if commit:
                driver.commit()
        return [cursor.fetchall() if cursor.description else [] for cursor in cursors]
    except transaction.dialect.loaded_dbapi.Error as error:
        if driver.closed:
            transaction.invalidate()
        raise DBAPIError.instance(
            None, None, error, transaction.dialect.loaded_dbapi.Error, hide_parameters=True, dialect=transaction.dialect
        ) from None


def _execute(driver: Any, statement: ClauseElement, values: Mapping[str, Any]) -> Any:
    words, constants = _in_words(statement)
    return driver.execute(words, {**constants, **values})


@lru_cache(maxsize=64)
def _in_words(statement: ClauseElement) -> tuple[str, Mapping[str, Any]]:
    """A statement in the driver's words, and the constants in it. Built once, it is put into words once."""
    compiled = statement.compile(dialect=PGDialect_psycopg())  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    return str(compiled), dict(compiled.params)
