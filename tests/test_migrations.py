"""The migrated schema is the one that the stores describe; the log can only grow; each role has its rights and no more."""

from __future__ import annotations

import importlib
import secrets
import uuid

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from keyvault.database import metadata
from service import schema

STORES = (
    "keyvault.store",
    "keyvault.signing.store",
    "keyvault.requests.store",
    "keyvault.sync.store",
    "policies.store",
    "policies.audit.store",
    "policies.sets.store",
    "policies.witness.store",
    "voiceprints.store",
)
MAC = bytes(16)


@pytest.fixture(scope="module")
def migrated(postgres):
    """A database of its own, provisioned and migrated, and the passwords of its roles."""
    name = f"migrated_{secrets.token_hex(4)}"
    passwords = {role: secrets.token_urlsafe(16) for role in (schema.OWNER, schema.VAULT, schema.LOG)}
    urls = {role: sa.make_url(postgres.url(name)).set(username=role, password=passwords[role]) for role in passwords}
    owner = urls[schema.OWNER].render_as_string(hide_password=False)
    schema.provision(postgres.url(), owner, passwords)
    schema.migrate(owner)
    yield urls
    with schema.opened(postgres.url()) as engine, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text(f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.fixture
def as_role(migrated):
    """`as_role(role)` is a connection of that role; what it did is undone."""
    engines = {role: sa.create_engine(url, poolclass=sa.NullPool) for role, url in migrated.items()}
    opened = []

    def connect(role: str) -> sa.Connection:
        opened.append(engines[role].connect())
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def test_migrated_schema_equals_the_stores(as_role):
    for module in STORES:
        importlib.import_module(module)
    context = MigrationContext.configure(as_role(schema.OWNER), opts={"compare_type": True})
    assert compare_metadata(context, metadata) == []


def test_every_check_of_the_stores_is_in_the_database(as_role):
    for module in STORES:
        importlib.import_module(module)
    found = sa.inspect(as_role(schema.OWNER))
    for table in metadata.sorted_tables:
        declared = {str(check.name) for check in table.constraints if isinstance(check, sa.CheckConstraint)}
        assert declared <= {check["name"] for check in found.get_check_constraints(table.name)}, table.name


def test_migrating_again_changes_nothing(migrated):
    schema.migrate(migrated[schema.OWNER].render_as_string(hide_password=False))


def test_there_is_no_way_back_that_drops_keys_and_log(as_role):
    connection = as_role(schema.OWNER)
    config = Config()
    config.set_main_option("script_location", "migrations")
    config.attributes["connection"] = connection
    with pytest.raises(RuntimeError, match="restore a backup"):
        command.downgrade(config, "base")
    connection.rollback()
    assert sa.inspect(connection).has_table("leaf")


def _intent(connection: sa.Connection) -> uuid.UUID:
    number = uuid.uuid4()
    connection.execute(
        sa.text("INSERT INTO intent VALUES (:id, :worker, 1, :body, :mac)"),
        {"id": number, "worker": str(number), "body": b"{}", "mac": MAC},
    )
    return number


@pytest.mark.parametrize("statement", ["UPDATE intent SET body = ''", "DELETE FROM intent", "TRUNCATE intent CASCADE"])
def test_not_even_the_owner_changes_the_log(as_role, statement):
    connection = as_role(schema.OWNER)
    _intent(connection)  # the control: appending works
    with pytest.raises(sa.exc.DBAPIError, match="append-only"):
        connection.execute(sa.text(statement))


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        (schema.VAULT, "UPDATE intent SET body = ''"),
        (schema.VAULT, "DELETE FROM completion"),
        (schema.VAULT, "DELETE FROM authority_change"),
        (schema.VAULT, "UPDATE authority_change SET row_version = 1"),
        (schema.VAULT, "INSERT INTO leaf VALUES (0, 'intent', gen_random_uuid(), '')"),
        (schema.VAULT, "INSERT INTO checkpoint VALUES (0, '', now())"),
        (schema.VAULT, "CREATE TABLE mine (x int)"),
        (schema.VAULT, "ALTER TABLE consent DISABLE TRIGGER ALL"),
        (schema.VAULT, "SELECT * FROM alembic_version"),
        (schema.LOG, "SELECT sealed FROM voiceprint"),
        (schema.LOG, "SELECT sealed FROM detail"),
        (schema.LOG, "SELECT blob FROM wrapped_key"),
        (schema.LOG, "INSERT INTO intent VALUES (gen_random_uuid(), 'w', 1, '', '')"),
        (schema.LOG, "DELETE FROM leaf"),
    ],
)
def test_a_role_is_refused_what_it_does_not_need(as_role, role, statement):
    with pytest.raises(sa.exc.ProgrammingError, match=r"permission denied|must be owner"):
        as_role(role).execute(sa.text(statement))


def test_roles_do_what_they_need(as_role):
    vault, log = as_role(schema.VAULT), as_role(schema.LOG)
    _intent(vault)
    vault.execute(sa.text("SELECT sealed FROM voiceprint"))
    log.execute(sa.text("SELECT body FROM intent"))
    log.execute(sa.text("INSERT INTO leaf VALUES (0, 'intent', gen_random_uuid(), '')"))
    log.execute(sa.text("INSERT INTO checkpoint VALUES (1, 'note', now())"))


def test_an_authority_row_needs_a_whole_mac(as_role):
    with pytest.raises(sa.exc.IntegrityError, match="ck_ring_version_mac"):
        as_role(schema.VAULT).execute(sa.text("INSERT INTO ring_version VALUES ('main', 1, 'active', now(), 1, '', NULL, '')"))
