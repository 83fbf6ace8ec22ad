"""Writing one row: whether it was new, whether something of it was another row's, and that the list that only grows has it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, bindparam, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from keyvault.database import Transaction
from policies.authority import Client, ClientState, key_alone
from policies.caller_errors import KeyUsedOtherwise
from policies.errors import RowChanged
from policies.tables import authority_change, client

# Two registrations of one key at once do not see each other's rows: the second waits for the first to commit or not.
_ONE_BY_ONE = select(
    func.pg_advisory_xact_lock(func.hashtextextended("client key " + bindparam("jkt", type_=client.c.jkt.type), 0))
)
_OTHERS_WITH_KEY = select(client.c.cert_sha256).where(client.c.jkt == bindparam("jkt"), client.c.client_id != bindparam("name"))


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
