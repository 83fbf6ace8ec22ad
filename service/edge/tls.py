"""TLS 1.3 with client certificates that reach the application.

uvicorn shows no client certificate (its pull requests 3132 and 3133 are open), so this subclass of its protocol puts the DER
into the scope, and `client_certificate` is the one function that reads it. A certificate is optional at the handshake and
demanded by the application, so that a client without one reads a clear 401. Resumption is off: each connection checks anew.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "glottis.tls"


class TLSProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also remembers the peer's certificate for the life of the connection."""

    _certificate: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certificate = tls.getpeercert(binary_form=True) if tls is not None else None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions[_EXTENSION] = {"client_certificate": self._certificate}


def client_certificate(request: Request) -> bytes | None:
    """The DER certificate that the peer proved to hold in this connection's handshake, or None."""
    found: dict[str, Any] = request.scope.get("extensions", {}).get(_EXTENSION, {})
    certificate: bytes | None = found.get("client_certificate")
    return certificate


def harden(_: Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """uvicorn's context, made TLS 1.3 only, strict about X.509, without tickets."""
    context = make()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def server_config(app: Any, folder: Path, **options: Any) -> Config:
    """A uvicorn configuration that serves `app` with the keys in `folder` (`server.pem`, `server.key`, `ca.pem`)."""
    return Config(
        app,
        http=TLSProtocol,
        ws="none",  # an upgrade would hand the connection to a protocol that loses the certificate
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        ssl_ca_certs=str(folder / "ca.pem"),
        ssl_cert_reqs=ssl.CERT_OPTIONAL,
        ssl_context_factory=harden,
        server_header=False,
        **options,
    )
