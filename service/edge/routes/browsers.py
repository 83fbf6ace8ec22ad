"""Keys made in a browser, registered by a one-time code."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import PROBLEMS, REGISTERING
from service.shapes import BrowserKeyAnswer, BrowserKeyRequest

router = APIRouter(tags=["browsers"])


@router.post("/v1/browser-keys", status_code=201, response_model=BrowserKeyAnswer, responses=PROBLEMS, openapi_extra=REGISTERING)
async def register(request: Request, body: BrowserKeyRequest) -> Response:
    """Register the key that signed the DPoP proof, whose `ath` is the hash of the code. From then on it asks for tokens."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer
