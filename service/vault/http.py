"""HTTP on the vault's Unix socket: credentials and bodies in, answers out. Every decision is made in `vault.py`.

The token is checked as soon as the headers are here; an upload's samples arrive after that.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import wraps
from typing import TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

import structlog
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from keyvault.errors import KeyVaultError
from keyvault.key_uses import Place, acting
from policies.errors import NonceRequired, PolicyError
from service import frames
from service.problems import problem, unexpected
from service.refusals import Refusal, refusal_of
from service.shapes import (
    MAX_FORM_BYTES,
    MAX_JSON_BYTES,
    ApprovalRequest,
    BrowserKeyRequest,
    ConsentRequest,
    LivenessRequest,
    Shape,
    SpeechRequest,
    UploadRequest,
)
from service.vault.exchange import Credentials, Listener
from service.vault.threads import Threads
from service.vault.vault import Vault
from synth.errors import SynthError
from voiceprints.errors import VoiceprintError

CERTIFICATE_HEADER = "x-glottis-client-cert"
_KEY_HEADER = "xi-api-key"
"""Where ElevenLabs' clients put what they call a key: here, a token of type Bearer."""
INTENT_HEADER = "X-Glottis-Intent"
JWKS_AGE_S = 300
"""How long a copy of the published keys may be used: far below the overlap in which a next key is published before it signs."""
SKIPPED_HEADER = "X-Glottis-Skipped"
THREADS = 96
"""Requests in hand at once: each waits in a thread of its own for its turn at the engine."""

_TOKEN_PATH = "/oauth/token"  # noqa: S105 — a path
_LOOK_S = 0.25

S = TypeVar("S", bound=Shape)

_log = structlog.get_logger()


def create_app(vault: Vault, threads: Threads) -> Starlette:
    """The application of one vault worker, whose work is done in `threads`."""
    calls = _Calls(vault, threads)
    app = Starlette(
        routes=[
            Route("/readyz", calls.readyz),
            Route("/hsm", calls.figures),
            Route("/.well-known/jwks.json", calls.jwks),
            Route(_TOKEN_PATH, calls.token, methods=["POST"]),
            Route("/v1/consents", calls.record_consent, methods=["POST"]),
            Route("/v1/browser-keys", calls.register_browser, methods=["POST"]),
            Route("/v1/uploads", calls.issue_ticket, methods=["POST"]),
            Route("/v1/enrolments", calls.ticket_limit, methods=["GET"]),
            Route("/v1/enrolments", calls.enrol_by_ticket, methods=["POST"]),
            Route("/v1/voices", calls.enrol, methods=["POST"]),
            Route("/v1/voices", calls.voices, methods=["GET"]),
            Route("/v1/voices/{voice:uuid}", calls.voice, methods=["GET"]),
            Route("/v1/voices/{voice:uuid}", calls.erase, methods=["DELETE"]),
            Route("/v1/voices/{voice:uuid}/verify", calls.verify, methods=["POST"]),
            Route("/v1/liveness", calls.ask_liveness, methods=["POST"]),
            Route("/v1/liveness/{challenge}", calls.hear_answer, methods=["POST"]),
            Route("/v1/approvals", calls.approve, methods=["POST"]),
            Route("/v1/audio/speech", calls.speak, methods=["POST"]),
        ],
    )
    app.add_exception_handler(HTTPException, _plain)
    # By their bases: a handler for Exception alone would answer too, and then log each refusal as a crash.
    for known in (Refusal, KeyVaultError, PolicyError, VoiceprintError, SynthError):
        app.add_exception_handler(known, _refused)
    app.add_exception_handler(Exception, _failed)
    return app


Endpoint = Callable[["_Calls", Request], Awaitable[Response]]


def _at(place: Place) -> Callable[[Endpoint], Endpoint]:
    """What this endpoint does, also in its threads, may use the keys that `keyvault/key_uses.py` names for this place."""

    def of(endpoint: Endpoint) -> Endpoint:
        @wraps(endpoint)
        async def within(self: _Calls, request: Request) -> Response:
            with acting(place):
                return await endpoint(self, request)

        return within

    return of


