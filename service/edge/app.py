"""The edge application: request shapes, sizes and audio decoding; everything that matters is decided in the vault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from service.edge.document import document
from service.edge.limits import App, BodyCap
from service.edge.proxied import ProxiedCertificate
from service.edge.relay import Relay
from service.edge.routes import approvals, browsers, liveness, speech, system, tickets, tokens, voices
from service.problems import problem, unexpected

DESCRIPTION = """Voiceprints under hardware keys, and speech that proves it may.

Every call but the health checks needs a client certificate (mutual TLS 1.3), except for apps with an upload ticket
(`/v1/enrolments`) and, where the operator names their pages' origins, browsers with a registered key. Calls that touch a
voice need a key-bound token: fetch one at `/oauth/token`, use it once, at once, with a DPoP proof (RFC 9449)."""


DECODERS = 2
"""Decoding children at once in one edge worker."""
UPLOADS = 4
"""Uploads in memory at once in one edge worker."""
TICKET_UPLOADS = 2
"""Of those, how many may come by ticket: whoever has one may send it many times at once and slowly, and shuts no client out."""


PREFLIGHT_S = 600
"""How long a browser may remember what a page of an allowed origin may send."""


def create_app(
    sockets: Sequence[Path], callers: Callable[[App], ProxiedCertificate] | None = None, *, origins: Sequence[str] = ()
) -> FastAPI:
    """The application, relaying to the vault workers at `sockets`. `callers` settles whose certificate a request comes with.

    `origins`: of pages whose browsers may call, with a key and no certificate.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.relay = Relay.to(sockets)
        app.state.decoders = asyncio.Semaphore(DECODERS)
        app.state.uploads = asyncio.Semaphore(UPLOADS)
        app.state.ticket_uploads = asyncio.Semaphore(TICKET_UPLOADS)
        yield
        await app.state.relay.close()

    app = FastAPI(
        title="Glottis", version=version("glottis"), description=DESCRIPTION, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_middleware(BodyCap, browsers=bool(origins))
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "DPoP", "Content-Type"],
            expose_headers=["DPoP-Nonce", "Retry-After", "X-Glottis-Intent", "X-Glottis-Skipped"],
            max_age=PREFLIGHT_S,
        )
    if callers is not None:
        app.add_middleware(callers)  # added last, it is the outermost: it is asked first
    for routes in (system, tokens, browsers, tickets, voices, liveness, approvals, speech):
        app.include_router(routes.router)
    described = document(app)
    app.openapi = lambda: described  # type: ignore[method-assign]  # FastAPI's documented way
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    """Names the field if it is one of ours, never its value: FastAPI's own answer would echo what was sent."""
    assert isinstance(error, RequestValidationError)
    where = sorted({_place(found["loc"], found["type"]) for found in error.errors()})
    kinds = sorted({str(found["type"]) for found in error.errors()})
    named = ", ".join(name for name in where if name)[:200] or "body"
    fix = f"Mend: {named} ({', '.join(kinds)[:200]}). The shapes are in /openapi.json."
    return problem("invalid_request", "The request does not have the shape this call expects.", fix)


def _place(path: Sequence[str | int], kind: str) -> str:
    """Where it is wrong. The name of a field that the call does not know is the caller's own text."""
    known = path[:-1] if kind in ("extra_forbidden", "json_invalid") else path
    return ".".join(str(part) for part in known if part != "body")[:80]


async def _plain(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return problem("method_not_allowed", "This path does not take that method.", "See /openapi.json.")
    if error.status_code == 404:
        return problem("not_found", "There is nothing at this path.", "See / for an index and /openapi.json for every call.")
    return problem("invalid_request", "The request cannot be read.", "Send well-formed HTTP and JSON.")


async def _gone(_: Request, __: Exception) -> JSONResponse:
    return problem("client_disconnected", "The client left before its request was complete.", "Send it again.")


async def _unexpected(_: Request, __: Exception) -> JSONResponse:
    return unexpected()
