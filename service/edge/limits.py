"""Body caps, before anything is parsed: by the announced length and again by what arrives."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from service.edge.tls import client_certificate
from service.problems import certificate_required, problem
from service.shapes import MAX_JSON_BYTES, MAX_UPLOAD_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# A multipart body is a little larger than the files in it; `uploads` holds the files themselves to MAX_UPLOAD_BYTES.
_FORM_SLACK = 64 * 1024
_UPLOADS = re.compile(r"/v1/voices(/[^/]+/verify)?|/v1/enrolments|/v1/liveness/[^/]+")
OPEN = frozenset({"/", "/healthz", "/readyz", "/.well-known/jwks.json", "/openapi.json", "/v1/enrolments"})
"""Paths that need no certificate."""


class _TooLarge(Exception):
    pass


_BROWSERS = frozenset({("POST", "/oauth/token"), ("POST", "/v1/audio/speech"), ("POST", "/v1/browser-keys")})
_BROWSERS_READ = re.compile(r"/v1/voices(/[^/]+)?")


def of_browsers(scope: Message) -> bool:
    """Whether this is a call that a browser makes, without a certificate and with a proof. None of them uploads a recording."""
    if all(name != b"dpop" for name, _ in scope["headers"]):
        return False
    reads = scope["method"] == "GET" and _BROWSERS_READ.fullmatch(scope["path"]) is not None
    return reads or (scope["method"], scope["path"]) in _BROWSERS


class BodyCap:
    """ASGI middleware: the certificate first, then a cap by route, by the announced length and again by what arrives."""

    def __init__(self, app: App, *, browsers: bool = False) -> None:
        """`browsers`: whether the calls of browsers go on to the vault, which knows their keys."""
        self.app, self._browsers = app, browsers

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = _refused(scope, cap := _cap(scope), browsers=self._browsers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        started, total = False, 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > cap:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if total > cap and not started:
                return  # the framework's own answer to a body that broke off: ours says why
            started = True
            await send(message)

        with suppress(_TooLarge):
            await self.app(scope, counted, watched)
        if total > cap and not started:
            await _too_large(cap)(scope, receive, send)


def _cap(scope: Message) -> int:
    upload = scope["method"] == "POST" and _UPLOADS.fullmatch(scope["path"])
    return MAX_UPLOAD_BYTES + _FORM_SLACK if upload else MAX_JSON_BYTES


def _refused(scope: Message, cap: int, *, browsers: bool) -> JSONResponse | None:
    """What can be said before a byte of the body is read."""
    if scope["path"] not in OPEN and client_certificate(Request(scope)) is None and not (browsers and of_browsers(scope)):
        return certificate_required()
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    # Eight digits hold more than any cap: a longer number is not read as one.
    if not announced.isdigit() or len(announced.lstrip(b"0")) > 8 or int(announced[-8:]) > cap:
        return _too_large(cap)
    return None


def _too_large(cap: int) -> JSONResponse:
    return problem("too_large", "The request is too large.", f"Send at most {cap // 1024} KiB.")
