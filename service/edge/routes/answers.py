"""What a call may be answered with, and what it asks of its caller, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from service.shapes import Problem

Responses = dict[int | str, dict[str, Any]]

MEANINGS = {
    400: "The request cannot be read.",
    401: "Certificate, token, proof, ticket or code is missing, wrong, used or late.",
    403: "The policy says no.",
    404: "No such thing for this tenant.",
    408: "The client left before its request was complete.",
    409: "Something changed meanwhile, or was made with another model.",
    413: "Too large.",
    415: "Not audio that Glottis reads.",
    422: "A quality gate or text rule was not met.",
    429: "Too many requests, or the day's quota is used up.",
    500: "Refused because stored data is not what was written, or our own fault.",
    503: "Busy, or a part is missing; nothing was opened.",
}


def refusals(*statuses: int) -> Responses:
    """These statuses, each with the one form that every refusal has."""
    return {status: {"model": Problem, "description": MEANINGS[status]} for status in statuses}


PUBLIC = refusals(400, 413, 500)
"""Of calls that anybody makes and the edge answers."""
CERTIFIED = PUBLIC | refusals(401)
"""Of calls that need a certificate and that the edge answers."""
PROBLEMS = CERTIFIED | refusals(403, 404, 408, 409, 429, 503)
"""Of calls that the vault decides."""
SPOKEN = PROBLEMS | refusals(422)
"""Of speech."""
HEARD = PROBLEMS | refusals(415, 422)
"""Of calls with recordings."""

Way = dict[str, list[str]]
_CERTIFICATE: Way = {"certificate": []}
_PROOF: Way = {"proof": []}
_TOKEN: Way = {"token": [], **_PROOF}


def security(*ways: Way) -> dict[str, Any]:
    """Each of the ways is enough; what one way names is needed together."""
    return {"security": list(ways)}


OPEN = security()
CERTIFICATE = security(_CERTIFICATE)
CLIENT = security({**_CERTIFICATE, **_TOKEN})
OPENING = security({**_CERTIFICATE, **_TOKEN}, {**_CERTIFICATE, "bearer": []}, {**_CERTIFICATE, "key": []})
"""Calls that open a voice, whose terms may allow a token that is bound to the certificate alone."""
READING = security({**_CERTIFICATE, **_TOKEN}, _TOKEN)
"""Calls of clients with a certificate, and of browsers with a registered key."""
SPEAKING = security(*OPENING["security"], _TOKEN)
ASKING = security({**_CERTIFICATE, **_PROOF}, _CERTIFICATE, _PROOF)
"""The request for a token: bound to both keys, to the certificate alone, or to a browser's key alone."""
REGISTERING = security(_PROOF)
TICKET = security({"ticket": []})
