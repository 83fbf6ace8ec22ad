"""The table of sealed voiceprints. The only file of this package that speaks SQL; it sees sealed bytes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import CheckConstraint, Column, DateTime, Integer, LargeBinary, Table, Text, Uuid, delete, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from keyvault.database import Database, Transaction, metadata
from voiceprints.errors import VoiceprintMissing, VoiceprintsUnavailable


class RowKind(StrEnum):
    """What a row holds, under seal."""

    EMBEDDING = "embedding"
    CONDITIONING = "conditioning"


voiceprint = Table(
    "voiceprint",
    metadata,
    Column("voice_id", Uuid, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("dek_id", Uuid, nullable=False),
    Column("dek_version", Integer, nullable=False),
    Column("model_id", Text, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("kind IN ('embedding', 'conditioning')", name="kind"),
)


@dataclass(frozen=True)
class SealedRow:
    """One row: everything but `sealed` and the time is bound into the seal (see `sealing.py`)."""

    voice_id: UUID
    kind: RowKind
    tenant: str
    dek_id: UUID
    dek_version: int
    model_id: str
    sealed: bytes = field(repr=False)
    created_at: datetime


_WITHIN = text("SELECT set_config('app.tenant', :tenant, true)")


@contextmanager
def reading(database: Database, tenant: str) -> Iterator[Transaction]:
    """A transaction for reading this tenant's rows. Raises VoiceprintsUnavailable where the database does not answer."""
    try:
        with database.begin() as transaction:
            transaction.execute(_WITHIN, {"tenant": tenant})
            yield transaction
    except (DBAPIError, PoolTimeout) as problem:
        # The driver's message may quote the statement's values: its kind says enough.
        raise VoiceprintsUnavailable(type(problem).__name__) from None


class VoiceprintStore:
    """Writes and reads in the caller's transaction."""

    def add(self, transaction: Transaction, rows: Sequence[SealedRow]) -> None:
        """Insert a new voice's rows. Raises VoiceprintsUnavailable if the database did not keep each: then roll back."""
        values = [{**vars(row), "kind": row.kind.value} for row in rows]
        kept = transaction.execute(insert(voiceprint).values(values).returning(voiceprint.c.kind)).all()
        if len(kept) != len(rows):
            raise VoiceprintsUnavailable("the database did not keep every row")

    def rows(self, transaction: Transaction, voice: UUID) -> tuple[SealedRow, ...]:
        """Whatever rows the voice has, by kind."""
        query = select(voiceprint).where(voiceprint.c.voice_id == voice).order_by(voiceprint.c.kind)
        return tuple(SealedRow(**{**row._mapping, "kind": RowKind(row.kind)}) for row in transaction.execute(query))

    def replace(self, transaction: Transaction, voice: UUID, rows: Sequence[SealedRow]) -> None:
        """Put `rows` in the place of whatever rows the voice has; none removes them. Raises VoiceprintsUnavailable as `add`."""
        transaction.execute(delete(voiceprint).where(voiceprint.c.voice_id == voice))
        if rows:
            self.add(transaction, rows)

    def load(self, transaction: Transaction, tenant: str, voice: UUID) -> tuple[SealedRow, SealedRow]:
        """The voice's embedding and conditioning, in one query. Raises VoiceprintMissing unless both are there."""
        query = select(voiceprint).where(voiceprint.c.voice_id == voice, voiceprint.c.tenant == tenant)
        found = {row.kind: SealedRow(**{**row._mapping, "kind": RowKind(row.kind)}) for row in transaction.execute(query)}
        if set(found) != set(RowKind):
            raise VoiceprintMissing
        return found[RowKind.EMBEDDING], found[RowKind.CONDITIONING]
