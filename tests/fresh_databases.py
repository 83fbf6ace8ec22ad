"""Empty databases for tests, used again: to make one costs more than most tests do.

A database goes back only if its schema is, object for object, what it was; otherwise it is dropped.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import sqlalchemy
from psycopg.sql import SQL, Identifier

_names = itertools.count()

# What a test could change and leave behind: tables, columns, constraints, triggers, functions, rights and row policies.
_SCHEMA = """
SELECT md5(string_agg(line, ';' ORDER BY line)) FROM (
    SELECT concat_ws(',', 'class', oid, relname, relowner, relkind, relacl, reloptions, relrowsecurity, relforcerowsecurity) AS line
        FROM pg_class WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(',', 'column', attrelid, attnum, attname, atttypid, attnotnull, attisdropped, attacl)
        FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = 'public'::regnamespace AND attnum > 0
    UNION ALL SELECT concat_ws(',', 'constraint', oid, conname, convalidated, pg_get_constraintdef(oid))
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(',', 'trigger', oid, tgname, tgenabled, tgtype) FROM pg_trigger
    UNION ALL SELECT concat_ws(',', 'function', oid, proname, proacl, md5(prosrc)) FROM pg_proc
        WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(',', 'policy', oid, polname) FROM pg_policy
    UNION ALL SELECT concat_ws(',', 'rule', r.oid, rulename) FROM pg_rewrite r JOIN pg_class c ON c.oid = ev_class
        WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(',', 'schema', nspname, nspacl) FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%'
    UNION ALL SELECT concat_ws(',', 'setting', setrole, setconfig) FROM pg_db_role_setting
    UNION ALL SELECT concat_ws(',', 'database', datacl) FROM pg_database WHERE datname = current_database()
) AS lines
"""
_OTHERS = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_SEQUENCES = "SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value IS NOT NULL"
_TABLES = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"


class FreshDatabases:
    """Databases like one template, each in one test's hands at a time. `url` makes an SQLAlchemy URL of a database's name."""

    def __init__(self, url: Callable[[str], str], template: str) -> None:
        self._url, self._template = url, template
        self._free: list[str] = []
        with self._connection(template) as connection:
            self._schema = self._digest(connection)

    @contextmanager
    def one(self, **pool: int) -> Iterator[sqlalchemy.Engine]:
        """An engine on a database that holds every table and no row; `pool` are its options."""
        name = self._free.pop() if self._free else self._made()
        engine = sqlalchemy.create_engine(self._url(name), **pool)
        try:
            yield engine
        finally:
            engine.dispose()
            if self._emptied(name):
                self._free.append(name)
            else:
                self._administer("DROP DATABASE {} WITH (FORCE)", name)

    def _made(self) -> str:
        name = f"test_{os.getpid()}_{next(_names)}"
        self._administer("CREATE DATABASE {} TEMPLATE {}", name, self._template)
        return name

    def _emptied(self, name: str) -> bool:
        """Whether it is again what it was when it was made."""
        with self._connection(name) as connection:
            connection.execute(_OTHERS)
            if self._digest(connection) != self._schema:
                return False
            tables = [Identifier(row[0]) for row in connection.execute(_TABLES)]
            counted = SQL(", ").join(SQL("EXISTS (SELECT FROM {})").format(table) for table in tables)
            used = connection.execute(SQL("SELECT {}").format(counted)).fetchone() or ()
            full = [table for table, is_used in zip(tables, used, strict=True) if is_used]
            if full:
                connection.execute("SET session_replication_role = replica")  # no trigger stands against it
                connection.execute(SQL("TRUNCATE {} CASCADE").format(SQL(", ").join(full)))
            for row in connection.execute(_SEQUENCES):
                connection.execute(SQL("ALTER SEQUENCE {} RESTART").format(Identifier(row[0])))
        return True

    def _digest(self, connection: psycopg.Connection) -> str:
        found = connection.execute(_SCHEMA).fetchone()
        assert found is not None
        return str(found[0])

    def _connection(self, name: str) -> psycopg.Connection:
        return psycopg.connect(self._url(name).replace("+psycopg", ""), autocommit=True)

    def _administer(self, statement: str, *names: str) -> None:
        with self._connection("postgres") as connection:
            connection.execute(SQL(statement).format(*map(Identifier, names)))
