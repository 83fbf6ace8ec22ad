"""The site process's end of the operator's socket: commands by name, each refusal with its own code (`admin` is the client)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio.to_thread
import structlog
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import ArgumentRefused, DatabaseUnavailable, ServiceError, own_code
from service.sync.arguments import Call, arguments, typed

_log = structlog.get_logger()


def create_app(calls: Mapping[str, Call], ready: Callable[[], bool]) -> Starlette:
    """The commands' application. `ready` says whether the site works now (`/readyz`)."""

    known = {name: typed(call) for name, call in calls.items()}

    async def run(request: Request) -> Response:
        call = known.get(request.path_params["call"])
        if call is None:
            return _refusal("not_found", "The site process knows no such command.", "Use the command line of the same version.")
        try:
            given = arguments(await request.body())
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
    if code := own_code(error):
        return _refusal(code, str(error), str(getattr(error, "fix", "")))
    if isinstance(error, OperationalError | PoolTimeout):
        # Its words quote statements: the kind says enough.
        return _refusal(DatabaseUnavailable.code, type(error).__name__, DatabaseUnavailable.fix)
    if isinstance(error, ValueError | OverflowError):
        # What is not a value of its kind (an id, a label, base64, a date) is refused where it is read, whichever command it is of.
        _log.warning("command_refused", exc_info=error)
        return _refusal(ArgumentRefused.code, f"an argument does not hold: {str(error)[:200]!a}", ArgumentRefused.fix)
    _log.error("command_failed", exc_info=error)
    return _refusal("internal_error", f"{type(error).__name__} in the site process", "Read log/site.log; report it with the entry.")


def _refusal(code: str, message: str, fix: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message, "fix": fix}})
