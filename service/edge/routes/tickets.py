"""Upload tickets: a backend mints one, its app enrols with it, and needs no certificate."""

from __future__ import annotations

import json
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import CLIENT, HEARD, PROBLEMS, TICKET
from service.edge.routes.voices import AUDIO, NAME, form
from service.edge.uploads import in_turn
from service.problems import problem
from service.shapes import UploadAnswer, UploadRequest, VoiceAnswer

router = APIRouter(tags=["tickets"])


@router.post("/v1/uploads", status_code=201, response_model=UploadAnswer, responses=PROBLEMS, openapi_extra=CLIENT)
async def issue(request: Request, body: UploadRequest) -> Response:
    """A ticket for one enrolment under the consent that the token (purpose `enrol`) names. It lives minutes and works once."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer


@router.post(
    "/v1/enrolments",
    status_code=201,
    response_model=VoiceAnswer,
    responses=HEARD,
    openapi_extra=form({"name": NAME, "audio": AUDIO}, ["name", "audio"]) | TICKET,
)
async def enrol(request: Request) -> Response:
    """Enrol a speaker with `Authorization: Ticket …` and no certificate. It is used up, whatever the recordings are like."""
    relay = request.app.state.relay
    presented = request.headers.getlist("authorization")
    if len(presented) != 1 or not presented[0].isascii():
        return problem("ticket_unknown", "This call needs a ticket.", "Send `Authorization: Ticket …` once.")
    headers = [("authorization", presented[0])]
    # Nothing is read from, and nothing decoded for, somebody who holds no ticket.
    known: Response = await relay.send("GET", "/v1/enrolments", headers)
    if known.status_code != 200:
        return known
    limit = int(json.loads(bytes(known.body))["max_bytes"])
    if int(request.headers.get("content-length", "0")) > limit:
        return problem("too_large", "The upload is too large.", f"This ticket is for at most {limit} bytes.")
    slots = (request.app.state.ticket_uploads,)
    return await in_turn(request, partial(relay.carry, request, headers), limit, slots=slots)
