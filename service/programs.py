"""Which processes make up Glottis: who runs each, what it inherits, and how one sees that it serves."""

from __future__ import annotations

import contextlib
import errno
import grp
import http.client
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from policies.throttle import ATTEMPTS, fresh_counters
from service import bringup, founding
from service.bringup import Installation
from service.embedded import ENVIRON as DATABASE_ENVIRON
from service.embedded import EmbeddedPostgres
from service.errors import PortTaken, SettingsRefused, SiteNotAdmitted
from service.holding import held
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
            serves = settings.serves and settings.edge_tcp
            listener = stack.enter_context(listening(settings.bind, settings.port, "GLOTTIS_PORT")) if serves else None
        except PortTaken:
            # Most likely by the Glottis that holds this very folder: then that is the message.
            if settings.state_dir.exists():
                stack.enter_context(held(settings))
            raise
        stack.enter_context(held(settings))
        installation = bringup.prepare_files(settings)
        if not settings.roster_file.exists():
            raise SiteNotAdmitted
        founding.first_master(installation)
        sites = _Sites.of(installation, stack)
        stack.enter_context(signals_held())
        supervisor = Supervisor(settings.log_dir, say)
        stack.callback(supervisor.stop)
        supervisor.begin(sites.second())
        if installation.postgres is not None:
            supervisor.start([database(installation.postgres, bringup.superuser_password(settings))])
        bringup.prepare_schema(installation)
        supervisor.start([sites.process(), log(settings, installation.isolation)])
        founding.found(installation, supervisor.tend)
        if settings.serves:
            _serve(installation, supervisor, listener, stack)
        yield supervisor


def _serve(installation: Installation, supervisor: Supervisor, listener: socket.socket | None, stack: contextlib.ExitStack) -> None:
    """Start the vault workers, then the edge."""
    settings, isolation = installation.settings, installation.isolation
    sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in settings.vault_sockets]
    for unix, path in zip(sockets, settings.vault_sockets, strict=True):
        _bind(unix, path, isolation)
    # Counted anew with each start, by all vault workers together; nobody else has business with it.
    isolation.vault.file(settings.run_dir / ATTEMPTS, fresh_counters())
    supervisor.start(vaults(settings, isolation, sockets))
    proxied = stack.enter_context(socket.socket(socket.AF_UNIX)) if settings.edge_socket else None
    if proxied is not None:
        bind_for_proxy(proxied, settings)
    supervisor.start(edges(settings, isolation, listener, proxied))


@dataclass(frozen=True)
class _Sites:
    """The site process with its two sockets, and the second site where this installation starts it."""

    installation: Installation
    admin: socket.socket
    link: socket.socket | None
    other: socket.socket | None

    @classmethod
    def of(cls, installation: Installation, stack: contextlib.ExitStack) -> _Sites:
        """Listen for the operator and for the other site. Raises PortTaken."""
        settings = installation.settings
        admin = stack.enter_context(socket.socket(socket.AF_UNIX))
        settings.admin_socket.unlink(missing_ok=True)
        admin.bind(str(settings.admin_socket))
        settings.admin_socket.chmod(0o600)
        admin.listen(_BACKLOG)
        link, other = None, None
        if settings.peer_fd is not None:  # the first site listens for us, as it had to know the port before we were there
            link = stack.enter_context(socket.socket(fileno=settings.peer_fd))
        elif settings.sites == 2:
            link = stack.enter_context(listening(settings.site_bind, settings.site_port, "GLOTTIS_SITE_PORT"))
        if installation.second is not None:
            other = stack.enter_context(listening(settings.site_bind, 0, "GLOTTIS_SITE_PORT"))
        return cls(installation, admin, link, other)

    def process(self) -> Program:
        """The site process."""
        settings, isolation = self.installation.settings, self.installation.isolation
        sockets = [one for one in (self.admin, self.link) if one is not None]
        fds: dict[str, object] = {"listen_fd": self.admin.fileno(), "peer_fd": self.link.fileno() if self.link else None}
        if self.other is not None:
            fds["peer_url"] = _url(self.other)
        environ = _ENVIRON | settings.environ(worker="site", **fds)
        argv, groups = [sys.executable, "-P", "-m", "service.sync"], isolation.database_groups(embedded=settings.embedded)
        descriptors = [one.fileno() for one in sockets]
        return Program("site", argv, isolation.vault, environ, partial(unix_serves, settings.admin_socket), groups, descriptors)

    def second(self) -> list[Program]:
        """`glottis up` of the second site's folder. Nothing here waits for it or ends with it: the first site serves without."""
        second = self.installation.second
        if second is None or self.other is None or self.link is None:
            return []
        environ = _ENVIRON | second.environ(peer_fd=self.other.fileno(), peer_url=_url(self.link))
        argv = [sys.executable, "-P", "-m", "service.cli.main", "up"]
        ready = partial(unix_serves, second.admin_socket)
        officer, descriptors = self.installation.isolation.officer, [self.other.fileno()]
        ends = ((signal.SIGTERM, 12.0),)  # its own stages are given 11.5 s together, as this site's are
        return [Program("site-b", argv, officer, environ, ready, (), descriptors, stop_signals=ends, vital=False)]


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


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
        _worker(settings, "vault", number, isolation.vault, unix, partial(unix_serves, path), groups)
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


