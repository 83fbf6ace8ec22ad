"""Which processes make up Glottis: who runs each, what it inherits, and how one sees that it serves."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from service import bringup
from service.embedded import ENVIRON as DATABASE_ENVIRON
from service.embedded import EmbeddedPostgres
from service.errors import PortTaken
from service.isolation import Account, Isolation
from service.settings import Settings
from service.supervisor import Program, Supervisor, signals_held

_PROBE_SECONDS = 2.0
_ENVIRON = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "MALLOC_ARENA_MAX": "2",  # one heap a thread would keep what each thread once needed
    "ORT_DISABLE_TELEMETRY": "1",  # the ONNX Runtime would report to its maker
    "OPENBLAS_NUM_THREADS": "1",  # a second thread costs more than it gives on vectors this small
}
_BACKLOG = 128


@contextlib.contextmanager
def running(settings: Settings, say: Callable[[str], None]) -> Iterator[Supervisor]:
    """All of Glottis, serving, until the block ends. Call it in the main thread.

    Inside the block, `watch()` on what it yields keeps everything up until a signal asks to stop. Raises ServiceError or
    KeyVaultError with what to do; a signal during the start ends the block's start by Stopped. Nothing is left running.
    """
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listening(settings))
        except PortTaken:
            # Most likely by the Glottis that holds this very folder: then that is the message.
            if settings.state_dir.exists():
                stack.enter_context(bringup.held(settings))
            raise
        stack.enter_context(bringup.held(settings))
        installation = bringup.prepare_files(settings)
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in settings.vault_sockets]
        for unix, path in zip(sockets, settings.vault_sockets, strict=True):
            _bind(unix, path, installation.isolation)
        stack.enter_context(signals_held())
        supervisor = Supervisor(settings.log_dir, say)
        stack.callback(supervisor.stop)
        if installation.postgres is not None:
            supervisor.start([database(installation.postgres, bringup.superuser_password(settings))])
        bringup.prepare_schema(installation)
        supervisor.start([*vaults(settings, installation.isolation, sockets), log(settings, installation.isolation)])
        supervisor.start(edges(settings, installation.isolation, listener))
        yield supervisor


def database(postgres: EmbeddedPostgres, password: str) -> Program:
    """The embedded Postgres. It is stopped fast, then at once; both keep what was committed."""
    return Program(
        "postgres",
        postgres.argv(),
        postgres.account,
        DATABASE_ENVIRON,
        ready=lambda: postgres.answers(password),
        before=postgres.clear_stale,
        death_signal=signal.SIGQUIT,
        stop_signals=((signal.SIGINT, 2.5), (signal.SIGQUIT, 1.5)),
    )


def vaults(settings: Settings, isolation: Isolation, sockets: Sequence[socket.socket]) -> list[Program]:
    """The vault workers, each on a Unix socket of its own."""
    groups = isolation.database_groups(embedded=settings.embedded)
    return [
        _worker(settings, "vault", number, isolation.vault, unix, partial(vault_serves, path), groups)
        for number, (unix, path) in enumerate(zip(sockets, settings.vault_sockets, strict=True))
    ]


def log(settings: Settings, isolation: Isolation) -> Program:
    """The log process. It listens nowhere: a second of life says that its token and database let it in."""
    born = [0.0]

    def note_birth() -> None:
        born[0] = time.monotonic()

    argv = [sys.executable, "-P", "-m", "service.log"]
    environ = _ENVIRON | settings.environ(worker="log")
    groups = isolation.database_groups(embedded=settings.embedded)
    return Program("log", argv, isolation.log, environ, lambda: time.monotonic() - born[0] > 1.0, groups, before=note_birth)


def edges(settings: Settings, isolation: Isolation, listener: socket.socket) -> list[Program]:
    """The edge workers, all on one listening socket."""
    return [
        _worker(settings, "edge", number, isolation.edge, listener, partial(edge_serves, settings), ())
        for number in range(settings.edge_workers)
    ]


def vault_serves(path: Path) -> bool:
    """Whether the vault worker at this Unix socket can open a voice now."""
    with socket.socket(socket.AF_UNIX) as unix:
        unix.settimeout(_PROBE_SECONDS)
        try:
            unix.connect(str(path))
        except OSError:
            return False
        return _answers(unix, "/readyz")


def edge_serves(settings: Settings) -> bool:
    """Whether the edge answers over TLS with this installation's certificate."""
    context = ssl.create_default_context(cafile=str(settings.officer_dir / "ca.pem"))
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)  # noqa: S104 — compared, not bound
    try:
        with (
            socket.create_connection((address, settings.port), _PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            return _answers(tls, "/healthz")
    except OSError:
        return False


def _answers(connected: socket.socket, path: str) -> bool:
    client = http.client.HTTPConnection("localhost")
    client.sock = connected
    try:
        client.request("GET", path, headers={"Connection": "close"})
        with contextlib.closing(client.getresponse()) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def _worker(
    settings: Settings,
    part: str,
    number: int,
    account: Account,
    listening: socket.socket,
    ready: Callable[[], bool],
    groups: Sequence[int],
) -> Program:
    name, descriptor = f"{part}-{number}", listening.fileno()
    environ = _ENVIRON | settings.environ(worker=number, listen_fd=descriptor)
    argv = [sys.executable, "-P", "-m", f"service.{part}"]
    return Program(name, argv, account, environ, ready, groups, (descriptor,))


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The TCP socket that the edge serves on. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    with socket.socket(family) as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where = f"{settings.bind} port {settings.port}"
        try:
            tcp.bind((settings.bind, settings.port))
            tcp.listen(_BACKLOG)
        except PermissionError:
            raise PortTaken(f"this user may not listen on {where}", fix="Choose a port above 1023 in GLOTTIS_PORT.") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"another program listens on {where}") from None
            raise PortTaken(f"cannot listen on {where}: {error.strerror}", fix="Correct GLOTTIS_BIND.") from None
        yield tcp


def _bind(unix: socket.socket, path: Path, isolation: Isolation) -> None:
    """Listen on a Unix socket that the edge's group alone may write to; the vault inherits it and needs no path."""
    path.unlink(missing_ok=True)
    unix.bind(str(path))
    path.chmod(0o600)
    if isolation.separate:
        os.chown(path, isolation.officer.uid, isolation.edge.gid)
        path.chmod(0o660)
    unix.listen(_BACKLOG)
