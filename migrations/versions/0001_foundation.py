"""Keys, authority rows, voiceprints and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0001"
down_revision = None

APPEND_ONLY = ("intent", "completion", "leaf", "checkpoint")
MAC_BYTES = 16


def upgrade() -> None:
    _keys()
    _authority()
    _used()
    _audit()
    _voiceprints()
    _append_only()


def downgrade() -> None:
    raise RuntimeError("0001 has no way back: it would drop keys and the audit log; restore a backup instead")


def _column(name: str, kind: sa.types.TypeEngine | type[sa.types.TypeEngine]) -> sa.Column:
    return sa.Column(name, kind, nullable=False)


def _time(name: str = "created_at") -> sa.Column:
    return _column(name, sa.DateTime(timezone=True))


def _index(table: str, column: str) -> None:
    op.create_index(f"ix_{table}_{column}", table, [column])


def _authority_columns() -> tuple[sa.Column, sa.Column, sa.CheckConstraint, sa.CheckConstraint]:
    """A row that grants something carries a version and a MAC made in the token, so that writing the table is not enough."""
    return (
        _column("row_version", sa.Integer),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint("row_version >= 1", name="row_version"),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
    )


def _keys() -> None:
    op.create_table(
        "ring_version",
        sa.Column("ring", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        _column("state", sa.Text),
        _time(),
        *_authority_columns(),
        sa.CheckConstraint("version >= 1", name="version"),
    )
    op.create_table(
        "wrapped_key",
        sa.Column("dek_id", sa.Uuid, primary_key=True),
        _column("tenant", sa.Text),
        _column("voice_id", sa.Uuid),
        _column("version", sa.Integer),
        _column("ring", sa.Text),
        _column("ring_version", sa.Integer),
        _column("state", sa.Text),
        _column("blob", sa.LargeBinary),
        _time(),
        *_authority_columns(),
        sa.CheckConstraint("version >= 1", name="version"),
        sa.UniqueConstraint("voice_id", "version"),
    )


def _authority() -> None:
    op.create_table(
        "client",
        sa.Column("client_id", sa.Text, primary_key=True),
        _column("tenant", sa.Text),
        sa.Column("cert_sha256", sa.Text, nullable=False, unique=True),
        _column("jkt", sa.Text),
        _column("roles", ARRAY(sa.Text)),
        _column("state", sa.Text),
        *_authority_columns(),
    )
    op.create_table(
        "consent",
        sa.Column("consent_id", sa.Uuid, primary_key=True),
        _column("tenant", sa.Text),
        _column("subject", sa.Text),
        _column("purposes", ARRAY(sa.Text)),
        _column("territory", ARRAY(sa.Text)),
        _time("expires_at"),
        _column("evidence_sha256", sa.Text),
        _column("state", sa.Text),
        _time(),
        *_authority_columns(),
    )
    op.create_table(
        "voice",
        sa.Column("voice_id", sa.Uuid, primary_key=True),
        _column("tenant", sa.Text),
        _column("name", sa.Text),
        sa.Column("consent_id", sa.Uuid, sa.ForeignKey("consent.consent_id"), nullable=False),
        _column("state", sa.Text),
        _column("dek_id", sa.Uuid),
        _column("key_version", sa.Integer),
        _time(),
        *_authority_columns(),
        sa.CheckConstraint("key_version >= 1", name="key_version"),
    )
    _index("voice", "tenant")
    _index("voice", "consent_id")


def _used() -> None:
    op.create_table(
        "used_token",
        sa.Column("iss", sa.Text, primary_key=True),
        sa.Column("jti", sa.Text, primary_key=True),
        _time("expires_at"),
    )
    op.create_table(
        "used_proof",
        sa.Column("jkt", sa.Text, primary_key=True),
        sa.Column("jti", sa.Text, primary_key=True),
        _time("expires_at"),
    )
    _index("used_token", "expires_at")
    _index("used_proof", "expires_at")


def _recorded(name: str, key: sa.Column) -> None:
    op.create_table(
        name,
        key,
        _column("worker", sa.Text),
        _column("counter", sa.BigInteger),
        _column("body", sa.LargeBinary),
        _column("mac", sa.LargeBinary),
        sa.CheckConstraint(f"octet_length(mac) = {MAC_BYTES}", name="mac"),
        sa.UniqueConstraint("worker", "counter"),
    )


def _intent_id() -> sa.Column:
    return sa.Column("intent_id", sa.Uuid, sa.ForeignKey("intent.intent_id"), primary_key=True)


def _audit() -> None:
    _recorded("intent", sa.Column("intent_id", sa.Uuid, primary_key=True))
    _recorded("completion", _intent_id())
    op.create_table("detail", _intent_id(), _column("sealed", sa.LargeBinary))
    op.create_table(
        "leaf",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        _column("kind", sa.Text),
        _column("ref", sa.Uuid),
        _column("entry", sa.LargeBinary),
        sa.CheckConstraint("seq >= 0", name="seq"),
        sa.CheckConstraint("kind IN ('intent', 'completion')", name="kind"),
        sa.UniqueConstraint("kind", "ref"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("size", sa.BigInteger, primary_key=True, autoincrement=False),
        _column("note", sa.Text),
        _time(),
        sa.CheckConstraint("size >= 0", name="size"),
    )


def _voiceprints() -> None:
    op.create_table(
        "voiceprint",
        sa.Column("voice_id", sa.Uuid, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        _column("tenant", sa.Text),
        _column("dek_id", sa.Uuid),
        _column("dek_version", sa.Integer),
        _column("model_id", sa.Text),
        _column("sealed", sa.LargeBinary),
        _time(),
        sa.CheckConstraint("kind IN ('embedding', 'conditioning')", name="kind"),
    )


def _append_only() -> None:
    """The log may grow and nothing else; the owner too would have to drop a trigger first, in plain sight."""
    op.execute("""
        CREATE FUNCTION append_only() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
        END $$
    """)
    for table in APPEND_ONLY:
        op.execute(f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION append_only()")
        op.execute(f"CREATE TRIGGER append_only_whole BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION append_only()")
