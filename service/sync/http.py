"""Where the other site's calls arrive: mutual TLS 1.3, one peer by name, bodies of at most one message."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from cryptography import x509
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn import Config

from keyvault.sync.wire import MAX_BYTES
from service.edge.tls import client_certificate, server_config

THREADS = 8
"""Calls in hand at once: each step of a site runs alone anyway."""

Serve = Callable[[str, bytes], bytes]
"""(method, message) to reply: `keyvault.sync.peer.serve` over this site's node."""

_log = structlog.get_logger()


def create_app(serve: Serve, peer: str) -> Starlette:
    """The application that answers the site whose certificate carries the one name `peer`, and nobody else."""
    threads = anyio.CapacityLimiter(THREADS)

    async def answer(request: Request) -> Response:
        if names_of(client_certificate(request)) != [peer]:
            _log.warning("foreign_peer_refused")
            return Response(status_code=403)
        try:
            message = await _body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if message is None:
            return Response(status_code=413)
        method = request.path_params["method"]
        return Response(await anyio.to_thread.run_sync(serve, method, message, limiter=threads))

    async def failed(_: Request, error: Exception) -> Response:
        _log.error("call_failed", exc_info=error)
        return Response(status_code=500)

    return Starlette(routes=[Route("/{method}", answer, methods=["POST"])], exception_handlers={Exception: failed})


def config(app: Starlette, folder: Path) -> Config:
    """Served with this site's own certificate; a connection without one of our authority ends in its handshake."""
    return server_config(app, folder, certificates=ssl.CERT_REQUIRED, log_config=None, access_log=False, lifespan="off")


def names_of(certificate: bytes | None) -> list[str]:
    """The DNS names of a certificate (DER) that the handshake verified; none for one that has none."""
    if certificate is None:
        return []
    try:
        found = x509.load_der_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found.value]


async def _body(request: Request) -> bytes | None:
    message = bytearray()
    async for piece in request.stream():
        message += piece
        if len(message) > MAX_BYTES:
            return None
    return bytes(message)