def edges(
    settings: Settings, isolation: Isolation, listener: socket.socket | None, proxied: socket.socket | None = None
) -> list[Program]:
    """The edge workers: as many on the TCP socket as on the Unix socket where a proxy comes in, each on one of them alone."""
    found = []
    if listener is not None:
        ready = partial(edge_serves, settings)
        numbers: list[int | str] = list(range(settings.edge_workers))
        found += [_worker(settings, "edge", number, isolation.edge, listener, ready, ()) for number in numbers]
    if proxied is not None and settings.edge_socket is not None:
        ready = partial(unix_serves, settings.edge_socket, "/healthz")
        numbers = [f"proxied-{number}" for number in range(settings.edge_workers)]
        found += [_worker(settings, "edge", number, isolation.edge, proxied, ready, ()) for number in numbers]
    return found


def unix_serves(path: Path, ask: str = "/readyz") -> bool:
    """Whether the vault worker, site process or edge at this Unix socket can do its work now."""
    with socket.socket(socket.AF_UNIX) as unix:
        unix.settimeout(_PROBE_SECONDS)
        try:
            unix.connect(str(path))
        except OSError:
            return False
        return _answers(unix, ask)


def edge_serves(settings: Settings) -> bool:
    """Whether the edge answers over TLS with this installation's certificate."""
    context = ssl.create_default_context(cafile=str(settings.tls_dir / "ca.pem"))
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
    number: int | str,
    account: Account,
    listening: socket.socket,
    ready: Callable[[], bool],
    groups: Sequence[int],
) -> Program:
    name, descriptor = f"{part}-{number}", listening.fileno()
    environ = _ENVIRON | settings.environ(worker=number, listen_fd=descriptor)
    argv = [sys.executable, "-P", "-m", f"service.{part}"]
    return Program(name, argv, account, environ, ready, groups, (descriptor,), replaceable=part == "vault")


@contextlib.contextmanager
def listening(bind: str, port: int, setting: str) -> Iterator[socket.socket]:
    """A TCP socket to serve on, whose port this `setting` names. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where = f"{bind} port {port}"
        try:
            tcp.bind((bind, port))
            tcp.listen(_BACKLOG)
        except PermissionError:
            raise PortTaken(f"this user may not listen on {where}", fix=f"Choose a port above 1023 in {setting}.") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"another program listens on {where}", fix=f"Stop it, or name a free port in {setting}.") from None
            named = setting.replace("_PORT", "_BIND")
            raise PortTaken(f"cannot listen on {where}: {error.strerror}", fix=f"Correct {named}.") from None
        yield tcp


def bind_for_proxy(unix: socket.socket, settings: Settings) -> None:
    """Listen at GLOTTIS_EDGE_SOCKET, which its owner and the proxy's group alone may connect to. Raises SettingsRefused."""
    path, group = settings.edge_socket, settings.edge_socket_group
    assert path is not None
    try:
        if path.is_socket():
            path.unlink()
        unix.bind(str(path))
        path.chmod(0o600)
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
            path.chmod(0o660)
    except KeyError:
        raise SettingsRefused(f"GLOTTIS_EDGE_SOCKET_GROUP: there is no group {group}") from None
    except OSError as error:
        raise SettingsRefused(f"GLOTTIS_EDGE_SOCKET: cannot listen at {path}: {error.strerror}") from error
    unix.listen(_BACKLOG)


def _bind(unix: socket.socket, path: Path, isolation: Isolation) -> None:
    """Listen on a Unix socket that the edge's group alone may write to; the vault inherits it and needs no path."""
    path.unlink(missing_ok=True)
    unix.bind(str(path))
    path.chmod(0o600)
    if isolation.separate:
        os.chown(path, isolation.officer.uid, isolation.edge.gid)
        path.chmod(0o660)
    unix.listen(_BACKLOG)
