"""Officers' requests and the signatures that came, kept durably. Every function works in the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Column, DateTime, ForeignKey, LargeBinary, Table, Text, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from keyvault.database import Transaction, metadata

approval_request = Table(
    "approval_request",
    metadata,
    Column("operation_sha256", LargeBinary, primary_key=True),
    Column("operation", LargeBinary, nullable=False),
    Column("description", LargeBinary, nullable=False),
    Column("filed_at", DateTime(timezone=True), nullable=False),
    Column("done_at", DateTime(timezone=True)),
    Column("outcome", Text, nullable=False),
)
"""`operation` and `description` as exact bytes; the operation's subject is what the description describes."""

approval = Table(
    "approval",
    metadata,
    Column("operation_sha256", LargeBinary, ForeignKey("approval_request.operation_sha256"), primary_key=True),
    Column("person", Text, primary_key=True),
    Column("role", Text, primary_key=True),
    Column("approval", LargeBinary, nullable=False),
    Column("received_at", DateTime(timezone=True), nullable=False),
)
"""Signatures speak for themselves: these rows carry no MAC, and every use checks each signature again. As the table only grows, it
holds as well how a request ended (role `_ENDED`, of nobody): an outcome taken out of its row does not open it again."""

_ENDED = "ended"


@dataclass(frozen=True)
class StoredRequest:
    """A request as it lies, with its signatures. `outcome` is empty while it is open; then it says what ended it."""

    operation: bytes
    description: bytes
    filed_at: datetime
    outcome: str = ""
    approvals: tuple[bytes, ...] = ()


class ApprovalStore:
    """Requests for officers' approval and the signatures that came. Nothing here is believed: whoever reads checks again."""

    def file(self, transaction: Transaction, digest: bytes, request: StoredRequest) -> bool:
        """Insert a request under its operation's digest; False, and nothing is written, if it is there."""
        values = {"operation_sha256": digest} | {name: value for name, value in vars(request).items() if name != "approvals"}
        filed = upsert(approval_request).values(values).on_conflict_do_nothing().returning(approval_request.c.filed_at)
        return transaction.execute(filed).one_or_none() is not None

    def add(self, transaction: Transaction, digest: bytes, person: str, role: str, signed: bytes, at: datetime) -> bool:
        """Insert one person's signature in one role; False, and nothing is written, if this person has signed so."""
        values = {"operation_sha256": digest, "person": person, "role": role, "approval": signed, "received_at": at}
        added = upsert(approval).values(values).on_conflict_do_nothing().returning(approval.c.person)
        return transaction.execute(added).one_or_none() is not None

    def requests(self, transaction: Transaction) -> list[StoredRequest]:
        """Every request ever filed, oldest first, with its signatures."""
        c, order = approval_request.c, (approval.c.role.desc(), approval.c.person)
        signed: dict[bytes, tuple[bytes, ...]] = {}
        outcome: dict[bytes, str] = {}
        for row in transaction.execute(select(approval).order_by(*order)):
            if row.role == _ENDED:
                outcome[row.operation_sha256] = row.approval.decode()
            else:
                signed[row.operation_sha256] = (*signed.get(row.operation_sha256, ()), row.approval)
        rows = transaction.execute(select(approval_request).order_by(c.filed_at, c.operation_sha256))
        found = [(row, row.operation_sha256) for row in rows]
        return [
            StoredRequest(row.operation, row.description, row.filed_at, outcome.get(name, row.outcome), signed.get(name, ()))
            for row, name in found
        ]

    def end(self, transaction: Transaction, digest: bytes, outcome: str, at: datetime) -> bool:
        """Give an open request its outcome; False, and nothing is written, if it has one or is none."""
        still_open = (approval_request.c.operation_sha256 == digest) & approval_request.c.done_at.is_(None)
        ended = update(approval_request).where(still_open).values(done_at=at, outcome=outcome)
        return transaction.execute(ended).rowcount == 1 and self.add(transaction, digest, "", _ENDED, outcome.encode(), at)
