"""Before an edge worker serves: does its server really show the application whose certificate a connection came with?

uvicorn has no documented way to it, so a new version of it could lose the certificate, or keep the one of another connection.
One real TLS 1.3 connection with a client's certificate and one without are made to a server of the very same kind, on the
loopback, with keys that live as long as the test.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from starlette.requests import Request
from uvicorn.server import ServerState

from service import certificates
from service.edge.authorities import Authorities
from service.edge.tls import TLSProtocol, client_certificate, server_config
from service.errors import EdgeSelfTestFailed

_SECONDS = 10.0
_NAME = "localhost"


async def require_client_certificates() -> None:
    """Raise EdgeSelfTestFailed unless each connection's certificate, and no other, reaches the application."""
    with tempfile.TemporaryDirectory(prefix="glottis-edge-") as name:
        folder = Path(name)
        certificate = _keys(folder)
        try:
            async with asyncio.timeout(_SECONDS):
                found = await _seen(folder)
        except (OSError, TimeoutError) as error:
            raise EdgeSelfTestFailed(f"a connection to a server of our own failed: {type(error).__name__}") from error
    if found != [certificate, None, certificate]:
        raise EdgeSelfTestFailed("the application does not see the certificate that the connection came with")


async def _seen(folder: Path) -> list[bytes | None]:
    """What the application sees of a connection with a certificate, of one without, and of one with it again."""
    seen: list[bytes | None] = []

    async def app(scope: Any, _: Any, send: Any) -> None:
        seen.append(client_certificate(Request(scope)))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = server_config(app, folder, factory=Authorities(folder).context_factory(), log_config=None, lifespan="off")
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    server = await loop.create_server(
        lambda: TLSProtocol(config=config, server_state=state, app_state={}), sock=listener, ssl=config.ssl
    )
    async with server:
        for with_certificate in (True, False, True):
            await _ask(listener.getsockname()[1], folder, with_certificate=with_certificate)
    return seen


async def _ask(port: int, folder: Path, *, with_certificate: bool) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if with_certificate:
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=_NAME)
    writer.write(f"GET / HTTP/1.1\r\nHost: {_NAME}\r\nConnection: close\r\n\r\n".encode())
    await reader.read()
    writer.close()
    await writer.wait_closed()


def _keys(folder: Path) -> bytes:
    """An authority's, a server's and a client's; returns the client's certificate (DER)."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = certificates.make_authority(key, "self-test")
    (folder / "ca.pem").write_bytes(authority.public_bytes(Encoding.PEM))
    made = {}
    for name in ("server", "client"):
        private, request = certificates.new_request()
        if name == "server":
            made[name] = certificates.issue_server(key, authority, request, [_NAME])
        else:
            made[name] = certificates.issue_client(key, authority, request, "self-test")
        (folder / f"{name}.key").write_bytes(private)
        (folder / f"{name}.pem").write_bytes(made[name].public_bytes(Encoding.PEM))
    return made["client"].public_bytes(Encoding.DER)
