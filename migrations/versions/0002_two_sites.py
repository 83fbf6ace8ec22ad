"""Key states with reasons, erasure in two stages, the second site's receipts, officers' approvals.

The record MACs of wrapped keys and ring versions cover the new columns, and no migration can renew a MAC: the key is in the
token. No version with the old columns was released, so a database that holds keys already is refused.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


MAC_BYTES = 16
APPEND_ONLY = ("sync_certificate", "sync_evidence", "approval")


def _mac() -> tuple[sa.Column, sa.CheckConstraint]:
    return _column("mac", sa.LargeBinary), sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac")


def _column(name: str, kind: Any) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def _time(name: str = "created_at", *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM wrapped_key)")):
        raise RuntimeError("this database holds keys of a version before the first release: begin with an empty one")
    op.execute("DELETE FROM ring_version")  # written anew at the next start, from the token
    _keys()
    _sync()
    _approvals()
    for table in APPEND_ONLY:  # the function is of the foundation
        op.execute(f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION append_only()")
        op.execute(f"CREATE TRIGGER append_only_whole BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION append_only()")


def downgrade() -> None:
    raise RuntimeError("there is no way back: restore a backup")


def _keys() -> None:
    op.add_column("ring_version", _time("destroy_at", nullable=True))
    op.add_column("ring_version", _column("reason", sa.Text))
    op.add_column("wrapped_key", _column("first_ring_version", sa.Integer))
    op.add_column("wrapped_key", _column("synced", sa.Integer))
    op.create_index("ix_wrapped_key_ring", "wrapped_key", ["ring", "ring_version", "dek_id"])
    op.create_index("ix_wrapped_key_unsynced", "wrapped_key", ["dek_id"], postgresql_where=sa.text("synced <> row_version"))
    op.create_table(
        "tombstone",
        sa.Column("voice_id", sa.Uuid, primary_key=True),
        _column("tenant", sa.Text),
        _column("dek_ids", sa.ARRAY(sa.Uuid)),
        _column("ring", sa.Text),
        _column("first_ring_version", sa.Integer),
        _column("last_ring_version", sa.Integer),
        _time("erased_at"),
        _time("peer_erased_at", nullable=True),
        _time("shredded_at", nullable=True),
        _column("row_version", sa.Integer),
        *_mac(),
    )


def _sync() -> None:
    op.create_table("sync_state", sa.Column("site", sa.Text, primary_key=True), _column("state", sa.LargeBinary), *_mac())
    op.create_table(
        "sync_certificate",
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        _column("certificate", sa.LargeBinary),
    )
    op.create_table(
        "sync_evidence",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        _column("site", sa.Text),
        _column("evidence", sa.LargeBinary),
        _time(),
    )
    op.create_table(
        "sync_batch",
        sa.Column("batch", sa.Uuid, primary_key=True),
        _column("kind", sa.Text),
        _column("records", sa.LargeBinary),
        sa.Column("own_receipt", sa.LargeBinary),
        sa.Column("peer_receipt", sa.LargeBinary),
        _time(),
        *_mac(),
    )


def _approvals() -> None:
    op.create_table(
        "approval_request",
        sa.Column("operation_sha256", sa.LargeBinary, primary_key=True),
        _column("operation", sa.LargeBinary),
        _column("description", sa.LargeBinary),
        _time("filed_at"),
        _time("done_at", nullable=True),
        _column("outcome", sa.Text),
    )
    op.create_table(
        "approval",
        sa.Column("operation_sha256", sa.LargeBinary, sa.ForeignKey("approval_request.operation_sha256"), primary_key=True),
        sa.Column("person", sa.Text, primary_key=True),
        sa.Column("role", sa.Text, primary_key=True),
        _column("approval", sa.LargeBinary),
        _time("received_at"),
    )
    op.create_table(
        "key_schedule",
        sa.Column("name", sa.Text, primary_key=True),
        _column("plan", sa.LargeBinary),
        _time("last_run_at", nullable=True),
        _time("last_reminder_at", nullable=True),
        *_mac(),
    )
