"""Transactions and whose rows they see; and writing one row: whether it was new, and that the list that only grows has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Table, bindparam, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from keyvault.database import Database, Statement, Transaction, see_every_tenant
from policies.authority import Client, ClientState, key_alone
from policies.caller_errors import KeyUsedOtherwise
from policies.errors import AuditUnavailable, RowChanged
from policies.tables import DURABLE, authority_change, client

# Two registrations of one key at once do not see each other's rows: the second waits for the first to commit or not.
_ONE_BY_ONE = select(
    func.pg_advisory_xact_lock(func.hashtextextended("client key " + bindparam("jkt", type_=client.c.jkt.type), 0))
)
_OTHERS_WITH_KEY = select(client.c.cert_sha256).where(client.c.jkt == bindparam("jkt"), client.c.client_id != bindparam("name"))


@contextmanager
def durable(database: Database, tenant: str | None = None) -> Iterator[Transaction]:
    """A transaction that is on disk when the block ends. Raises AuditUnavailable where the database cannot promise that.
    It sees and writes this tenant's rows and no other's: a forgotten WHERE crosses none. Who writes SQL can name another. Without
    one it sees no tenant's rows, but in a process whose work is the whole site's.
    If the connection is lost while it commits, the outcome is unknown: the token may have been used up all the same.
    """
    with deciding(database) as transaction:
        transaction.execute(DURABLE, {"tenant": tenant})
        yield transaction


@contextmanager
def site_wide(database: Database) -> Iterator[Transaction]:
    """The same about all tenants' rows: for what a worker does for the site, or before it knows whose request it is."""
    with durable(database) as transaction:
        see_every_tenant(transaction)
        yield transaction


@contextmanager
def deciding(database: Database) -> Iterator[Transaction]:
    """The same for a transaction that begins with `PolicyStore.open`, which makes it durable in its own first round trip."""
    try:
        with database.begin() as transaction:
            yield transaction
    except (DBAPIError, PoolTimeout) as problem:
        # The driver's message may quote the statement's values: its kind says enough.
        raise AuditUnavailable(type(problem).__name__) from None


def within(tenant: str) -> Statement:
    """The statement that makes a transaction durable, and this tenant's alone."""
    return DURABLE, {"tenant": tenant}


def kept(transaction: Transaction, statement: Any, table: Table) -> object:
    """The row that was written; None for none. Raises RowChanged where something of it must be one row's alone."""
    try:
        return transaction.execute(statement).first()
    except IntegrityError:
        raise RowChanged(f"{table.name}: taken by another row") from None


def list_change(transaction: Transaction, table: Table, key: list[str], row_version: int) -> None:
    """Add to the list that only grows. From the commit on, no older version of this row counts."""
    listed = {"kind": table.name, "key": "/".join(key), "row_version": row_version}
    if not new(transaction, authority_change, listed) and not transaction.scalar(
        select(authority_change.c.row_version).filter_by(**listed)
    ):
        raise RowChanged(f"{table.name}: the database did not keep its change")


def new(transaction: Transaction, table: Table, row: dict[str, Any]) -> bool:
    """Insert; False if the row was there. One statement: of two at once, the second waits for the first to commit or not."""
    statement = insert(table).values(row).on_conflict_do_nothing().returning(*table.primary_key.columns)
    return transaction.execute(statement).first() is not None


def require_one_use(transaction: Transaction, row: Client) -> None:
    """A DPoP key is a browser's, which alone says who calls, or stands beside a certificate; never both, once it was either.

    Raises KeyUsedOtherwise. Called before the row is written, in a transaction that sees every tenant's clients. A revoked row may
    always be written: it lets nobody in, and a revocation must arrive.
    """
    if row.state is ClientState.REVOKED:
        return
    transaction.execute(_ONE_BY_ONE, {"jkt": row.jkt})
    others = transaction.scalars(_OTHERS_WITH_KEY, {"jkt": row.jkt, "name": row.client_id})
    if any((cert_sha256 == key_alone(row.jkt)) is not row.browser for cert_sha256 in others):
        raise KeyUsedOtherwise
