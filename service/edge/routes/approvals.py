"""Approvals: a second client's word for what another is to have spoken."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.edge.routes.answers import CLIENT, PROBLEMS
from service.shapes import ApprovalAnswer, ApprovalRequest

router = APIRouter(tags=["approvals"])


@router.post("/v1/approvals", status_code=201, response_model=ApprovalAnswer, responses=PROBLEMS, openapi_extra=CLIENT)
async def approve(request: Request, body: ApprovalRequest) -> Response:
    """Agree that another client of the tenant has this text spoken in this voice, once, within ten minutes."""
    answer: Response = await request.app.state.relay.forward(request, body.model_dump_json().encode())
    return answer
