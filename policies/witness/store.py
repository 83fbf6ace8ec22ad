"""Co-signed checkpoints, append-only: at the log's own site what the witness signed; there what it saw, and what it refused.

Every function works in the caller's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, Index, LargeBinary, Row, Table, Text, func, insert, select

from keyvault.database import Transaction, metadata
from keyvault.records import Field, RecordMac, canonical

cosignature = Table(
    "cosignature",
    metadata,
    Column("place", BigInteger, primary_key=True, autoincrement=False),
    Column("log", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("note", Text, nullable=False),
    Column("line", Text, nullable=False),
    Column("edge", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("mac", LargeBinary, nullable=False),
)
Index("ix_cosignature_log", cosignature.c.log, cosignature.c.place)

_DOMAIN = "cosignature"


@dataclass(frozen=True)
class Witnessed:
    """One checkpoint of a log. `log` is the fingerprint of its key; `edge` are the roots of the complete subtrees, at the witness.

    `line` is the witness's signature as a line of the note; empty for a checkpoint that it refused as a fork, and for the mark
    (without a note, its `edge` the digest of officers' operation) from which they let the log begin anew.
    """

    log: str
    size: int
    note: str
    line: str
    edge: bytes
    created_at: datetime
    place: int = 0
    mac: bytes = b""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What the MAC covers."""
        return (self.place, self.log, self.size, self.note, self.line, self.edge, self.created_at)

    @property
    def refused(self) -> bool:
        """Whether this is evidence of a fork."""
        return bool(self.note) and not self.line


class WitnessStore:
    """The rows, under this site's record MAC."""

    def __init__(self, mac: RecordMac) -> None:
        self._mac = mac

    def hold(self, transaction: Transaction) -> None:
        """Let nobody else add a row until `transaction` ends."""
        number = int.from_bytes(sha256(canonical("witness-lock")).digest()[:8], "big", signed=True)
        transaction.execute(select(func.pg_advisory_xact_lock(number)))

    def newest(self, transaction: Transaction, log: str) -> Witnessed | None:
        """What was co-signed of this log last, or the mark after it; None for a log that is new here. Raises RecordTampered."""
        c = cosignature.c
        wanted = (c.log == log) & ((c.line != "") | (c.note == ""))
        row = transaction.execute(select(cosignature).where(wanted).order_by(c.place.desc()).limit(1)).one_or_none()
        return None if row is None else self._checked(row)

    def refused(self, transaction: Transaction) -> list[Witnessed]:
        """Every fork that is kept here as evidence, oldest first. Raises RecordTampered."""
        c = cosignature.c
        query = select(cosignature).where((c.line == "") & (c.note != "")).order_by(c.place)
        return [self._checked(row) for row in transaction.execute(query)]

    def open_forks(self, transaction: Transaction) -> list[Witnessed]:
        """Those after which officers did not let their log begin anew. Raises RecordTampered."""
        c = cosignature.c
        query = select(c.log, func.max(c.place)).where((c.line == "") & (c.note == "")).group_by(c.log)
        marks = {row[0]: row[1] for row in transaction.execute(query)}
        return [row for row in self.refused(transaction) if row.place > marks.get(row.log, 0)]

    def is_marked(self, transaction: Transaction, log: str, operation: bytes) -> bool:
        """Whether this operation let this log begin anew already."""
        c = cosignature.c
        found = transaction.scalar(select(func.count()).where((c.log == log) & (c.note == "") & (c.edge == operation)))
        return bool(found)

    def logs(self, transaction: Transaction) -> list[str]:
        """The logs that have rows here."""
        return list(transaction.scalars(select(cosignature.c.log).distinct().order_by(cosignature.c.log)))

    def add(self, transaction: Transaction, row: Witnessed) -> None:
        """Append it; `hold` first, or a row of the same place makes the transaction void."""
        last = transaction.scalar(select(func.max(cosignature.c.place)))
        values = {**vars(row), "place": 0 if last is None else int(last) + 1}
        values["mac"] = self._mac.make(_DOMAIN, *Witnessed(**values).fields)
        transaction.execute(insert(cosignature), values)

    def _checked(self, row: Row[Any]) -> Witnessed:
        values = dict(row._mapping)
        found = Witnessed(**values | {"edge": bytes(row.edge), "mac": bytes(row.mac)})
        self._mac.check(found.mac, _DOMAIN, *found.fields)
        return found


def lines(transaction: Transaction, log: str) -> dict[str, str]:
    """The witness's line of every checkpoint of this log, by the note. Whoever reads them checks the signatures, not the MAC."""
    c = cosignature.c
    query = select(c.note, c.line).where((c.log == log) & (c.line != ""))
    return {row.note: row.line for row in transaction.execute(query)}
