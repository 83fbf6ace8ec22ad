"""Index, health and keys: the calls that need no certificate."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

router = APIRouter(tags=["system"])


@router.get("/")
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


@router.get("/healthz")
async def healthz() -> JSONResponse:
    """This process answers. Says nothing about the HSM or the database: a restart would not mend those."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """A vault worker really unwraps a key, reaches the database and finds the log alive (cached for 5 seconds)."""
    answer: Response = await request.app.state.relay.send("GET", "/readyz", [])
    return answer


@router.get("/.well-known/jwks.json")
async def jwks(request: Request) -> Response:
    """The keys that sign access tokens (RFC 7517)."""
    answer: Response = await request.app.state.relay.send("GET", "/.well-known/jwks.json", [])
    return answer
