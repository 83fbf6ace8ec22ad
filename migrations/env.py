"""Runs the steps on the connection that the caller put into the configuration: no URL, and so no password, stands in a file."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from keyvault.database import metadata

connection: Connection = context.config.attributes["connection"]
# A step that waits behind a long transaction would block everybody else behind itself.
connection.execute(text("SET lock_timeout = '5s'"))
connection.execute(text("SET statement_timeout = '60s'"))
connection.commit()
context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
