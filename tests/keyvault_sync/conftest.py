"""Two sites' databases for a test: each fresh, each gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy
from postgres_fixture import PostgresForTests
from real_sites import Sites, fresh_database


@pytest.fixture
def sites(postgres: PostgresForTests, _template: str) -> Iterator[Sites]:
    """Two sites over fakes of their tokens and real databases, whose roster is endorsed and ring/main/1 active at both."""
    with fresh_database(postgres, _template) as one, fresh_database(postgres, _template) as other:
        yield Sites({"a": one, "b": other})


@pytest.fixture
def second_database(postgres: PostgresForTests, _template: str) -> Iterator[sqlalchemy.Engine]:
    with fresh_database(postgres, _template) as database:
        yield database
