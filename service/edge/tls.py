"""TLS 1.3 with client certificates that reach the application.

uvicorn shows no client certificate (its pull requests 3132 and 3133 are open), so this subclass of its protocol puts the DER
into the scope, and `client_certificate` is the one function that reads it. A certificate is optional at the handshake and
demanded by the application, so that a client without one reads a clear 401. Resumption is off: each connection checks anew.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "glottis.connection"


HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
"""How long a peer may take to send its request's head, and then its body, before the connection is cut."""
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 512
"""Open connections of one edge worker; one more is cut at once, so that the descriptors never run out."""


@dataclass
class Connection:
    """What a request's connection says about its client."""

    certificate: bytes | None
    """The DER certificate that the peer proved to hold in the handshake; or that a proxy reports (`service.edge.proxied`)."""
    unix: bool = False
    """Whether it came in at a Unix socket."""


class TLSProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which remembers the peer's certificate, and cuts peers that take too long or send too much."""

    _certificate: bytes | None = None
    _unix = False
    _deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certificate = tls.getpeercert(binary_form=True) if tls is not None else None
        self._unix = transport.get_extra_info("socket").family == socket.AF_UNIX
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._allow(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._allow(HEADER_SECONDS)
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions[_EXTENSION] = Connection(self._certificate, self._unix)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._allow(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._allow(None)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        super().connection_lost(exc)

    def _allow(self, seconds: float | None) -> None:
        """Cut the connection when these seconds are over; None: no limit (idle connections are uvicorn's to close)."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def client_certificate(request: Request) -> bytes | None:
    """The DER certificate that this request's client proved to hold in its handshake, with us or with a proxy of ours, or None."""
    return connection_of(request.scope).certificate


def connection_of(scope: MutableMapping[str, Any]) -> Connection:
    """The connection of a request's scope; one that says nothing where another server made the scope."""
    found: Connection = scope.get("extensions", {}).get(_EXTENSION) or Connection(None)
    return found


ContextFactory = Callable[[Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]


def harden(_: Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """uvicorn's context, made TLS 1.3 only, strict about X.509, without tickets."""
    context = make()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def server_config(
    app: Any,
    folder: Path,
    *,
    certificates: ssl.VerifyMode = ssl.CERT_OPTIONAL,
    factory: ContextFactory = harden,
    **options: Any,
) -> Config:
    """A uvicorn configuration that serves `app` with the keys in `folder` (`server.pem`, `server.key`, `ca.pem`).

    `certificates` says what is demanded of peers in the handshake itself; `factory` makes the context.
    """
    return unix_config(
        app,
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        ssl_ca_certs=str(folder / "ca.pem"),
        ssl_cert_reqs=certificates,
        ssl_context_factory=factory,
        **options,
    )


def unix_config(app: Any, **options: Any) -> Config:
    """The same without TLS: for a Unix socket, where the other end is a proxy on this machine."""
    return Config(
        app,
        http=TLSProtocol,
        ws="none",  # an upgrade would hand the connection to a protocol that loses the certificate
        server_header=False,
        proxy_headers=False,  # what X-Forwarded-* says is nobody's word
        **options,
    )
