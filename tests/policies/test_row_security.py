"""Beneath the checks in our statements: the database shows a request's transaction its own tenant's rows, and no other's.

Claimed for what it is: a guard against a forgotten WHERE. Who can send SQL of his own names another tenant, or the whole site.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from house import House, new_device
from sqlalchemy import text as sql

from keyvault.database import SITE_WIDE, Transaction
from policies import errors
from policies.grants import Purpose
from policies.store import durable, site_wide
from service import schema
from service.backups import DUMP_OPTIONS

OWN_TABLES = """
    SELECT table_name FROM information_schema.columns
    WHERE table_schema = 'public' AND column_name = 'tenant' ORDER BY table_name
"""


@dataclass
class Served:
    """A migrated database, as its roles see it: a worker that serves tenants, the site's own process, and the superuser."""

    worker: sa.Engine
    site: sa.Engine
    superuser: sa.Engine
    owner: sa.URL
    hsm: Any

    def house(self) -> House:
        """A gate that serves tenants; what a test registers, the site registers."""
        return House(self.worker, self.hsm)

    def desk(self) -> House:
        return House(self.site, self.hsm)


@pytest.fixture(scope="module")
def migrated(postgres) -> Iterator[dict[str, sa.URL]]:
    name = f"served_{secrets.token_hex(4)}"
    passwords = {role: secrets.token_urlsafe(16) for role in (schema.OWNER, schema.VAULT, schema.LOG)}
    urls = {role: sa.make_url(postgres.url(name)).set(username=role, password=passwords[role]) for role in passwords}
    schema.provision(postgres.url(), urls[schema.OWNER].render_as_string(hide_password=False), passwords)
    schema.migrate(urls[schema.OWNER].render_as_string(hide_password=False))
    yield urls | {"postgres": sa.make_url(postgres.url(name))}
    with schema.opened(postgres.url()) as engine, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql(f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.fixture
def served(migrated, serving_token) -> Iterator[Served]:
    engines = [sa.create_engine(migrated[schema.VAULT], connect_args=arguments) for arguments in ({}, {"options": SITE_WIDE})]
    engines.append(sa.create_engine(migrated["postgres"]))
    yield Served(*engines, migrated[schema.OWNER], serving_token.hsm)
    with engines[-1].begin() as transaction:
        transaction.execute(sql("SET LOCAL session_replication_role = replica"))
        for table in (*tables(transaction), "authority_change", "authority_unsent"):
            transaction.execute(sql(f"DELETE FROM {table}"))
    for engine in engines:
        engine.dispose()


def tables(transaction: Transaction) -> list[str]:
    """Every table that says whose its rows are."""
    return list(transaction.scalars(sql(OWN_TABLES)))


def fill(served: Served) -> list[str]:
    """One row of each of two tenants in every such table, whatever its columns; the tables."""
    values = {
        "text": "'x' || gen_random_uuid()", "uuid": "gen_random_uuid()", "integer": "1", "bigint": "1", "ARRAY": "'{}'",
        "timestamp with time zone": "now()", "bytea": "decode(repeat('00', 16), 'hex')",
    }  # fmt: skip
    fixed = {"kind": "'embedding'", "scope": "'client'", "tenant": ":tenant"}
    with served.superuser.begin() as transaction:
        transaction.execute(sql("SET LOCAL session_replication_role = replica"))  # no row needs another one here
        found = tables(transaction)
        for table in found:
            asked = sql("SELECT column_name, data_type FROM information_schema.columns WHERE table_name = :table")
            columns = transaction.execute(asked, {"table": table}).all()
            row = ", ".join(fixed.get(name, values[kind]) for name, kind in columns)
            for tenant in ("acme", "other"):
                transaction.execute(
                    sql(f"INSERT INTO {table} ({', '.join(name for name, _ in columns)}) VALUES ({row})"), {"tenant": tenant}
                )
    return found


def seen(transaction: Transaction, table: str) -> list[str]:
    return sorted(transaction.scalars(sql(f"SELECT tenant FROM {table}")))


def test_a_forgotten_where_crosses_no_tenant_in_any_table(served):
    """A new table with a tenant's column fails here until it has the policy."""
    found = fill(served)
    assert {"client", "consent", "voice", "voiceprint", "wrapped_key", "tombstone", "usage"} <= set(found)
    for table in found:
        rights = schema.RIGHTS[schema.VAULT][table]
        with durable(served.worker, "acme") as transaction:
            assert seen(transaction, table) == ["acme"], table
            if "UPDATE" in rights:
                assert transaction.execute(sql(f"UPDATE {table} SET tenant = tenant")).rowcount == 1, table
        with durable(served.worker) as transaction:
            assert seen(transaction, table) == [], f"{table}: who names nobody sees nobody's"
        for begin in (lambda: site_wide(served.worker), lambda: durable(served.site), lambda: served.superuser.begin()):
            with begin() as transaction:
                assert seen(transaction, table) == ["acme", "other"], f"{table}, the control: both are there"
        with durable(served.site, "acme") as transaction:
            assert seen(transaction, table) == ["acme"], f"{table}: a tenant's transaction is that in the site's process too"
        if "DELETE" in rights:
            with durable(served.worker, "acme") as transaction:
                assert transaction.execute(sql(f"DELETE FROM {table}")).rowcount == 1
            with site_wide(served.worker) as transaction:
                assert seen(transaction, table) == ["other"], table


def test_no_row_is_written_into_another_tenant(served):
    for table in fill(served):
        if "UPDATE" in schema.RIGHTS[schema.VAULT][table]:
            with pytest.raises(errors.AuditUnavailable), durable(served.worker, "acme") as transaction:
                transaction.execute(sql(f"UPDATE {table} SET tenant = 'other'"))
            with durable(served.worker) as transaction:
                assert transaction.execute(sql(f"UPDATE {table} SET tenant = 'other'")).rowcount == 0, table


def test_the_next_transaction_of_the_connection_is_nobodys(served):
    fill(served)
    with served.worker.connect() as connection:
        for tenant in ("acme", "other"):
            with connection.begin():
                connection.execute(sql("SELECT set_config('app.tenant', :tenant, true)"), {"tenant": tenant})
                assert seen(connection, "voice") == [tenant]
        with connection.begin():
            assert seen(connection, "voice") == []


def test_every_such_table_is_bound_by_it_and_so_is_the_serving_role(served):
    with served.worker.begin() as transaction:
        role = transaction.execute(sql("SELECT rolsuper, rolbypassrls FROM pg_roles WHERE rolname = current_user")).one()
        forced = sql("SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity ORDER BY relname")
        assert not any(role)
        assert list(transaction.scalars(forced)) == tables(transaction)


def test_the_owners_dump_has_every_tenants_rows(served, postgres, tmp_path):
    """A backup that left rows out, because a policy hid them, would be found out too late."""
    found, url = fill(served), served.owner
    environ = {"PGHOST": str(url.query["host"]), "PGUSER": str(url.username), "PGPASSWORD": str(url.password)}

    def dumped(**options: str) -> int:
        """How many tenants' rows the dump has; a row names its tenant once."""
        done = subprocess.run(
            [postgres._bin / "pg_dump", *DUMP_OPTIONS, "--format=plain", "--data-only", url.database],
            env=environ | options, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return sum(done.stdout.count(f"\t{tenant}\t") for tenant in ("acme", "other"))

    assert dumped(PGOPTIONS=SITE_WIDE) == 2 * len(found)
    assert dumped() == 0, "the control: the owner is bound by the policies"


def test_the_gate_decides_within_the_tenant(served, monkeypatch):
    desk, house = served.desk(), served.house()
    device, voice, foreign = desk.client(), desk.voice(), desk.voice("other")
    place = house.audit.place

    def looking():
        return (sql("SELECT count(*) FROM voice"), {}), *place()

    monkeypatch.setattr(house.audit, "place", looking)
    decided = []
    found = house.audit._found

    def kept(transaction, kind, answers):
        decided.append(answers and len(answers) == 3 and answers[0])
        return found(transaction, kind, answers)

    monkeypatch.setattr(house.audit, "_found", kept)
    house.gate.admit(house.speech(device, voice))
    assert decided == [[(1,)], [(1,)]], "token endpoint and gate saw one of the two voices"
    with pytest.raises(errors.VoiceUnknown):
        house.token(device, Purpose.SPEAK, foreign)
    with pytest.raises(errors.ClientUnknown):
        house.token(new_device("stranger"), Purpose.READ)


def test_use_is_counted_and_refusals_are_recorded_within_the_tenant(served):
    desk, house = served.desk(), served.house()
    device, voice, suspended = desk.client(), desk.voice(), desk.voice()
    house.gate.admit(house.speech(device, voice))
    with desk.database.begin() as transaction:
        desk.registry.suspend_voice(transaction, "acme", suspended)
    with pytest.raises(errors.VoiceSuspended):
        house.token(device, Purpose.SPEAK, suspended)
    with site_wide(served.worker) as transaction:
        used = dict(transaction.execute(sql("SELECT scope, sum(requests) FROM usage GROUP BY scope")).all())
        assert transaction.scalar(sql("SELECT attempts FROM usage WHERE scope = 'client'")) == 1
    assert used == {"client": 2, "voice": 2}
