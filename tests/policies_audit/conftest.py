"""An audit log on a real database and a real serving token."""

from pathlib import Path

import pytest
import sqlalchemy
from audit_parts import Log
from hsm_fixtures import ServingToken

from policies.audit.store import AuditStore


@pytest.fixture
def log(database: sqlalchemy.Engine, serving_token: ServingToken, tmp_path: Path) -> Log:
    return Log(database, AuditStore(database, serving_token.hsm), tmp_path / "checkpoint")
