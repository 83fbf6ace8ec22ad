"""The list of clients', consents' and voices' rows that the other site has not confirmed: written with the row itself, and
shortened when the other site has it.

What the list says is no authority: who writes the database can delay a row's journey, or have it sent once more, and that is
all. `note_differing` finds what a shortened list would have hidden, whenever the sites compare themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table, Text, and_, bindparam, cast, delete, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from keyvault.database import Transaction
from policies.tables import authority_change, authority_unsent, client, consent, voice

TABLES: Mapping[str, tuple[Table, str]] = {
    client.name: (client, "client_id"),
    consent.name: (consent, "consent_id"),
    voice.name: (voice, "voice_id"),
}
"""What travels by itself, in the order in which it is sent, with the name of its key."""
_first = insert(authority_unsent)
_NOTE = _first.on_conflict_do_update(
    index_elements=["kind", "key"],
    set_={"row_version": func.greatest(_first.excluded.row_version, authority_unsent.c.row_version)},
)
_c = authority_unsent.c
_SENT = delete(authority_unsent).where(
    _c.kind == bindparam("its_kind"), _c.key == bindparam("its_key"), _c.row_version == bindparam("its_version")
)


@dataclass(frozen=True, order=True)
class Unsent:
    """One row on the list: of which kind, under which key, and the version that the other site lacks."""

    kind: str
    key: str
    row_version: int = 0


BEGINNING = Unsent("", "")
"""Before every row of the list."""


def note(transaction: Transaction, kind: str, key: str, row_version: int) -> None:
    """Put a row on the list, in the transaction that wrote it."""
    transaction.execute(_NOTE, {"kind": kind, "key": key, "row_version": row_version})


def waiting(transaction: Transaction, after: Unsent, most: int) -> list[Unsent]:
    """The next rows on the list, clients first: nothing is as urgent as that somebody may no longer call."""
    order = (_c.kind.collate("C"), _c.key.collate("C"))  # as the message is sorted, whatever this database's language is
    above = tuple_(*order) > tuple_(after.kind, after.key)
    rows = transaction.execute(select(_c.kind, _c.key, _c.row_version).where(above).order_by(*order).limit(most))
    return [Unsent(*row) for row in rows]


def sent(transaction: Transaction, rows: Sequence[Unsent]) -> None:
    """The other site has these; one that was written again meanwhile stays on the list."""
    if rows:
        named = [{"its_kind": row.kind, "its_key": row.key, "its_version": row.row_version} for row in rows]
        transaction.execute(_SENT, named)


def newest(transaction: Transaction, kind: str, key: str) -> int:
    """The newest version of this row that was ever written here, by the list that only grows; 0 where none was changed."""
    listed = and_(authority_change.c.kind == kind, authority_change.c.key == key)
    return int(transaction.scalar(select(func.coalesce(func.max(authority_change.c.row_version), 0)).where(listed)) or 0)


def digests(transaction: Transaction) -> dict[str, str]:
    """Of each kind, how many rows there are and a digest of which, in which versions and states, whatever their order."""
    return {kind: _digest(transaction, table, key) for kind, (table, key) in TABLES.items()}


def note_differing(transaction: Transaction, theirs: Mapping[str, str]) -> list[str]:
    """Put every row of each kind on the list whose digest at the other site is another; returns those kinds."""
    mine = digests(transaction)
    kinds = [kind for kind, digest in mine.items() if theirs.get(kind) != digest]
    for kind in kinds:
        table, key = TABLES[kind]
        every: Any = select(literal(kind, Text), cast(table.c[key], Text), table.c.row_version)
        names = ["kind", "key", "row_version"]
        transaction.execute(insert(authority_unsent).from_select(names, every).on_conflict_do_nothing())
    return kinds


def _digest(transaction: Transaction, table: Table, key: str) -> str:
    row = cast(table.c[key], Text) + "/" + table.c.state
    count, mixed = transaction.execute(
        select(func.count(), func.bit_xor(func.hashtextextended(row, table.c.row_version))).select_from(table)
    ).one()
    return f"{count} {mixed}"
