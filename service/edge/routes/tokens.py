"""The token endpoint: client credentials (RFC 6749) by mutual TLS (RFC 8705) and DPoP (RFC 9449), asked for by RFC 9396."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import ASKING, PROBLEMS
from service.shapes import MAX_FORM_BYTES, TokenAnswer

router = APIRouter(tags=["tokens"])

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-www-form-urlencoded": {
                "schema": {
                    "type": "object",
                    "required": ["grant_type", "authorization_details"],
                    "properties": {
                        "grant_type": {"type": "string", "enum": ["client_credentials"]},
                        "authorization_details": {
                            "type": "string",
                            "maxLength": MAX_FORM_BYTES,
                            "description": "RFC 9396, as JSON: one entry of type `glottis_voice` with one action.",
                            "example": '[{"type": "glottis_voice", "actions": ["read"]}]',
                        },
                    },
                }
            }
        },
    }
}


@router.post("/oauth/token", response_model=TokenAnswer, responses=PROBLEMS, openapi_extra=_FORM | ASKING)
async def token(request: Request) -> Response:
    """A token for one act with one voice: it lives five seconds, works once, and is bound to this client's keys."""
    answer: Response = await request.app.state.relay.forward(request, await request.body())
    return answer
