"""The door to the database: one place that knows SQLAlchemy's types, so that others can name them."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, MetaData

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""Every table of every package hangs here, so that the migrated schema can be compared with the whole."""

Database = Engine
"""Opens transactions: `with database.begin() as transaction:`."""

Transaction = Connection
"""A connection inside `begin()`. Stores write into the caller's transaction and never commit."""
