"""Writing one row: whether it was new, whether something of it was another row's, and that the list that only grows has it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from keyvault.database import Transaction
from policies.errors import RowChanged
from policies.tables import authority_change


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