class _Calls:
    def __init__(self, vault: Vault, threads: Threads) -> None:
        self._vault = vault
        self._run = threads.run

    @_at(Place.READYZ)
    async def readyz(self, _: Request) -> Response:
        broken = await self._run(self._vault.readiness)
        return JSONResponse({"status": "unready", "broken": broken} if broken else {"status": "ready"}, 503 if broken else 200)

    @_at(Place.READYZ)
    async def figures(self, _: Request) -> Response:
        """For the operator on this host: no edge sends anybody here."""
        return JSONResponse(asdict(self._vault.hsm.figures))

    @_at(Place.JWKS)
    async def jwks(self, _: Request) -> Response:
        return JSONResponse(await self._run(self._vault.jwks), headers={"Cache-Control": f"public, max-age={JWKS_AGE_S}"})

    @_at(Place.TOKEN)
    async def token(self, request: Request) -> Response:
        form = _form(await _body(request, MAX_FORM_BYTES))
        issued = await self._run(self._vault.issue, _credentials(request), form["grant_type"], form["authorization_details"])
        answer = {
            "access_token": issued.access_token,
            "token_type": issued.token_type,
            "expires_in": issued.expires_in,
            "authorization_details": issued.authorization_details,
        }
        return JSONResponse(answer, headers={"Cache-Control": "no-store", INTENT_HEADER: str(issued.intent_id)})

    @_at(Place.CONSENT)
    async def record_consent(self, request: Request) -> Response:
        body = _shaped(ConsentRequest, await _body(request, MAX_JSON_BYTES))
        done = await self._run(self._vault.record_consent, _credentials(request), body)
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.ENROL)
    async def enrol(self, request: Request) -> Response:
        admitted = await self._run(self._vault.admit_enrolment, _credentials(request))
        done = await self._run(self._vault.enrol, admitted, await _frame(request))
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.BROWSER)
    async def register_browser(self, request: Request) -> Response:
        body = _shaped(BrowserKeyRequest, await _body(request, MAX_JSON_BYTES))
        done = await self._run(self._vault.register_browser, _credentials(request), body.code)
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id), "Cache-Control": "no-store"})

    @_at(Place.TICKET)
    async def issue_ticket(self, request: Request) -> Response:
        body = _shaped(UploadRequest, await _body(request, MAX_JSON_BYTES))
        done = await self._run(self._vault.issue_ticket, _credentials(request), body)
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id), "Cache-Control": "no-store"})

    @_at(Place.TICKET)
    async def ticket_limit(self, request: Request) -> Response:
        """For the edge alone: what it needs to know before it reads a byte of an upload from a caller without a certificate."""
        return JSONResponse({"max_bytes": await self._run(self._vault.ticket_limit, _ticket(request))})

    @_at(Place.ENROL)
    async def enrol_by_ticket(self, request: Request) -> Response:
        admitted = await self._run(self._vault.admit_upload, _ticket(request))
        done = await self._run(self._vault.enrol, admitted, await _frame(request))
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.READ)
    async def voices(self, request: Request) -> Response:
        done = await self._run(self._vault.voices, _credentials(request))
        return JSONResponse(done.answer, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.READ)
    async def voice(self, request: Request) -> Response:
        done = await self._run(self._vault.voice, _credentials(request), _voice(request))
        return JSONResponse(done.answer, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.ERASE)
    async def erase(self, request: Request) -> Response:
        done = await self._run(self._vault.erase, _credentials(request), _voice(request))
        return JSONResponse(done.answer, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.COMPARE)
    async def verify(self, request: Request) -> Response:
        admitted = await self._run(self._vault.admit_comparison, _credentials(request), _voice(request))
        done = await self._run(self._vault.verify, admitted, await _frame(request))
        return JSONResponse(done.answer, headers={INTENT_HEADER: str(done.intent_id)})

    @_at(Place.LIVENESS)
    async def ask_liveness(self, request: Request) -> Response:
        body = _shaped(LivenessRequest, await _body(request, MAX_JSON_BYTES))
        done = await self._run(self._vault.ask_liveness, _credentials(request), body.voice)
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id), "Cache-Control": "no-store"})

    @_at(Place.COMPARE)
    async def hear_answer(self, request: Request) -> Response:
        admitted = await self._run(self._vault.admit_answer, _credentials(request), str(request.path_params["challenge"]))
        done = await self._run(self._vault.hear_answer, admitted, await _frame(request))
        return JSONResponse(done.answer, headers={INTENT_HEADER: str(done.intent_id), "Cache-Control": "no-store"})

    @_at(Place.APPROVE)
    async def approve(self, request: Request) -> Response:
        body = _shaped(ApprovalRequest, await _body(request, MAX_JSON_BYTES))
        done = await self._run(self._vault.approve, _credentials(request), body)
        return JSONResponse(done.answer, 201, headers={INTENT_HEADER: str(done.intent_id), "Cache-Control": "no-store"})

    @_at(Place.SPEAK)
    async def speak(self, request: Request) -> Response:
        body = _shaped(SpeechRequest, await _body(request, MAX_JSON_BYTES))
        listener = Listener()
        speaking = asyncio.create_task(self._run(self._vault.speak, _credentials(request), body, listener))
        while not (await asyncio.wait({speaking}, timeout=_LOOK_S))[0]:
            if await request.is_disconnected():
                listener.leave()
        spoken = speaking.result()
        kind = "audio/wav" if body.response_format == "wav" else "audio/pcm"
        headers = {INTENT_HEADER: str(spoken.intent_id), "Cache-Control": "no-store", "Content-Type": kind}
        if spoken.skipped:
            headers[SKIPPED_HEADER] = str(spoken.skipped)
        return Response(spoken.audio, headers=headers)


