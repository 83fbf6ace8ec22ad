"""Body caps, before anything is parsed: by the announced length and again by what arrives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.problems import problem
from service.shapes import MAX_JSON_BYTES, MAX_UPLOAD_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# A multipart body is a little larger than the files in it; `uploads` holds the files themselves to MAX_UPLOAD_BYTES.
_FORM_SLACK = 64 * 1024


class _TooLarge(Exception):
    pass


class BodyCap:
    """ASGI middleware: uploads up to MAX_UPLOAD_BYTES, everything else up to MAX_JSON_BYTES; more is 413."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        form = headers.get(b"content-type", b"").startswith(b"multipart/form-data")
        cap = MAX_UPLOAD_BYTES + _FORM_SLACK if form else MAX_JSON_BYTES
        announced = headers.get(b"content-length", b"0")
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
            started = True
            await send(message)

        if not announced.isdigit() or int(announced) > cap:
            await _refuse(cap)(scope, receive, send)
            return
        try:
            await self.app(scope, counted, watched)
        except _TooLarge:
            if not started:
                await _refuse(cap)(scope, receive, send)


def _refuse(cap: int) -> Any:
    return problem("too_large", "The request is too large.", f"Send at most {cap // 1024} KiB.")
