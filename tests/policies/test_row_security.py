"""Beneath the checks in our statements: the database shows a request's transaction its own tenant's rows, and no other's.

Claimed for what it is: a guard against a forgotten WHERE. Who can send SQL of his own names another tenant, or none.
"""

from __future__ import annotations

import secrets

import pytest
import sqlalchemy as sa
from house import House, new_device
from sqlalchemy import text as sql

from policies import errors
from policies.grants import Purpose
from policies.store import durable
from service import schema


@pytest.fixture
def served(postgres, serving_token):
    """A house on a migrated database, with the vault's own role."""
    name = f"served_{secrets.token_hex(4)}"
    passwords = {role: secrets.token_urlsafe(16) for role in (schema.OWNER, schema.VAULT, schema.LOG)}
    urls = {role: sa.make_url(postgres.url(name)).set(username=role, password=passwords[role]) for role in passwords}
    schema.provision(postgres.url(), urls[schema.OWNER].render_as_string(hide_password=False), passwords)
    schema.migrate(urls[schema.OWNER].render_as_string(hide_password=False))
    database = sa.create_engine(urls[schema.VAULT])
    yield House(database, serving_token.hsm)
    database.dispose()
    with schema.opened(postgres.url()) as engine, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql(f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.fixture
def scene(served):
    for tenant in ("acme", "other"):
        served.client(f"app-{tenant}", tenant)
        served.voice(tenant)
    return served


@pytest.mark.parametrize("table", ["client", "consent", "voice"])
def test_a_forgotten_where_crosses_no_tenant(scene, table):
    with durable(scene.database, "acme") as transaction:
        assert set(transaction.scalars(sql(f"SELECT tenant FROM {table}"))) == {"acme"}
        assert transaction.execute(sql(f"UPDATE {table} SET row_version = row_version")).rowcount == 1
    with durable(scene.database) as transaction:
        assert set(transaction.scalars(sql(f"SELECT tenant FROM {table}"))) == {"acme", "other"}, "the control: both are there"


def test_nor_does_a_row_that_is_written(scene):
    for statement in ("UPDATE voice SET tenant = 'other'", "UPDATE client SET tenant = 'other'"):
        with pytest.raises(errors.AuditUnavailable), durable(scene.database, "acme") as transaction:
            transaction.execute(sql(statement))


def test_deleting_everything_deletes_ones_own(scene):
    with durable(scene.database, "acme") as transaction:
        transaction.execute(sql("DELETE FROM voice"))
    with durable(scene.database) as transaction:
        assert list(transaction.scalars(sql("SELECT tenant FROM voice"))) == ["other"]


def test_the_next_transaction_of_the_connection_is_nobodys(scene):
    with scene.database.connect() as connection:
        for tenant, seen in (("acme", 1), ("other", 1)):
            with connection.begin():
                connection.execute(sql("SELECT set_config('app.tenant', :tenant, true)"), {"tenant": tenant})
                assert connection.scalar(sql("SELECT count(*) FROM voice")) == seen
        with connection.begin():
            assert connection.scalar(sql("SELECT count(*) FROM voice")) == 2


def test_the_gate_decides_within_the_tenant(served, monkeypatch):
    device, voice, foreign = served.client(), served.voice(), served.voice("other")
    place = served.audit.place

    def looking():
        return (sql("SELECT count(*) FROM voice"), {}), *place()

    monkeypatch.setattr(served.audit, "place", looking)
    decided = []
    found = served.audit._found

    def kept(transaction, kind, answers):
        decided.append(answers and len(answers) == 3 and answers[0])
        return found(transaction, kind, answers)

    monkeypatch.setattr(served.audit, "_found", kept)
    served.gate.admit(served.speech(device, voice))
    assert decided == [[(1,)], [(1,)]], "token endpoint and gate saw one of the two voices"
    with pytest.raises(errors.VoiceUnknown):
        served.token(device, Purpose.SPEAK, foreign)
    with pytest.raises(errors.ClientUnknown):
        served.token(new_device("stranger"), Purpose.READ)


def test_the_serving_role_is_bound_by_it(served):
    with served.database.connect() as connection:
        role = connection.execute(sql("SELECT rolsuper, rolbypassrls FROM pg_roles WHERE rolname = current_user")).one()
        forced = connection.execute(
            sql("SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity ORDER BY relname")
        ).scalars()
        assert not any(role)
        assert list(forced) == ["browser_invitation", "client", "consent", "upload_ticket", "usage", "voice"]