def _credentials(request: Request) -> Credentials:
    """What the client signed, and the certificate that the edge says it holds. Several values of a header are refused."""
    values = {name: request.headers.getlist(name) for name in ("authorization", _KEY_HEADER, "dpop", CERTIFICATE_HEADER)}
    if any(len(found) > 1 for found in values.values()) or (values["authorization"] and values[_KEY_HEADER]):
        fix = "Send each of Authorization and DPoP once, and xi-api-key only in place of Authorization."
        raise Refusal("invalid_request", "A credential header was sent more than once.", fix)
    scheme, _, token = (values["authorization"] or [""])[0].partition(" ")
    if values[_KEY_HEADER]:
        scheme, token = "bearer", values[_KEY_HEADER][0]
    try:
        certificate = base64.b64decode((values[CERTIFICATE_HEADER] or [""])[0], validate=True) or None
    except binascii.Error:
        certificate = None
    proof = values["dpop"][0] if values["dpop"] else None
    return Credentials(request.method, request.url.path, scheme, token, proof, certificate)


def _ticket(request: Request) -> str:
    """The ticket in the one Authorization header; one of another scheme is no ticket."""
    scheme, _, ticket = ",".join(request.headers.getlist("authorization")).partition(" ")
    return ticket if scheme.lower() == "ticket" else ""


def _voice(request: Request) -> UUID:
    found = request.path_params["voice"]
    assert isinstance(found, UUID)
    return found


async def _body(request: Request, cap: int) -> bytes:
    parts, total = [], 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > cap:
            raise Refusal("too_large", "The request is too large.", f"Send at most {cap // 1024} KiB.")
        parts.append(chunk)
    return b"".join(parts)


async def _frame(request: Request) -> frames.Upload | frames.Refused | None:
    """The decoded upload; None when the client went away before it was complete."""
    try:
        return frames.unpack(await _body(request, frames.MAX_FRAME))
    except ClientDisconnect:
        return None
    except frames.FrameError:
        return frames.Refused("invalid_request", "The upload cannot be read.", "Send it again.")


def _form(data: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(data.decode("ascii"), keep_blank_values=True, strict_parsing=True, max_num_fields=8)
    except ValueError:
        pairs = []
    form = dict(pairs)
    if len(form) != len(pairs) or form.keys() != {"grant_type", "authorization_details"}:
        fix = "Send the form fields grant_type and authorization_details, once each."
        raise Refusal("invalid_request", "The token request cannot be read.", fix)
    return form


def _shaped(shape: type[S], data: bytes) -> S:
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        fix = "The shapes are in /openapi.json."
        raise Refusal("invalid_request", "The request does not have the shape this call expects.", fix) from error


async def _plain(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return problem(code, "There is nothing at this path.", "See /openapi.json for every call.")


async def _refused(request: Request, error: Exception) -> Response:
    known = refusal_of(error)
    assert known is not None
    answer = problem(known.code, str(known), known.fix, extra=known.extra, retry_after_s=known.retry_after_s)
    if isinstance(error, NonceRequired):
        answer.headers["DPoP-Nonce"] = error.nonce
        if request.url.path == _TOKEN_PATH:
            answer.status_code = 400  # RFC 9449 §8, where §9 has 401 for everything else
            del answer.headers["WWW-Authenticate"]
    return answer


async def _failed(_: Request, error: Exception) -> Response:
    _log.error("request_failed", exc_info=error)
    return unexpected()
