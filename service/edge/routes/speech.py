"""Speech, in the shape of OpenAI's `audio.speech.create`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.edge.routes.answers import PROBLEMS
from service.shapes import SpeechRequest

router = APIRouter(tags=["speech"])


@router.post(
    "/v1/audio/speech", responses={**PROBLEMS, 200: {"content": {"audio/wav": {}, "audio/pcm": {}}}}, response_class=Response
)
async def speak(request: Request, body: SpeechRequest) -> Response:
    """Speak `input` in a voice that the token names. The answer is a WAV file, or 24 kHz 16-bit mono samples with `pcm`."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer


@router.get("/v1/models")
async def models() -> JSONResponse:
    """The speech models, in OpenAI's form."""
    return JSONResponse(
        {"object": "list", "data": [{"id": "hibari", "object": "model", "created": 1_790_000_000, "owned_by": "glottis"}]}
    )
