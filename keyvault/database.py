"""The door to the database: one place that knows SQLAlchemy's types, so that others can name them.

Statements that a request always runs go out together, in one round trip: `send`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from sqlalchemy import ClauseElement, Connection, Engine, MetaData, text
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.exc import DBAPIError

from keyvault.pipeline import Rows as Rows
from keyvault.pipeline import Words, exchange

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


SITE_WIDE = "-c app.scope=site"
"""Connection options of a process whose work is all tenants' (the site process, a re-wrap, a migration). Without them, row-level
security shows a transaction the rows of the tenant that it names, and none before it names one."""

_SITE_WIDE = text("SELECT set_config('app.scope', 'site', true)")


def see_every_tenant(transaction: Transaction) -> None:
    """Until it ends, this one transaction is about all tenants' rows: for what a process that serves tenants does for the site."""
    transaction.execute(_SITE_WIDE)


def send(transaction: Transaction, *statements: Statement, commit: bool = False) -> list[Rows]:
    """Run the statements in order, in one round trip, and COMMIT in the same one if asked; the rows of each, as tuples.

    Each sees what those before it did, and what others had committed when it began. Raises SQLAlchemy's DBAPIError: none of the
    statements then stands, and nothing was committed, unless the connection was lost during the COMMIT itself.
    """
    connection = transaction.connection
    driver: Any = connection.driver_connection
    prepared = connection.info.get("glottis.prepared")
    if prepared is None:
        prepared = connection.info["glottis.prepared"] = set()
        # The driver may not prepare too: after a rollback it drops everything that is prepared, and ours with it.
        driver.execute("DEALLOCATE ALL")
        driver.prepare_threshold = None
    try:
        return exchange(driver, prepared, [(_in_words(statement), values) for statement, values in statements], commit=commit)
    except transaction.dialect.loaded_dbapi.Error as error:
        if driver.closed:
            transaction.invalidate()
        raise DBAPIError.instance(
            None, None, error, transaction.dialect.loaded_dbapi.Error, hide_parameters=True, dialect=transaction.dialect
        ) from None


@lru_cache(maxsize=64)
def _in_words(statement: ClauseElement) -> Words:
    """A statement as the server reads it. Statements are built once, so that each is put into words once."""
    compiled: Any = statement.compile(dialect=PGDialect_asyncpg())  # type: ignore[no-untyped-call]  # writes $1, $2 and casts
    text = str(compiled)
    name = f"glottis-{sha256(text.encode()).hexdigest()[:16]}"
    return Words(name, text, compiled.positiontup or (), compiled.params)
