"""The audit log's tables, the statements that append to them (each gives back what was written), and where workers stand."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    FromClause,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    and_,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
    true,
)
from sqlalchemy.types import UserDefinedType

from keyvault.database import metadata


def _recorded(name: str, key: Column[UUID]) -> Table:
    return Table(
        name,
        metadata,
        key,
        Column("worker", Text, nullable=False),
        Column("counter", BigInteger, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("mac", LargeBinary, nullable=False),
        CheckConstraint("octet_length(mac) = 16", name="mac"),
        UniqueConstraint("worker", "counter"),
    )


def _intent_key() -> Column[UUID]:
    return Column("intent_id", Uuid, ForeignKey("intent.intent_id"), primary_key=True)


intents = _recorded("intent", Column("intent_id", Uuid, primary_key=True))
completions = _recorded("completion", _intent_key())
details = Table("detail", metadata, _intent_key(), Column("sealed", LargeBinary, nullable=False))
leaves = Table(
    "leaf",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("ref", Uuid, nullable=False),
    Column("entry", LargeBinary, nullable=False),
    CheckConstraint("seq >= 0", name="seq"),
    CheckConstraint("kind IN ('intent', 'completion')", name="kind"),
    UniqueConstraint("kind", "ref"),
)
checkpoints = Table(
    "checkpoint",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("note", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("size >= 0", name="size"),
)
RECORDED = {"intent": intents, "completion": completions}
"""The tables whose rows become leaves, by kind."""

# Built once: the gate runs these for every request, and putting them together costs as much as running them.
TAKE_LOCK = select(func.pg_advisory_xact_lock(bindparam("lock", type_=BigInteger)))


class _Xid8(UserDefinedType[str]):
    """Postgres' transaction number that never comes again."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


_XID = cast(func.pg_catalog.pg_current_xact_id(), Text).label("xid")
_OF_XID = bindparam("of_xid", type_=Text)
_FATE = func.pg_catalog.pg_xact_status(cast(_OF_XID, _Xid8)).label("fate")
LAST = {
    kind: select(func.max(t.c.counter).label("last"), _OF_XID.label("asked"), _FATE, _XID).where(
        t.c.worker == bindparam("of_worker")
    )
    for kind, t in RECORDED.items()
}
"""A worker's highest counter, the fate of its transaction `of_xid`, and the number of this transaction."""
_WHOLE = {t: insert(t).values({column.name: bindparam(column.name) for column in t.c}) for t in (intents, completions, details)}
_WRITTEN = {t: statement.returning(*t.c).cte(f"{t.name}_written") for t, statement in _WHOLE.items()}


def _write(whole: Table, *more: Table) -> Select[Any]:
    """One statement that inserts a row, with more of the same intent (a foreign key is checked when it ends), and fails, dividing
    by zero, unless the database kept each as it was given: a trigger that drops or changes one ends the transaction."""
    rows = [_WRITTEN[table] for table in (whole, *more)]
    columns = [*rows[0].c, *(row.c[name] for row in rows[1:] for name in row.c.keys() if name != "intent_id")]  # noqa: SIM118
    kept = and_(*(column == bindparam(column.name, type_=column.type) for column in columns))
    source: FromClause = select(literal_column("1").label("one")).subquery("given").outerjoin(rows[0], true())
    for row in rows[1:]:
        source = source.outerjoin(row, row.c.intent_id == rows[0].c.intent_id)
    return select(*columns, (literal_column("1") // cast(kept.is_(true()), Integer)).label("kept")).select_from(source)


WRITE: dict[str, Select[Any]] = {"intent": _write(intents, details), "completion": _write(completions)}
"""What writes a record of each kind, and gives back the whole row."""


def _newest(table: Table) -> Select[str, int]:
    """Each worker and its highest counter, by one index probe a worker instead of a walk through the table."""
    first = select(func.min(table.c.worker).label("worker")).cte(recursive=True)
    following = select(func.min(table.c.worker)).where(table.c.worker > first.c.worker).scalar_subquery()
    workers = first.union_all(select(following).where(first.c.worker.is_not(None)))
    last = select(func.max(table.c.counter)).where(table.c.worker == workers.c.worker).scalar_subquery()
    return select(workers.c.worker, last).where(workers.c.worker.is_not(None)).order_by(workers.c.worker)


NEWEST = {kind: _newest(table) for kind, table in RECORDED.items()}
"""What finds each worker's highest counter, by kind."""
