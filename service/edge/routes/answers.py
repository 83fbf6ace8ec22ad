"""Which refusals every call may answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from service.shapes import Problem

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": meaning}
    for status, meaning in {
        400: "The request cannot be read.",
        401: "Certificate, token or proof is missing, wrong, used or late.",
        403: "The policy says no.",
        404: "No such thing for this tenant.",
        408: "The client left before its upload was complete.",
        409: "Something changed meanwhile, or was made with another model.",
        413: "Too large.",
        415: "Not audio that Glottis reads.",
        422: "A quality gate or text rule was not met.",
        500: "Refused because stored data is not what was written, or our own fault.",
        503: "Busy, or a part is missing; nothing was opened.",
    }.items()
}
