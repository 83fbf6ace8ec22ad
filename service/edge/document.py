"""The OpenAPI document: what the routes say, with the ways to prove who calls, and every refusal with its codes.

What FastAPI writes by itself is right but for two things: the edge never answers in FastAPI's own form of 422, and a refusal
that stands at twenty calls is described once.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.edge.routes.answers import MEANINGS
from service.problems import STATUS, problem

_PROBLEM = {"$ref": "#/components/schemas/Problem"}

SECURITY: dict[str, dict[str, str]] = {
    "certificate": {
        "type": "mutualTLS",
        "description": "The client's certificate, in the TLS 1.3 handshake. Tokens carry its thumbprint (RFC 8705).",
    },
    "token": {
        "type": "http",
        "scheme": "DPoP",
        "description": "`Authorization: DPoP …`: a token of /oauth/token. It is for one act, lives five seconds, and works once.",
    },
    "proof": {
        "type": "apiKey",
        "in": "header",
        "name": "DPoP",
        "description": "A proof of this one request by the client's own key (RFC 9449), with `ath` for a token or code.",
    },
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token bound to the certificate alone. Only voices whose terms allow it open for it.",
    },
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "xi-api-key",
        "description": "A bearer token, where ElevenLabs' clients put it.",
    },
    "ticket": {
        "type": "http",
        "scheme": "Ticket",
        "description": "`Authorization: Ticket …`: one upload by an app that has no certificate. A ticket of /v1/uploads.",
    },
}

EXAMPLES: dict[int, tuple[str, str, str]] = {
    400: ("invalid_request", "The request does not have the shape this call expects.", "Mend: voice (uuid_parsing)."),
    401: ("certificate_required", "This call needs a client certificate.", "Connect with the certificate issued to this client."),
    403: ("consent_purpose", "The speaker's consent does not name this purpose.", "Ask the speaker; record a new consent."),
    404: ("voice_unknown", "There is no such voice.", "List the voices with GET /v1/voices."),
    408: ("client_disconnected", "The client left before its request was complete.", "Send it again."),
    409: ("row_changed", "Something changed this entry at the same moment.", "Read it again and retry."),
    413: ("too_large", "The request is too large.", "Send at most 64 KiB."),
    415: ("not_audio", "This is not audio that can be read.", "Send WAV, FLAC, MP3, Ogg or MP4 audio."),
    422: ("quality_refused", "The recording is not good enough.", "Record in a quiet room, close to the microphone."),
    429: ("rate_limited", "Too many requests in this minute.", "Wait as long as Retry-After says."),
    500: ("internal_error", "Something failed inside Glottis.", "Report it with its time."),
    503: ("vault_unavailable", "The vault did not answer.", "Retry with a fresh token."),
}
"""Of each status one refusal: code, message, fix."""


_HEADERS: dict[str, tuple[str, Collection[int]]] = {
    "Retry-After": ("Seconds to wait.", (429, 503)),
    "WWW-Authenticate": ("The challenge of RFC 9449 §7.1.", (401,)),
    "DPoP-Nonce": ("Put it into the next proof, where the code is `use_dpop_nonce` (RFC 9449 §8).", (400, 401)),
    "X-Glottis-Intent": ("The audit entry of this request.", (200, 201)),
}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of this application, made anew."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = made["components"]
    components["securitySchemes"] = SECURITY
    components["responses"] = {f"Refused{status}": _described(status) for status in MEANINGS}
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for calls in made["paths"].values():
        for call in calls.values():
            decided = "403" in call["responses"]
            call["responses"] = {
                status: _shared(status, answer)
                for status, answer in call["responses"].items()
                if not _schema(answer).endswith("/HTTPValidationError")
            }
            for status, answer in call["responses"].items():
                if decided and status in ("200", "201"):
                    answer["headers"] = {"X-Glottis-Intent": _header(_HEADERS["X-Glottis-Intent"][0])}
    return made


def _header(meaning: str) -> dict[str, Any]:
    return {"description": meaning, "schema": {"type": "string"}}


def _described(status: int) -> dict[str, Any]:
    codes = sorted(code for code, of in STATUS.items() if of == status)
    code, message, fix = EXAMPLES[status]
    example = json.loads(bytes(problem(code, message, fix).body))
    headers = {name: _header(meaning) for name, (meaning, of) in _HEADERS.items() if status in of}
    return {
        "description": f"{MEANINGS[status]} Codes: {', '.join(codes)}.",
        "headers": headers,
        "content": {"application/json": {"schema": _PROBLEM, "example": example}},
    }


def _schema(answer: dict[str, Any]) -> str:
    return str(answer.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", ""))


def _shared(status: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": f"#/components/responses/Refused{status}"} if _schema(answer) == _PROBLEM["$ref"] else answer
