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
OF_TENANTS = (
    "client",
    "consent",
    "voice",
    "usage",
    "wrapped_key",
    "voiceprint",
    "tombstone",
    "upload_ticket",
    "browser_invitation",
)
# A transaction sees and writes the rows of the tenant that it names, and none before it names one; or all, where it says that it is
# about the whole site. The caller's own row is found by its certificate, before anybody knows its tenant.
IN_TENANT = "tenant = current_setting('app.tenant', true) OR current_setting('app.scope', true) = 'site'"
OF_CALLER = "cert_sha256 = current_setting('app.caller', true)"


def _column(name: str, kind: Any) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    _limits()
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
    _activations()
    _signing_keys()
    _cosignatures()
    # When a version is to be destroyed at the other site; null is never, and every row's MAC holds on.
    op.add_column("ring_version", sa.Column("peer_destroy_at", sa.DateTime(timezone=True)))
    _unsent()

    # Recordings that answered a liveness nonce, as MACs: each counts once for as long as there is the voice.
    op.create_table(
        "used_recording",
        sa.Column("voice_id", sa.Uuid, primary_key=True),
        sa.Column("fingerprint", sa.LargeBinary, primary_key=True),
    )
    _row_security()


def _row_security() -> None:
    """Every table with a tenant's column, by one rule; at the end, so that this step itself still sees all rows."""
    for table in OF_TENANTS:
        op.execute(f"DROP POLICY IF EXISTS tenant ON {table}")
        op.execute(f"CREATE POLICY tenant ON {table} USING ({IN_TENANT}) WITH CHECK ({IN_TENANT})")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY caller ON client FOR SELECT USING ({OF_CALLER})")


def _limits() -> None:
    """What differs for one voice or client. All that there are have no such limit, and their MACs hold on."""
    op.add_column("voice", sa.Column("terms", sa.ARRAY(sa.Text), nullable=False, server_default="{}"))
    # Hours of the week in which a client may call, or a voice opens; null is always.
    for table in ("client", "voice"):
        op.add_column(table, sa.Column("hours", sa.Text))
    # The one voice that a client may reach; null is every voice of its tenant.
    op.add_column("client", sa.Column("voice_id", sa.Uuid))


def _activations() -> None:
    """Which set of policies officers activated; the function is of the foundation."""
    op.create_table(
        "policy_activation",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        *(_column(name, sa.LargeBinary) for name in ("policies", "before_sha256", "operation")),
        _column("approvals", sa.ARRAY(sa.LargeBinary)),
        _column("roster", sa.LargeBinary),
        _column("activated_at", sa.DateTime(timezone=True)),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint("version >= 1", name="version"),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
    )
    row, whole = "BEFORE UPDATE OR DELETE", "BEFORE TRUNCATE"
    op.execute(f"CREATE TRIGGER append_only {row} ON policy_activation FOR EACH ROW EXECUTE FUNCTION append_only()")
    op.execute(f"CREATE TRIGGER append_only_whole {whole} ON policy_activation FOR EACH STATEMENT EXECUTE FUNCTION append_only()")


def _signing_keys() -> None:
    """Versions of the signing keys, and the times at which each begins and ends."""
    op.create_table(
        "signing_key",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        _column("public_key", sa.LargeBinary),
        _column("made_at", sa.DateTime(timezone=True)),
        _column("signs_at", sa.DateTime(timezone=True)),
        sa.Column("retires_at", sa.DateTime(timezone=True)),
        sa.Column("destroyed_at", sa.DateTime(timezone=True)),
        _column("row_version", sa.Integer),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
    )


def _cosignatures() -> None:
    """Checkpoints of both sites' logs that the other site co-signed, or refused as forks."""
    op.create_table(
        "cosignature",
        sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
        _column("log", sa.Text),
        _column("size", sa.BigInteger),
        *(_column(name, sa.Text) for name in ("note", "line")),
        _column("edge", sa.LargeBinary),
        _column("created_at", sa.DateTime(timezone=True)),
        _column("mac", sa.LargeBinary),
    )
    op.create_index("ix_cosignature_log", "cosignature", ["log", "place"])
    row, whole = "BEFORE UPDATE OR DELETE", "BEFORE TRUNCATE"
    op.execute(f"CREATE TRIGGER append_only {row} ON cosignature FOR EACH ROW EXECUTE FUNCTION append_only()")
    op.execute(f"CREATE TRIGGER append_only_whole {whole} ON cosignature FOR EACH STATEMENT EXECUTE FUNCTION append_only()")


def _unsent() -> None:
    """What the other site is still to be told of who may do what: to begin with, every client and consent, and every voice that
    was changed since its key was sent."""
    op.create_table(
        "authority_unsent",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("kind", "key")),
        _column("row_version", sa.Integer),
    )
    known = (("client", "client_id", "true"), ("consent", "consent_id", "true"), ("voice", "voice_id", "row_version > 1"))
    for table, key, which in known:  # names of ours, and nothing else
        rows = f"SELECT '{table}', {key}::text, row_version FROM {table} WHERE {which}"  # noqa: S608
        op.execute(f"INSERT INTO authority_unsent (kind, key, row_version) {rows}")


def downgrade() -> None:
    raise RuntimeError("there is no way back: restore a backup")
