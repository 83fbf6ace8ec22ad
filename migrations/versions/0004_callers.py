"""What officers activated, tickets, browsers' keys and liveness nonces: further ways for a caller to be known."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

MAC_BYTES = 16


def _column(name: str, kind: Any) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # What differs for one voice: empty for all that there are, whose MACs hold on.
    op.add_column("voice", sa.Column("terms", sa.ARRAY(sa.Text), nullable=False, server_default="{}"))

    op.create_table(
        "upload_ticket",
        sa.Column("secret_sha256", sa.Text, primary_key=True),
        *(_column(name, sa.Text) for name in ("tenant", "client_id")),
        _column("consent_id", sa.Uuid),
        _column("max_bytes", sa.Integer),
        _column("expires_at", sa.DateTime(timezone=True)),
        _column("row_version", sa.Integer),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
    )
    op.create_index("ix_upload_ticket_expires_at", "upload_ticket", ["expires_at"])
    # The one voice that a client may reach; null, as for all that there are, is no such limit, and their MACs hold on.
    op.add_column("client", sa.Column("voice_id", sa.Uuid))
    op.create_table(
        "browser_invitation",
        sa.Column("secret_sha256", sa.Text, primary_key=True),
        *(_column(name, sa.Text) for name in ("tenant", "client_id")),
        _column("roles", sa.ARRAY(sa.Text)),
        sa.Column("voice_id", sa.Uuid),
        _column("expires_at", sa.DateTime(timezone=True)),
        _column("row_version", sa.Integer),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
    )
    op.create_index("ix_browser_invitation_expires_at", "browser_invitation", ["expires_at"])


def downgrade() -> None:
    raise RuntimeError("there is no way back: restore a backup")
