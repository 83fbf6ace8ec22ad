"""The embedded Postgres: private, password-protected, and back after every way to die."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from service.embedded import EmbeddedPostgres, new_password, stop
from service.errors import DatabaseUnavailable, HalfMade, StateFolderRefused
from service.isolation import Account, establish, start

PASSWORD = new_password()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A cluster made once and copied for each test."""
    folder = Path(tempfile.mkdtemp(prefix="glottis-"))
    folder.chmod(0o711)
    EmbeddedPostgres(folder / "pg", folder / "run", establish(folder).database).create(PASSWORD)
    yield folder / "pg"
    shutil.rmtree(folder)


@pytest.fixture
def postgres(state_dir: Path, cluster: Path) -> EmbeddedPostgres:
    run = state_dir / "run"
    run.mkdir(mode=0o711)
    subprocess.run(["cp", "-a", cluster, state_dir / "pg"], check=True)
    return EmbeddedPostgres(state_dir / "pg", run / "pg", establish(state_dir).database)


def connect(postgres: EmbeddedPostgres, **changes) -> psycopg.Connection:
    options = {"host": str(postgres.run_folder), "user": "postgres", "password": PASSWORD, "dbname": "postgres"} | changes
    return psycopg.connect(**options)


def postmaster(postgres: EmbeddedPostgres) -> int:
    return int((postgres.folder / "postmaster.pid").read_text().split("\n")[0])


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_serves_on_a_private_socket_with_a_password_only(postgres):
    with postgres.serving(PASSWORD):
        with connect(postgres) as connection:
            assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
            assert connection.execute("SHOW data_checksums").fetchone() == ("on",)
        for wrong in ({"password": "guess"}, {"password": ""}, {"user": "nobody"}):
            with pytest.raises(psycopg.OperationalError, match=r"password authentication failed|no password supplied"):
                connect(postgres, **wrong)
    assert stat.S_IMODE(postgres.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(postgres.run_folder.stat().st_mode) == 0o750


def test_twice_in_a_row_keeps_what_was_written(postgres):
    with postgres.serving(PASSWORD), connect(postgres) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    postgres.create("another password changes nothing")
    with postgres.serving(PASSWORD), connect(postgres) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)


def test_a_killed_postmaster_left_unreaped_is_followed_by_a_good_start(postgres):
    first = postgres._started(PASSWORD, subprocess.DEVNULL)
    with connect(postgres) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    first.kill()  # not waited for: a zombie whose pid still answers to signal 0
    with postgres.serving(PASSWORD), connect(postgres) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)
    first.wait()


def test_a_pid_file_that_names_another_living_process_is_no_obstacle(postgres):
    for pid in (os.getpid(), 1):
        (postgres.folder / "postmaster.pid").write_text(f"{pid}\n{postgres.folder}\n")
        with postgres.serving(PASSWORD):
            assert postmaster(postgres) != pid


def test_a_living_postmaster_is_never_pushed_aside(postgres):
    with postgres.serving(PASSWORD):
        pid = postmaster(postgres)
        with pytest.raises(DatabaseUnavailable, match=f"process {pid} still serves"):
            postgres.clear_stale()
        assert postmaster(postgres) == pid


def test_stop_ends_it_even_with_an_open_session(postgres):
    process = postgres._started(PASSWORD, subprocess.DEVNULL)
    session = connect(postgres)
    began = time.monotonic()
    stop(process)
    assert time.monotonic() - began < 5
    assert not (postgres.folder / "postmaster.pid").exists()
    session.close()


def test_it_dies_with_the_process_that_started_it(postgres, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, subprocess, time; from pathlib import Path\n"
        "from service.embedded import EmbeddedPostgres; from service.isolation import establish\n"
        "folder = Path(sys.argv[1])\n"
        "p = EmbeddedPostgres(folder / 'pg', folder / 'run/pg', establish(folder).database)\n"
        "p._started(sys.argv[2], subprocess.DEVNULL); print('up', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script, postgres.folder.parent, PASSWORD], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout.readline() == b"up\n"
    pid = postmaster(postgres)
    assert not gone(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)


def test_a_first_start_that_was_cut_off_is_done_again(state_dir):
    (state_dir / "run").mkdir(mode=0o711)
    account = establish(state_dir).database
    (state_dir / "pg.new").mkdir()
    (state_dir / "pg.new" / "base").mkdir()
    made = EmbeddedPostgres(state_dir / "pg", state_dir / "run" / "pg", account)
    made.create(PASSWORD)
    assert not (state_dir / "pg.new").exists()
    assert not (state_dir / "pg.new.password").exists()
    assert (state_dir / "pg" / "PG_VERSION").exists()


def test_a_folder_that_is_no_cluster_is_left_alone(state_dir):
    (state_dir / "run").mkdir(mode=0o711)
    (state_dir / "pg").mkdir()
    with pytest.raises(HalfMade, match="no database cluster"):
        EmbeddedPostgres(state_dir / "pg", state_dir / "run" / "pg", establish(state_dir).database).create(PASSWORD)


def test_a_path_too_long_for_a_socket_is_refused_at_once(state_dir):
    with pytest.raises(StateFolderRefused, match="100 is the most"):
        EmbeddedPostgres(state_dir / "pg", state_dir / ("x" * 90) / "pg", Account.current())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run it as another user")
def test_root_opens_no_parent_folder_for_the_database_user(state_dir):
    closed = state_dir / "closed"
    closed.mkdir(mode=0o700)
    (closed / "run").mkdir(mode=0o711)
    made = EmbeddedPostgres(closed / "pg", closed / "run" / "pg", establish(state_dir).database)
    with pytest.raises(StateFolderRefused, match="may not enter"):
        made.create(PASSWORD)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run it as another user")
def test_programs_are_copied_where_the_database_user_may_not_reach_them(state_dir, monkeypatch):
    monkeypatch.setattr("service.embedded.reachable", lambda path: False)
    (state_dir / "run").mkdir(mode=0o711)
    made = EmbeddedPostgres(state_dir / "pg", state_dir / "run" / "pg", establish(state_dir).database)
    made.create(PASSWORD)
    with made.serving(PASSWORD):
        program = Path(f"/proc/{postmaster(made)}/exe").resolve()
    assert program.is_relative_to(state_dir / "postgres")


def test_a_child_cannot_dump_core_or_gain_privileges_and_inherits_nothing(tmp_path):
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    code = "cat /proc/self/status; cat /proc/self/limits; ls /proc/self/fd; env"
    child = start(["/bin/sh", "-c", code], Account.current(), environ={"GLOTTIS_PORT": "1"}, output=subprocess.PIPE)
    said = child.communicate()[0].decode()
    os.close(secret)
    assert "NoNewPrivs:\t1" in said
    assert next(line for line in said.splitlines() if line.startswith("Max core file size")).split()[4:6] == ["0", "0"]
    assert str(secret) not in said.split("GLOTTIS_PORT")[0].splitlines()[-8:]
    assert "HOME=" not in said


def test_its_log_holds_no_values_of_rows(postgres, tmp_path):
    with (tmp_path / "log").open("wb") as log, postgres.serving(PASSWORD, log), connect(postgres) as connection:
        connection.execute("CREATE TABLE person (name text PRIMARY KEY)")
        connection.execute("INSERT INTO person VALUES ('Ada Example')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("INSERT INTO person VALUES ('Ada Example')")
    said = (tmp_path / "log").read_text()
    assert "duplicate key value" in said
    assert "Ada" not in said
