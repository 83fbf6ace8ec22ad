"""An audit log on a real database and a real serving token."""

from pathlib import Path

import pytest
import sqlalchemy
from audit_parts import Log
from hsm_fixtures import ServingToken, serving_token  # noqa: F401 — a fixture

from policies.audit.store import AuditStore


@pytest.fixture
def log(database: sqlalchemy.Engine, serving_token: ServingToken, tmp_path: Path) -> Log:  # noqa: F811 — a fixture
    return Log(database, AuditStore(database, serving_token.hsm), tmp_path / "checkpoint")
