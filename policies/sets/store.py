"""The activations of sets of policies: a table that only grows, each row under the record MAC, and the only SQL about it.

An activation is also in the list of authority rows' newest versions, which every decision reads: a row that is taken away or put
back is noticed by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, CheckConstraint, Column, DateTime, Integer, LargeBinary, Row, Table, func, select
from sqlalchemy.dialects.postgresql import insert

from keyvault.database import Transaction, metadata
from keyvault.errors import RecordTampered, RowChanged
from keyvault.records import Field, RecordMac, canonical
from policies.errors import PolicySetTampered
from policies.tables import ACTIVATION, ACTIVE, authority_change

policy_activation = Table(
    ACTIVATION,
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("policies", LargeBinary, nullable=False),
    Column("before_sha256", LargeBinary, nullable=False),
    Column("operation", LargeBinary, nullable=False),
    Column("approvals", ARRAY(LargeBinary), nullable=False),
    Column("roster", LargeBinary, nullable=False),
    Column("activated_at", DateTime(timezone=True), nullable=False),
    Column("mac", LargeBinary, nullable=False),
    CheckConstraint("version >= 1", name="version"),
    CheckConstraint("octet_length(mac) = 16", name="mac"),
)


@dataclass(frozen=True)
class Activation:
    """One activation as stored: the set's exact bytes, what was signed, by whom, and the roster that they were officers of."""

    version: int
    policies: bytes
    before_sha256: bytes
    operation: bytes
    approvals: tuple[bytes, ...]
    roster: bytes
    activated_at: datetime

    @property
    def fields(self) -> tuple[Field, ...]:
        """What the MAC covers: every column."""
        signed = canonical("list", *self.approvals)
        return (self.version, self.policies, self.before_sha256, self.operation, signed, self.roster, self.activated_at)


class ActivationStore:
    """Reads and writes activations in the caller's transaction."""

    def __init__(self, mac: RecordMac) -> None:
        self._mac = mac

    def newest(self, transaction: Transaction) -> int:
        """The newest version that was ever activated, by the list that only grows; 0 for none."""
        listed = select(func.coalesce(func.max(authority_change.c.row_version), 0))
        found = transaction.scalar(listed.where(authority_change.c.kind == ACTIVATION, authority_change.c.key == ACTIVE))
        return int(found or 0)

    def activation(self, transaction: Transaction, version: int) -> Activation:
        """This one. Raises PolicySetTampered where it is gone or does not carry its MAC."""
        row = transaction.execute(select(policy_activation).where(policy_activation.c.version == version)).one_or_none()
        if row is None:
            raise PolicySetTampered(f"activation {version} is listed and is not there")
        return self._read(row)

    def activations(self, transaction: Transaction) -> Sequence[Activation]:
        """Every one, oldest first. Raises PolicySetTampered."""
        return [self._read(row) for row in transaction.execute(select(policy_activation).order_by(policy_activation.c.version))]

    def activate(self, transaction: Transaction, activation: Activation) -> None:
        """Write it: from the commit on every decision is made by it. Raises RowChanged where it does not come next."""
        if activation.version != self.newest(transaction) + 1:
            raise RowChanged(f"version {activation.version} of the policies does not come next")
        row = vars(activation) | {"approvals": list(activation.approvals), "mac": self._mac.make(ACTIVATION, *activation.fields)}
        listed = {"kind": ACTIVATION, "key": ACTIVE, "row_version": activation.version}
        for table, values in ((policy_activation, row), (authority_change, listed)):
            written: Any = insert(table).values(values).on_conflict_do_nothing().returning(*table.primary_key.columns)
            if transaction.execute(written).first() is None:
                raise RowChanged(f"version {activation.version} of the policies was activated by another process")

    def _read(self, row: Row[Any]) -> Activation:
        held = tuple(bytes(one) for one in row.approvals)
        blobs = (bytes(row.policies), bytes(row.before_sha256), bytes(row.operation))
        found = Activation(row.version, *blobs, held, bytes(row.roster), row.activated_at)
        try:
            self._mac.check(bytes(row.mac), ACTIVATION, *found.fields)
        except RecordTampered as error:
            raise PolicySetTampered(f"activation {row.version} does not carry its MAC") from error
        return found
