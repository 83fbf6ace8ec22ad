"""Liveness: digits for a voice's speaker to say, and the recording that says them."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import CLIENT, HEARD, PROBLEMS
from service.edge.routes.voices import AUDIO, form
from service.edge.uploads import in_turn
from service.shapes import LivenessAnswer, LivenessPass, LivenessRequest

router = APIRouter(tags=["liveness"])

Challenge = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$", examples=["A" * 62])]
"""As it was given out (RFC 4648 §5). Any other text in a path could be read otherwise once it is passed on."""


@router.post("/v1/liveness", status_code=201, response_model=LivenessAnswer, responses=PROBLEMS, openapi_extra=CLIENT)
async def ask(request: Request, body: LivenessRequest) -> Response:
    """Six digits for the voice's speaker to say within a minute, by themselves, in English. One recording may answer."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer


@router.post(
    "/v1/liveness/{challenge}",
    response_model=LivenessPass,
    responses=HEARD,
    openapi_extra=form({"audio": AUDIO}, ["audio"]) | CLIENT,
)
async def hear(request: Request, challenge: Challenge) -> Response:  # noqa: ARG001 — the vault reads it from the path
    """The recording in which the speaker says the digits. A pass for one token within another minute, or a refusal."""
    return await in_turn(request, partial(request.app.state.relay.forward, request))
