"""Statements that go out together: what one connection has prepared stays prepared, whatever else is done on it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from keyvault.database import send

ONE = (sa.select(sa.literal(1)), {})
FAILS = (sa.select(sa.literal(1) / sa.bindparam("by", 0, sa.Integer)), {"by": 0})


@pytest.fixture
def connection(database):
    with database.connect() as found:
        yield found


def often(connection) -> None:
    """What makes the driver prepare a statement of its own, and drop all that is prepared when a rollback follows."""
    for _ in range(8):
        connection.execute(sa.text("SELECT 2"))
    connection.rollback()


@pytest.mark.parametrize("before", [True, False])
def test_a_rollback_leaves_what_was_prepared(connection, before):
    if before:
        for _ in range(8):
            connection.execute(sa.text("SELECT 2"))
    assert send(connection, ONE) == [[(1,)]]
    for _ in range(3):
        often(connection)
        assert send(connection, ONE) == [[(1,)]]


def test_a_failure_leaves_what_was_prepared(database):
    for _ in range(3):
        with pytest.raises(DBAPIError), database.begin() as transaction:
            send(transaction, FAILS, ONE)
        with database.begin() as transaction:
            assert send(transaction, ONE) == [[(1,)]]
