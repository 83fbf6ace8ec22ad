"""The operator's commands to the site process: JSON over HTTP on a Unix socket, which only whoever started Glottis may open.

`ask` is the client for the command line and the supervisor; `create_app` the other end, in the site process. A command runs
to its end even if the asker leaves: each is safe to give again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import NotRunning, ServiceError
from service.settings import Settings

Facts = dict[str, Any]
Call = Callable[..., Mapping[str, Any]]
"""Takes the request's fields as keywords; what it answers is JSON."""

ANSWER_SECONDS = 120.0
MAX_BYTES = 8 << 20
_log = structlog.get_logger()


class SiteRefused(Exception):
    """What the site process refused, with its own code, so that a command ends with the exit code of that."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.code, self.fix = code, fix


def ask(settings: Settings, call: str, *, timeout_s: float = ANSWER_SECONDS, **request: Any) -> Facts:
    """Give one command to this folder's site process and return what it answers. Raises SiteRefused, NotRunning."""
    connection = http.client.HTTPConnection("site")
    with socket.socket(socket.AF_UNIX) as unix, contextlib.closing(connection):
        unix.settimeout(timeout_s)
        try:
            unix.connect(str(settings.admin_socket))
            connection.sock = unix
            connection.request("POST", f"/{call}", json.dumps(request), {"Connection": "close"})
            answer: Facts = json.loads(connection.getresponse().read())
        except PermissionError as error:
            raise NotRunning("another user started this Glottis", fix="Run this as the user who started it.") from error
        except TimeoutError as error:
            raise NotRunning(f"the site process did not answer within {timeout_s:.0f} s", fix=_LOG.format(settings)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotRunning(f"no site process answers in {settings.state_dir}") from error
    if "error" in answer:
        raise SiteRefused(**answer["error"])
    return answer


_LOG = "Read log/site.log in {0.state_dir}; the command may still end well, and may be given again."


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
