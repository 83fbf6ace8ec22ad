"""The database made ready: its roles, its schema, and each role's rights, as data.

Three roles: `glottis_owner` owns the tables and migrates, `glottis_vault` and `glottis_log` serve and can change no table's
shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

import migrations
from keyvault.database import SITE_WIDE
from service.errors import DatabaseUnavailable, DatabaseUnsuitable

OWNER, VAULT, LOG = "glottis_owner", "glottis_vault", "glottis_log"
RIGHTS: Mapping[str, Mapping[str, str]] = {
    VAULT: {
        "ring_version": "SELECT, INSERT, UPDATE",
        "wrapped_key": "SELECT, INSERT, UPDATE, DELETE",
        "tombstone": "SELECT, INSERT, UPDATE",
        "sync_state": "SELECT, INSERT, UPDATE",
        "sync_certificate": "SELECT, INSERT",
        "sync_evidence": "SELECT, INSERT",
        "sync_batch": "SELECT, INSERT, UPDATE, DELETE",
        "approval_request": "SELECT, INSERT, UPDATE",
        "approval": "SELECT, INSERT",
        "key_schedule": "SELECT, INSERT, UPDATE, DELETE",
        "signing_key": "SELECT, INSERT, UPDATE",
        "client": "SELECT, INSERT, UPDATE",
        "consent": "SELECT, INSERT, UPDATE",
        "voice": "SELECT, INSERT, UPDATE, DELETE",
        "quota": "SELECT, INSERT, UPDATE, DELETE",
        "usage": "SELECT, INSERT, UPDATE, DELETE",
        "authority_change": "SELECT, INSERT",
        "authority_unsent": "SELECT, INSERT, UPDATE, DELETE",
        "policy_activation": "SELECT, INSERT",
        "used_token": "SELECT, INSERT, DELETE",
        "upload_ticket": "SELECT, INSERT, DELETE",
        "browser_invitation": "SELECT, INSERT, DELETE",
        "used_proof": "SELECT, INSERT, DELETE",
        "used_recording": "SELECT, INSERT, DELETE",
        "intent": "SELECT, INSERT",
        "completion": "SELECT, INSERT",
        "detail": "SELECT, INSERT, DELETE",
        "leaf": "SELECT",
        "checkpoint": "SELECT",
        "cosignature": "SELECT, INSERT",
        "voiceprint": "SELECT, INSERT, UPDATE, DELETE",
    },
    LOG: {
        "intent": "SELECT",
        "completion": "SELECT",
        "leaf": "SELECT, INSERT",
        "checkpoint": "SELECT, INSERT",
        "cosignature": "SELECT",
    },
}
"""What each serving role may do with each table. A table that is not named is closed to it."""
LEAST_POSTGRES = 160000
LEAST_VECTOR = (0, 8)


@contextmanager
def opened(url: str | URL) -> Iterator[Engine]:
    """An engine without a pool, for administration, which sees all tenants' rows. Raises DatabaseUnavailable."""
    engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args={"connect_timeout": 5, "options": SITE_WIDE})
    try:
        yield engine
    except OperationalError as error:
        raise DatabaseUnavailable(_plain(error)) from error
    finally:
        engine.dispose()


def provision(admin_url: str | None, owner_url: str, passwords: Mapping[str, str]) -> None:
    """Make the roles of `passwords` and set them; with a superuser's `admin_url`, first the database and its extension too.

    Without one, the database stands and `owner_url` may make roles in it. Doing it again changes nothing but passwords.
    """
    database = make_url(owner_url).database
    if admin_url is not None:
        with opened(admin_url) as engine, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            make_roles(connection, passwords)
            if not connection.scalar(text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": database}):
                connection.execute(text(f'CREATE DATABASE "{database}" OWNER {OWNER} TEMPLATE template0'))
        with opened(make_url(admin_url).set(database=database)) as engine, engine.begin() as connection:
            connection.execute(text("CREATE EXTENSION IF NOT EXISTS vector"))
            connection.execute(text(f"ALTER SCHEMA public OWNER TO {OWNER}"))
    with opened(owner_url) as engine, engine.begin() as connection:
        if admin_url is None:
            make_roles(connection, passwords)
        connection.execute(text(f'REVOKE ALL ON DATABASE "{database}" FROM PUBLIC'))
        connection.execute(text(f'GRANT CONNECT ON DATABASE "{database}" TO {VAULT}, {LOG}'))
        connection.execute(text("REVOKE ALL ON SCHEMA public FROM PUBLIC"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {VAULT}, {LOG}"))


def make_roles(connection: Connection, passwords: Mapping[str, str]) -> None:
    """Make each role of `passwords` that is missing, and set its password. The server only ever sees the SCRAM verifier."""
    for role, password in passwords.items():
        if not connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}):
            connection.execute(text(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION"))
        driver: Any = connection.connection.driver_connection
        verifier = driver.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        connection.exec_driver_sql(f"ALTER ROLE {role} PASSWORD '{verifier}'")  # base64 and `$:` only


def migrate(owner_url: str) -> None:
    """Bring the schema to its newest step and give the serving roles exactly RIGHTS, each time anew.

    Raises DatabaseUnavailable, and DatabaseUnsuitable when server or pgvector are too old.
    """
    from alembic import command  # whoever only opens the database need not load it
    from alembic.config import Config

    with opened(owner_url) as engine, engine.connect() as connection:
        check_versions(connection)
        config = Config()
        config.set_main_option("script_location", next(iter(migrations.__path__)))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        grant(connection)
        connection.commit()


def grant(connection: Connection) -> None:
    """Give the serving roles exactly RIGHTS: what is not named there is taken away."""
    for role, tables in RIGHTS.items():
        connection.execute(text(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}"))
        for table, rights in tables.items():
            connection.execute(text(f"GRANT {rights} ON {table} TO {role}"))


def check_versions(connection: Connection) -> tuple[str, str]:
    """Server and pgvector versions. Raises DatabaseUnsuitable when one is too old."""
    server = str(connection.scalar(text("SHOW server_version")))
    number = int(str(connection.scalar(text("SHOW server_version_num"))))
    vector = connection.scalar(text("SELECT extversion FROM pg_extension WHERE extname = 'vector'"))
    if number < LEAST_POSTGRES:
        raise DatabaseUnsuitable(f"Postgres {server} is too old")
    if vector is None:
        raise DatabaseUnsuitable("the extension vector is missing", fix="As a superuser: CREATE EXTENSION vector;")
    if tuple(int(part) for part in str(vector).split(".")[:2]) < LEAST_VECTOR:
        raise DatabaseUnsuitable(
            f"pgvector {vector} is too old", fix="Install pgvector 0.8 or newer; ALTER EXTENSION vector UPDATE;"
        )
    return server, str(vector)


def _plain(error: DBAPIError) -> str:
    """The server's own words without the statement and its parameters."""
    return str(error.orig).strip().splitlines()[0] if error.orig else type(error).__name__
