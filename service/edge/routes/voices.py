"""Consents and voices: record what a speaker allowed, enrol, look up, verify."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import CLIENT, HEARD, OPENING, PROBLEMS, READING
from service.edge.uploads import in_turn
from service.shapes import MAX_RECORDINGS, BandAnswer, ConsentAnswer, ConsentRequest, ErasureAnswer, VoiceAnswer, VoiceList

router = APIRouter(tags=["voices"])


def _voice_id(voice: UUID) -> UUID:
    """Looks at the path parameter's shape; the vault reads it from the path again."""
    return voice


def form(fields: dict[str, object], required: list[str]) -> dict[str, object]:
    schema = {"type": "object", "required": required, "properties": fields}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


AUDIO: dict[str, object] = {
    "type": "array",
    "items": {"type": "string", "format": "binary"},
    "minItems": 1,
    "maxItems": MAX_RECORDINGS,
}
NAME: dict[str, object] = {"type": "string", "minLength": 1, "maxLength": 100, "example": "Ada's voice"}


@router.post("/v1/consents", status_code=201, response_model=ConsentAnswer, responses=PROBLEMS, openapi_extra=CLIENT)
async def record_consent(request: Request, body: ConsentRequest) -> Response:
    """Record what a speaker allowed. Every later use of the voice is held against it."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer


@router.post(
    "/v1/voices",
    status_code=201,
    response_model=VoiceAnswer,
    responses=HEARD,
    openapi_extra=form({"name": NAME, "audio": AUDIO}, ["name", "audio"]) | CLIENT,
)
async def enrol(request: Request) -> Response:
    """Enrol a speaker from one to ten recordings under the consent that the token names."""
    return await in_turn(request, partial(request.app.state.relay.forward, request))


@router.get("/v1/voices", response_model=VoiceList, responses=PROBLEMS, openapi_extra=READING)
async def voices(request: Request) -> Response:
    """The tenant's voices: names and states, nothing measured."""
    answer: Response = await request.app.state.relay.forward(request)
    return answer


@router.get(
    "/v1/voices/{voice}", dependencies=[Depends(_voice_id)], response_model=VoiceAnswer, responses=PROBLEMS, openapi_extra=READING
)
async def voice(request: Request) -> Response:
    """One voice's name and state."""
    answer: Response = await request.app.state.relay.forward(request)
    return answer


@router.delete(
    "/v1/voices/{voice}", dependencies=[Depends(_voice_id)], response_model=ErasureAnswer, responses=PROBLEMS, openapi_extra=CLIENT
)
async def erase(request: Request) -> Response:
    """Erase a voice, with or without a consent that still holds. What stays is a tombstone that names nobody."""
    answer: Response = await request.app.state.relay.forward(request)
    return answer


@router.post(
    "/v1/voices/{voice}/verify",
    dependencies=[Depends(_voice_id)],
    response_model=BandAnswer,
    responses=HEARD,
    openapi_extra=form({"audio": AUDIO}, ["audio"]) | OPENING,
)
async def verify(request: Request) -> Response:
    """Is this recording the voice's speaker? Answers with a band."""
    return await in_turn(request, partial(request.app.state.relay.forward, request))
