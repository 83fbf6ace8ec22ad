"""What a site keeps durably for hsm-sync/1 and for its officers' approvals. Every function works in the caller's transaction.

`sync_state` is one value a site, replaced by compare-and-swap; certificates and evidence are only ever added. A batch is what
one site sends the other: wrapped keys or tombstones, and the receipts that both signed over them.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, ForeignKey, LargeBinary, Table, Text, Uuid

from keyvault.database import metadata

sync_state = Table(
    "sync_state",
    metadata,
    Column("site", Text, primary_key=True),
    Column("state", LargeBinary, nullable=False),
    Column("mac", LargeBinary, nullable=False),
)

sync_certificate = Table(
    "sync_certificate",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("certificate", LargeBinary, nullable=False),
)

sync_evidence = Table(
    "sync_evidence",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("site", Text, nullable=False),
    Column("evidence", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

sync_batch = Table(
    "sync_batch",
    metadata,
    Column("batch", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("records", LargeBinary, nullable=False),
    Column("own_receipt", LargeBinary),
    Column("peer_receipt", LargeBinary),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("mac", LargeBinary, nullable=False),
)

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
"""Signatures speak for themselves: these rows carry no MAC, and every use checks each signature again."""

key_schedule = Table(
    "key_schedule",
    metadata,
    Column("name", Text, primary_key=True),
    Column("plan", LargeBinary, nullable=False),
    Column("last_run_at", DateTime(timezone=True)),
    Column("last_reminder_at", DateTime(timezone=True)),
    Column("mac", LargeBinary, nullable=False),
)
"""`plan` is canonical JSON; the MAC covers every column."""
