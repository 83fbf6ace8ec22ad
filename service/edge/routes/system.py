"""Index, health and keys: the calls that need no certificate."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.edge.routes.answers import OPEN, PUBLIC, refusals
from service.shapes import Health, Index, KeySet, Problem, Readiness

router = APIRouter(tags=["system"])


@router.get("/", response_model=Index, responses=PUBLIC, openapi_extra=OPEN)
async def index() -> JSONResponse:
    """What this server is and where to look next."""
    return JSONResponse(
        {
            "name": "glottis",
            "what": "voiceprints under hardware keys, and speech that proves it may",
            "openapi": "/openapi.json",
            "keys": "/.well-known/jwks.json",
            "health": ["/healthz", "/readyz"],
        }
    )


@router.get("/healthz", response_model=Health, responses=PUBLIC, openapi_extra=OPEN)
async def healthz() -> JSONResponse:
    """This process answers. Says nothing about the HSM or the database: a restart would not mend those."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={**PUBLIC, 503: {"model": Readiness | Problem, "description": "Not ready, and what is broken; or no vault answers."}},
    openapi_extra=OPEN,
)
async def readyz(request: Request) -> Response:
    """A vault worker really unwraps a key, reaches the database and finds the log alive (cached for 5 seconds)."""
    answer: Response = await request.app.state.relay.send("GET", "/readyz", [])
    return answer


@router.get("/.well-known/jwks.json", response_model=KeySet, responses=PUBLIC | refusals(503), openapi_extra=OPEN)
async def jwks(request: Request) -> Response:
    """The keys that sign access tokens (RFC 7517)."""
    answer: Response = await request.app.state.relay.send("GET", "/.well-known/jwks.json", [])
    return answer
