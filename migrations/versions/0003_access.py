"""Quotas and their use, the list of authority rows' newest versions, which only grows, and row-level security by tenant."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

MAC_BYTES = 16
APPEND_ONLY = ("authority_change",)
OF_TENANTS = ("client", "consent", "voice", "usage")
# A transaction that names its tenant sees and writes that tenant's rows; one that names none is about all of them.
IN_TENANT = "coalesce(current_setting('app.tenant', true), '') IN ('', tenant)"


def _column(name: str, kind: Any) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.create_table(
        "quota",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        *(_column(name, sa.BigInteger) for name in ("requests", "characters", "seconds", "attempts")),
        _column("row_version", sa.Integer),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
        sa.CheckConstraint("scope IN ('client', 'voice')", name="scope"),
    )
    op.create_table(
        "usage",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        _column("tenant", sa.Text),
        _column("minute", sa.DateTime(timezone=True)),
        *(_column(name, sa.BigInteger) for name in ("requests", "attempts")),
        _column("day", sa.DateTime(timezone=True)),
        *(_column(name, sa.BigInteger) for name in ("characters", "milliseconds")),
    )
    op.create_table(
        "authority_change",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("row_version", sa.Integer, primary_key=True, autoincrement=False),
    )
    # What was changed before this list began: its rows cannot be put back either.
    for table, key in (("client", "client_id"), ("consent", "consent_id"), ("voice", "voice_id")):
        rows = sa.table(table, sa.column(key), sa.column("row_version"))
        changed = sa.select(sa.literal(table), sa.cast(rows.c[key], sa.Text), rows.c.row_version).where(rows.c.row_version > 1)
        listed = sa.table("authority_change", sa.column("kind"), sa.column("key"), sa.column("row_version"))
        op.execute(sa.insert(listed).from_select(["kind", "key", "row_version"], changed))
    for table in APPEND_ONLY:  # the function is of the foundation
        op.execute(f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION append_only()")
        op.execute(f"CREATE TRIGGER append_only_whole BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION append_only()")
    for table in OF_TENANTS:
        op.execute(f"CREATE POLICY tenant ON {table} USING ({IN_TENANT}) WITH CHECK ({IN_TENANT})")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")


def downgrade() -> None:
    raise RuntimeError("there is no way back: restore a backup")
