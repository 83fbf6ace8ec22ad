"""Speech, in the shape of OpenAI's `audio.speech.create`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.edge.routes.answers import CERTIFICATE, CERTIFIED, SPEAKING, SPOKEN
from service.shapes import ModelList, SpeechRequest

router = APIRouter(tags=["speech"])


_SOUND = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/v1/audio/speech",
    responses={**SPOKEN, 200: {"description": "The sound.", "content": {"audio/wav": _SOUND, "audio/pcm": _SOUND}}},
    response_class=Response,
    openapi_extra=SPEAKING,
)
async def speak(request: Request, body: SpeechRequest) -> Response:
    """Speak `input` in a voice that the token names. The answer is a WAV file, or 24 kHz 16-bit mono samples with `pcm`."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer


@router.get("/v1/models", response_model=ModelList, responses=CERTIFIED, openapi_extra=CERTIFICATE)
async def models() -> JSONResponse:
    """The speech models, in OpenAI's form."""
    return JSONResponse(
        {"object": "list", "data": [{"id": "hibari", "object": "model", "created": 1_790_000_000, "owned_by": "glottis"}]}
    )
