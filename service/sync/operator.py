"""The site process's end of the operator's socket: commands by name, each refusal with its own code (`admin` is the client)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import ServiceError

Call = Callable[..., Mapping[str, Any]]
"""Takes the request's fields as keywords; what it answers is JSON."""

_log = structlog.get_logger()


def create_app(calls: Mapping[str, Call], ready: Callable[[], bool]) -> Starlette:
    """The commands' application. `ready` says whether the site works now (`/readyz`)."""

    async def run(request: Request) -> Response:
        call = calls.get(request.path_params["call"])
        if call is None:
            return _refusal("not_found", "The site process knows no such command.", "Use the command line of the same version.")
        try:
            given = json.loads(await request.body() or b"{}")
            return JSONResponse(await anyio.to_thread.run_sync(lambda: dict(call(**given))))
        except Exception as error:  # noqa: BLE001 — the last door: whoever asked reads why, the log has where
            return _failed(error)

    async def readyz(_: Request) -> Response:
        works = await anyio.to_thread.run_sync(ready)
        return JSONResponse({"status": "ready" if works else "unready"}, 200 if works else 503)

    return Starlette(routes=[Route("/readyz", readyz), Route("/{call}", run, methods=["POST"])])


def _failed(error: Exception) -> Response:
    if isinstance(error, ServiceError):
        return _refusal(error.code, str(error), error.mend)
    if hasattr(error, "code"):
        return _refusal(str(error.code), str(error), str(getattr(error, "fix", "")))
    _log.error("command_failed", exc_info=error)
    return _refusal("internal_error", f"{type(error).__name__} in the site process", "Read log/site.log; report it with the entry.")


def _refusal(code: str, message: str, fix: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message, "fix": fix}})
