"""Uploads at the edge: multipart in memory, never in a file, decoded in the jailed child, framed for the vault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from service import frames
from service.problems import problem, public_message
from service.shapes import MAX_RECORDINGS, MAX_UPLOAD_BYTES
from voiceprints.decoding import RATE, decode
from voiceprints.errors import VoiceprintError

MAX_SECONDS = 300
"""Of all recordings of one upload together."""
WAIT_SECONDS = 5.0
"""How long an upload waits unread for room: well below the time after which its connection is cut (`tls.BODY_SECONDS`)."""


class UploadRefused(Exception):
    """The upload is not one that can be read."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.refusal = frames.Refused(code, message, fix)


class _InMemory(MultiPartParser):
    spool_max_size = MAX_UPLOAD_BYTES + 1


async def in_turn(
    request: Request,
    carry: Callable[[AsyncIterator[bytes]], Awaitable[Response]],
    limit: int = MAX_UPLOAD_BYTES,
    *,
    slots: tuple[asyncio.Semaphore, ...] = (),
) -> Response:
    """What `carry` answers to this upload's frame, as soon as there is room for it: in `slots`, and in the edge worker.

    Few uploads are in memory at a time, however many come: each may be MAX_UPLOAD_BYTES and MAX_SECONDS of samples. Where there
    is no room for WAIT_SECONDS the answer is `busy`: nothing was read, and neither token nor ticket is used.
    """
    async with AsyncExitStack() as room:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                for slot in (*slots, request.app.state.uploads):
                    await room.enter_async_context(slot)
        except TimeoutError:
            return problem("busy", "Too many uploads at once; nothing of this one was read.", "Send it again.")
        return await carry(_framed(request, limit, room))


async def _framed(request: Request, limit: int, room: AsyncExitStack) -> AsyncIterator[bytes]:
    """The upload as a frame, of a body of at most `limit` bytes. It starts when the first byte is asked for, so the headers are
    already at the vault."""
    frame: frames.Upload | frames.Refused
    async with room:  # free for the next one as soon as the last byte is on its way
        try:
            frame = await _upload(request, limit)
        except UploadRefused as refusal:
            frame = refusal.refusal
        except VoiceprintError as error:
            frame = frames.Refused(error.code, public_message(error.code, error), error.fix)
        for chunk in frames.pack(frame):
            yield chunk


async def _upload(request: Request, limit: int) -> frames.Upload:
    form = await _form(request, limit)
    fields = {k: v for k, v in form.items() if isinstance(v, str)}
    files = [v for _, v in form.multi_items() if isinstance(v, UploadFile)]
    if not files:
        raise UploadRefused("invalid_request", "The form has no audio file.", "Send the recording as the form field `audio`.")
    # A decoder is a process of its own: a few at a time, whatever arrives.
    slots: asyncio.Semaphore = request.app.state.decoders
    recordings, left = [], MAX_SECONDS * RATE
    for file in files:
        data = await file.read()
        async with slots:
            recordings.append((await asyncio.to_thread(decode, data)).samples)
        left -= len(recordings[-1])
        if left < 0:
            raise UploadRefused("audio_too_long", "The recordings are too long.", f"Send at most {MAX_SECONDS} seconds in all.")
    return frames.Upload(fields, recordings)


async def _form(request: Request, limit: int) -> FormData:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise UploadRefused(
            "invalid_request", "The body is not a multipart form.", "Send multipart/form-data with the field `audio`."
        )
    parser = _InMemory(request.headers, _capped(request, limit), max_files=MAX_RECORDINGS, max_fields=10, max_part_size=4096)
    try:
        return await parser.parse()
    except (MultiPartException, LookupError, ValueError) as error:
        raise UploadRefused(
            "invalid_request",
            "The multipart form cannot be read.",
            f"Send at most {MAX_RECORDINGS} files and small fields, well formed.",
        ) from error


async def _capped(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limit:
            raise UploadRefused("too_large", "The upload is too large.", f"Send at most {limit} bytes in one request.")
        yield chunk
