"""Two sites' databases for a test: each fresh, each gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy
from fresh_databases import FreshDatabases
from real_sites import Sites


@pytest.fixture
def sites(databases: FreshDatabases) -> Iterator[Sites]:
    """Two sites over fakes of their tokens and real databases, whose roster is endorsed and ring/main/1 active at both."""
    with databases.one(pool_size=4) as one, databases.one(pool_size=4) as other:
        yield Sites({"a": one, "b": other})


@pytest.fixture
def second_database(databases: FreshDatabases) -> Iterator[sqlalchemy.Engine]:
    with databases.one(pool_size=4) as database:
        yield database
