"""The tables of who may do what, and the statements of every decision. Each is built once: putting it together would cost more
than the database takes to answer it."""

from __future__ import annotations

from itertools import product
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    ForeignKey,
    Integer,
    LargeBinary,
    ScalarSelect,
    Table,
    Text,
    Uuid,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert

from keyvault.database import metadata


def _row_guard() -> tuple[Column[int], Column[bytes]]:
    return Column("row_version", Integer, nullable=False), Column("mac", LargeBinary, nullable=False)


client = Table(
    "client",
    metadata,
    Column("client_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("cert_sha256", Text, nullable=False, unique=True),
    Column("jkt", Text, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("state", Text, nullable=False),
    *_row_guard(),
    Column("voice_id", Uuid),
    Column("hours", Text),
)
consent = Table(
    "consent",
    metadata,
    Column("consent_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("purposes", ARRAY(Text), nullable=False),
    Column("territory", ARRAY(Text), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("evidence_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    *_row_guard(),
)
voice = Table(
    "voice",
    metadata,
    Column("voice_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("consent_id", Uuid, ForeignKey(consent.c.consent_id), nullable=False, index=True),
    Column("state", Text, nullable=False),
    Column("dek_id", Uuid, nullable=False),
    Column("key_version", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    *_row_guard(),
    Column("terms", ARRAY(Text), nullable=False, server_default="{}"),
    Column("hours", Text),
    CheckConstraint("key_version >= 1", name="key_version"),
)
used_token = Table(
    "used_token",
    metadata,
    Column("iss", Text, primary_key=True),
    Column("jti", Text, primary_key=True),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
)
used_proof = Table(
    "used_proof",
    metadata,
    Column("jkt", Text, primary_key=True),
    Column("jti", Text, primary_key=True),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
)
upload_ticket = Table(
    "upload_ticket",
    metadata,
    Column("secret_sha256", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("client_id", Text, nullable=False),
    Column("consent_id", Uuid, nullable=False),
    Column("max_bytes", Integer, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
    *_row_guard(),
)
browser_invitation = Table(
    "browser_invitation",
    metadata,
    Column("secret_sha256", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("client_id", Text, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("voice_id", Uuid),
    Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
    *_row_guard(),
)
used_recording = Table(
    "used_recording",
    metadata,
    Column("voice_id", Uuid, primary_key=True),
    Column("fingerprint", LargeBinary, primary_key=True),
)
quota = Table(
    "quota",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("characters", BigInteger, nullable=False),
    Column("seconds", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    *_row_guard(),
    CheckConstraint("scope IN ('client', 'voice')", name="scope"),
)
usage = Table(
    "usage",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("minute", DateTime(timezone=True), nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("day", DateTime(timezone=True), nullable=False),
    Column("characters", BigInteger, nullable=False),
    Column("milliseconds", BigInteger, nullable=False),
)
authority_change = Table(
    "authority_change",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("row_version", Integer, primary_key=True, autoincrement=False),
)
authority_unsent = Table(
    "authority_unsent",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("row_version", Integer, nullable=False),
)
"""Rows that the other site has not confirmed yet, each with the version to be sent. Taken out once it has."""


def _newest(table: Table, key: ColumnElement[Any]) -> ScalarSelect[int]:
    """The newest version of this row that was ever written, by the list that only grows; null for one never changed."""
    listed = (authority_change.c.kind == table.name) & (authority_change.c.key == cast(key, Text))
    return select(func.max(authority_change.c.row_version)).where(listed).scalar_subquery()


WITH_NEWEST = {
    client: select(client, _newest(client, client.c.client_id)),
    consent: select(consent, _newest(consent, consent.c.consent_id)),
    voice: select(voice, _newest(voice, voice.c.voice_id)),
    quota: select(quota, _newest(quota, quota.c.scope + "/" + quota.c.name)),
}
"""Rows of these tables, each with its newest version: nobody is shown a row without it being compared."""
ACTIVATION, ACTIVE = "policy_activation", "active"
"""How the newest activation of a set of policies stands in the list that only grows."""
_activation = (
    select(func.coalesce(func.max(authority_change.c.row_version), 0))
    .where(authority_change.c.kind == ACTIVATION, authority_change.c.key == ACTIVE)
    .scalar_subquery()
)
AUTHORITY = (
    select(
        *(client, voice, consent),
        *(_newest(client, client.c.client_id), _newest(voice, voice.c.voice_id), _newest(consent, consent.c.consent_id)),
        _activation,
    )
    .select_from(client)
    .outerjoin(voice, voice.c.voice_id == bindparam("voice_id"))
    .outerjoin(consent, consent.c.consent_id == func.coalesce(voice.c.consent_id, bindparam("consent_id", type_=Uuid)))
    .where(client.c.cert_sha256 == bindparam("x5t_s256"))
)
"""The client with this certificate, the voice, the voice's consent or else the one named, and each row's newest version; then
which set of policies is active."""
_CONSUME_TOKEN = (
    insert(used_token)
    .values(iss=bindparam("iss"), jti=bindparam("token_jti"), expires_at=bindparam("token_expires_at"))
    .on_conflict_do_nothing()
    .returning(used_token.c.jti)
)
CONSUME_PROOF = (
    insert(used_proof)
    .values(jkt=bindparam("jkt"), jti=bindparam("proof_jti"), expires_at=bindparam("proof_expires_at"))
    .on_conflict_do_nothing()
    .returning(used_proof.c.jti)
)
_GUARDS = {"token_guard": _CONSUME_TOKEN, "proof_guard": CONSUME_PROOF}
# Of two at once the second waits for the first to commit or not; the scalar queries run in this order, always.
CONSUME = {
    there: select(
        *(
            select(func.count()).select_from(consumed.cte(name)).scalar_subquery() if given else literal_column("1")
            for given, (name, consumed) in zip(there, _GUARDS.items(), strict=True)
        )
    )
    for there in product((True, False), repeat=2)
}
"""By whether there are a token and a proof: uses up what there is, and answers 1 for each that was not used before."""
SPEND = text("""
    INSERT INTO usage AS used (scope, name, tenant, minute, requests, attempts, day, characters, milliseconds)
    SELECT asked.scope, asked.name, client.tenant,
           CAST(:minute AS timestamptz), CAST(:requests AS bigint), CAST(:attempts AS bigint),
           CAST(:day AS timestamptz), CAST(:characters AS bigint), CAST(:milliseconds AS bigint)
    FROM client, LATERAL (
        SELECT 'client' AS scope, client.client_id AS name
        UNION ALL
        SELECT 'voice', CAST(voice_id AS text) FROM voice
        WHERE voice_id = CAST(:voice_id AS uuid) AND voice.tenant = client.tenant
        ORDER BY scope
    ) AS asked
    WHERE client.cert_sha256 = :x5t_s256
    ON CONFLICT (scope, name) DO UPDATE SET
        requests = excluded.requests + CASE WHEN used.minute >= excluded.minute THEN used.requests ELSE 0 END,
        attempts = excluded.attempts + CASE WHEN used.minute >= excluded.minute THEN used.attempts ELSE 0 END,
        characters = excluded.characters + CASE WHEN used.day >= excluded.day THEN used.characters ELSE 0 END,
        milliseconds = excluded.milliseconds + CASE WHEN used.day >= excluded.day THEN used.milliseconds ELSE 0 END,
        minute = greatest(used.minute, excluded.minute), day = greatest(used.day, excluded.day)
    RETURNING scope, requests, characters, milliseconds, attempts
""")
"""Add to what this client, and this voice of its tenant, used in this minute and day: the client first, always. Where a clock
is behind, the newer window counts. The rows stay locked until the transaction ends, so no two decide on one sum."""
LIMITS = WITH_NEWEST[quota].where(
    quota.c.name.in_(
        [
            bindparam("everyone", type_=Text),
            bindparam("voice_name", type_=Text),
            select(client.c.client_id).where(client.c.cert_sha256 == bindparam("x5t_s256")).scalar_subquery(),
        ]
    )
)
"""The limits set for this client and this voice, and those for everyone. Names of the other scope are sorted out by the reader."""
# A gate that cannot finish while the token lives has no reason to hold its locks.
DURABLE = text("""
    SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '5s', true),
           set_config('app.tenant', coalesce(CAST(:tenant AS text), ''), true),
           set_config('app.scope', CASE WHEN CAST(:tenant AS text) IS NULL
                                   THEN coalesce(current_setting('app.scope', true), '') ELSE '' END, true)
""")
"""On disk when it commits; and in this transaction, row-level security shows the rows of this tenant alone. Null names none: it
shows no tenant's rows, but in a process whose work is the whole site's (`keyvault.database.SITE_WIDE`)."""
CALLED_BY = text("SELECT set_config('app.caller', :x5t_s256, true)")
"""From here on the row of the client with this certificate is seen, so that its tenant can be."""
DURABLE_AS = text("""
    SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '5s', true),
           set_config('app.tenant', coalesce((SELECT tenant FROM client WHERE cert_sha256 = :x5t_s256), ''), true),
           set_config('app.scope', '', true)
""")
"""The same for the tenant of the client with this certificate, after CALLED_BY; for nobody's, if there is no such client."""
