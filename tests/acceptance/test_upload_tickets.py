"""Upload tickets from the outside: an app with no certificate enrols once, with what its backend gave it, and does nothing else."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import httpx
import pytest
from installation import Installation, recordings
from sqlalchemy import text

from service.client import Refused, VoiceClient, enrol_by_ticket
from service.schema import opened

AT_ONCE = 8
SOUND = b"RIFF0000WAVEno sound at all"


@pytest.fixture
def app(running: Installation) -> Iterator[httpx.Client]:
    """An app's connection: it knows the server's authority, and has no certificate."""
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    with httpx.Client(base_url=running.settings.public_base_url, verify=context, timeout=60.0, trust_env=False) as http:
        yield http


def consent(backend: VoiceClient) -> str:
    expiry = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    return str(backend.record_consent("somebody", ["speak"], expiry, "ticked in the app")["id"])


def refused(app: httpx.Client, ticket: str, audio: bytes = SOUND) -> tuple[int, str]:
    with pytest.raises(Refused) as refusal:
        enrol_by_ticket(app, ticket, "somebody", [audio])
    return refusal.value.status, refusal.value.code


def completions(running: Installation) -> list[dict[str, Any]]:
    with opened(running.settings.role_url("owner")) as database, database.connect() as connection:
        rows = connection.execute(text("SELECT body FROM completion")).scalars()
        return [json.loads(bytes(body)) for body in rows]


def test_an_app_enrols_once_with_its_backends_ticket(running: Installation, app: httpx.Client) -> None:
    backend = running.client("studio")
    made = backend.ticket(consent(backend))
    voice = enrol_by_ticket(app, made["ticket"], "from the app", recordings("1998")[:2])
    assert backend.voice(voice["id"])["name"] == "from the app"
    assert len(backend.speak(voice["id"], "Enrolled by ticket.")) > 10_000
    assert refused(app, made["ticket"]) == (401, "ticket_used")
    logged = "".join(path.read_text() for path in running.settings.log_dir.glob("*.log"))
    assert made["ticket"] not in logged


def test_uses_at_once_have_one_success(running: Installation, app: httpx.Client) -> None:
    """What is sent is no sound: the use that got in says so, and the ticket is used up all the same."""
    ticket = running.client("studio").ticket(consent(running.client("studio")))["ticket"]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        codes = sorted(threads.map(lambda _: refused(app, ticket), range(AT_ONCE)))
    assert codes.count((401, "ticket_used")) == AT_ONCE - 1, codes
    [(status, code)] = [found for found in codes if found[1] != "ticket_used"]
    assert status in (415, 422), code
    assert code in {entry["outcome"] for entry in completions(running)}


def test_too_large_is_said_before_anything_is_decoded(running: Installation, app: httpx.Client) -> None:
    backend = running.client("studio")
    ticket = backend.ticket(consent(backend), max_bytes=2000)["ticket"]
    assert refused(app, ticket, bytes(3000)) == (413, "too_large")
    assert refused(app, ticket, bytes(33 * 2**20)) == (413, "too_large")
    voice_sized = refused(app, ticket, bytes(500))
    assert voice_sized[0] in (415, 422), "refused by its announced size, the ticket was not used up"


def test_a_body_of_unknown_size_is_cut_at_the_tickets(running: Installation, app: httpx.Client) -> None:
    backend = running.client("studio")
    ticket = backend.ticket(consent(backend), max_bytes=2000)["ticket"]
    head = b'--x\r\nContent-Disposition: form-data; name="audio"; filename="a"\r\n\r\n'
    headers = {"Authorization": f"Ticket {ticket}", "Content-Type": "multipart/form-data; boundary=x"}
    answer = app.post("/v1/enrolments", headers=headers, content=iter([head, bytes(4000), b"\r\n--x--\r\n"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_a_ticket_opens_nothing_else(running: Installation, app: httpx.Client) -> None:
    backend = running.client("studio")
    ticket = backend.ticket(consent(backend))["ticket"]
    for method, path in (("GET", "/v1/voices"), ("POST", "/v1/uploads"), ("POST", "/v1/voices"), ("POST", "/v1/audio/speech")):
        answer = app.request(method, path, headers={"Authorization": f"Ticket {ticket}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "certificate_required"), path
        with pytest.raises(Refused) as refusal:
            backend.send(method, path, {"Authorization": f"Ticket {ticket}", "DPoP": backend.proof(method, path)})
        assert refusal.value.status in (400, 401), path
    assert app.get("/v1/enrolments", headers={"Authorization": f"Ticket {ticket}"}).status_code == 405
    assert refused(app, "A" * 43) == (401, "ticket_unknown")
    assert refused(app, ticket)[0] in (415, 422)


def test_nothing_is_read_from_somebody_without_a_ticket(running: Installation, app: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "DPoP x"}, {"Authorization": "Ticket x"}):
        answer = app.post("/v1/enrolments", headers=headers, files={"audio": bytes(2**20)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "ticket_unknown")
        assert answer.headers["WWW-Authenticate"].startswith("Ticket ")
        assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("terms", [{"max_bytes": 0}, {"max_bytes": 2**40}, {"expires_in": 601}, {"expires_in": 0}, {"more": 1}])
def test_tickets_have_bounds(running: Installation, terms: dict[str, int]) -> None:
    backend = running.client("studio")
    with pytest.raises(Refused) as refusal:
        backend.ticket(consent(backend), **terms)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_request")


def used(running: Installation, ticket: str) -> bool:
    listed = text("SELECT count(*) FROM authority_change WHERE kind = 'upload_ticket' AND key = :secret")
    with opened(running.settings.role_url("owner")) as database, database.connect() as connection:
        return bool(connection.scalar(listed, {"secret": sha256(ticket.encode()).hexdigest()}))


def test_slow_uploads_by_one_ticket_shut_no_client_out(running: Installation, voice: str) -> None:
    """They stay until the edge cuts them, which takes longer than this client waits."""
    backend = running.client("studio")
    ticket = backend.ticket(consent(backend))["ticket"]
    head = f"POST /v1/enrolments HTTP/1.1\r\nHost: localhost\r\nAuthorization: Ticket {ticket}\r\nContent-Length: 100000\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    with ExitStack() as slow:
        for _ in range(AT_ONCE):
            plain = slow.enter_context(socket.create_connection(("127.0.0.1", running.settings.port)))
            slow.enter_context(context.wrap_socket(plain, server_hostname="localhost")).sendall(head.encode())
        deadline = time.monotonic() + 20
        while not used(running, ticket):  # one of them was let in; the others were looked at before
            assert time.monotonic() < deadline
            time.sleep(0.1)
        backend._http.timeout = 20.0
        try:
            assert backend.verify(voice, recordings("1998")[3]) == "match"
        finally:
            backend._http.timeout = 60.0
