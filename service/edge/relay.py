"""The edge's only way inward: the vault workers' Unix sockets. The worker with the fewest open requests is asked first.

A connection that cannot be made is tried at the next worker (nothing was sent yet); a request that broke off is not sent
again: it may have spent its token.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from service.edge.limits import of_browsers
from service.edge.tls import client_certificate
from service.problems import certificate_required, problem

CERTIFICATE_HEADER = "x-glottis-client-cert"
_PASSED_IN = ("authorization", "xi-api-key", "dpop", "content-type")
_PASSED_OUT = (
    "content-type",
    "cache-control",
    "retry-after",
    "x-glottis-intent",
    "x-glottis-skipped",
    "x-should-retry",
    "www-authenticate",
    "dpop-nonce",
)

_LOOK_S = 0.25

Body = bytes | AsyncIterator[bytes]


@dataclass
class Worker:
    """One vault worker as the edge sees it."""

    client: httpx.AsyncClient
    open_requests: int = 0


@dataclass
class Relay:
    """Passes requests to the vault, with the client's certificate and without anything else that it did not sign."""

    workers: Sequence[Worker] = field(default_factory=list)

    @classmethod
    def to(cls, sockets: Sequence[Path], *, timeout_s: float = 60.0) -> Relay:
        """A relay to these sockets. Connections are not kept, so that no worker holds them all."""

        def client(path: Path) -> httpx.AsyncClient:
            transport = httpx.AsyncHTTPTransport(uds=str(path), limits=httpx.Limits(max_keepalive_connections=0))
            return httpx.AsyncClient(transport=transport, base_url="http://vault", timeout=timeout_s, trust_env=False)

        return cls([Worker(client(path)) for path in sockets])

    async def close(self) -> None:
        for worker in self.workers:
            await worker.client.aclose()

    async def forward(self, request: Request, body: Body = b"") -> Response:
        """The vault's answer to this request, as it is; `vault_unavailable` if there is none."""
        headers = [(k, v) for k, v in request.headers.items() if k in _PASSED_IN]
        if not all(value.isascii() for _, value in headers):
            return problem(
                "invalid_request", "A header holds bytes that no header may.", "Send Authorization and DPoP as they were made."
            )
        certificate = client_certificate(request)
        if certificate is None and not of_browsers(request.scope):
            return certificate_required()
        if certificate is not None:
            headers.append((CERTIFICATE_HEADER, base64.b64encode(certificate).decode()))
        return await self.carry(request, headers, body)

    async def carry(self, request: Request, headers: list[tuple[str, str]], body: Body = b"") -> Response:
        """The vault's answer to this request with these headers alone."""
        sending = self.send(request.method, request.url.path, headers, body)
        return await (_while_connected(request, sending) if isinstance(body, bytes) else sending)

    async def send(self, method: str, path: str, headers: list[tuple[str, str]], body: Body = b"") -> Response:
        """One request to the least busy worker that accepts the connection."""
        for worker in sorted(self.workers, key=lambda w: w.open_requests):
            worker.open_requests += 1
            try:
                answer = await worker.client.request(method, path, headers=headers, content=body)
            except httpx.ConnectError:
                continue
            except httpx.HTTPError:
                return _unavailable()
            finally:
                worker.open_requests -= 1
            passed = {k: v for k, v in answer.headers.items() if k in _PASSED_OUT}
            return Response(answer.content, status_code=answer.status_code, headers=passed)
        return _unavailable()


async def _while_connected(request: Request, sending: Coroutine[Any, Any, Response]) -> Response:
    """The answer; or the request to the vault is broken off when its client has left, so that the vault stops too."""
    task = asyncio.create_task(sending)
    while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
        if await request.is_disconnected():
            task.cancel()
            await asyncio.wait({task})
            return problem("client_disconnected", "The client left.", "Send it again with a fresh token.")
    return task.result()


def _unavailable() -> Response:
    return problem("vault_unavailable", "The vault did not answer.", "Retry with a fresh token; if it lasts, see `glottis doctor`.")
