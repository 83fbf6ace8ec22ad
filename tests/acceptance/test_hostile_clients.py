"""Clients that send what no client should: each gets a clear code or is cut off, and nobody else notices."""

from __future__ import annotations

import json
import socket
import ssl
import time
from contextlib import suppress
from typing import Any

import pytest
from installation import Installation
from sqlalchemy import text

from service.client import Refused, VoiceClient
from service.schema import opened

SPEECH = "/v1/audio/speech"
TEXT = "Somebody else is served."


def connected(running: Installation, client: str | None = None) -> ssl.SSLSocket:
    """A raw TLS connection, with a client's certificate or without one."""
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    if client is not None:
        folder = running.settings.client_dir(client)
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context.wrap_socket(socket.create_connection(("127.0.0.1", running.settings.port), 30), server_hostname="localhost")


def answer_to(connection: ssl.SSLSocket, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a request as it is written here; (0, {}) if the connection was cut."""
    try:
        connection.sendall(request)
        said = b""
        while chunk := connection.recv(65536):
            said += chunk
            head, _, body = said.partition(b"\r\n\r\n")
            if b"content-length: " in head.lower() and len(body) >= int(
                head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            ):
                break
    except (ConnectionError, ssl.SSLError):
        said = b""
    if not said:
        return 0, {}
    return int(said.split()[1]), json.loads(said.partition(b"\r\n\r\n")[2])["error"]


def posted(path: str, headers: str, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode("latin-1") + body


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        (SPEECH, "Content-Length: 2\r\nAuthorization: DPoP \xe9\r\n", (400, "invalid_request")),
        (SPEECH, "Content-Length: 2\r\nDPoP: \xff\r\n", (400, "invalid_request")),
        (SPEECH, "Content-Length: " + "9" * 18 + "\r\n", (413, "too_large")),
        (SPEECH, "Content-Length: 32000000\r\nContent-Type: multipart/form-data; boundary=x\r\n", (413, "too_large")),
        ("/oauth/token", "Content-Length: 70000\r\n", (413, "too_large")),
        ("/v1/nothing", "Content-Length: 2\r\n", (404, "not_found")),
    ],
)
def test_malformed_heads_have_a_code(running: Installation, voice: str, path: str, headers: str, expected: tuple[int, str]) -> None:
    with connected(running, "studio") as connection:
        status, error = answer_to(connection, posted(path, headers, b"{}"))
    assert (status, error["code"]) == expected


def test_nothing_is_read_from_somebody_without_a_certificate(running: Installation) -> None:
    with connected(running) as connection:
        status, error = answer_to(connection, posted("/v1/voices", "Content-Length: 30000000\r\n"))
    assert (status, error["code"]) == (401, "certificate_required")


def test_an_endless_head_is_cut(running: Installation) -> None:
    with connected(running) as connection:
        assert answer_to(connection, posted(SPEECH, f"X-Long: {'x' * 1_000_000}\r\n")) == (0, {})


def test_a_head_that_never_ends_is_cut_in_time(running: Installation) -> None:
    with connected(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        connection.settimeout(20)
        began = time.monotonic()
        with suppress(ConnectionError, ssl.SSLError):  # a cut connection shows as an end or as a reset
            assert connection.recv(1) == b""
        assert 8 < time.monotonic() - began < 15


@pytest.mark.parametrize(
    "change",
    [{"model": "nosuch"}, {"speed": 9}, {"input": "x" * 5000}, {"voice": "../x"}, {"more": 1}],
    ids=lambda change: next(iter(change)),
)
def test_shapes_are_refused_before_the_token_is_spent(running: Installation, voice: str, change: dict[str, Any]) -> None:
    client = running.client("studio")
    token = client.token("speak", voice=voice, text=TEXT)
    body = {"input": TEXT, "voice": voice, "model": "hibari"}
    with pytest.raises(Refused) as refused:
        client.call("POST", SPEECH, token, json=body | change)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
    assert client.call("POST", SPEECH, token, json=body).is_success


@pytest.mark.parametrize("expiry", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "2030-01-01T00:00:00"])
def test_moments_beyond_the_calendar_are_refused(running: Installation, expiry: str) -> None:
    with pytest.raises(Refused) as refused:
        running.client("studio").record_consent("somebody", ["speak"], expiry, "none")
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")


def test_unheard_of_charsets_are_refused(running: Installation) -> None:
    client = running.client("studio")
    consent = client.record_consent("somebody", ["speak"], "2100-01-01T00:00:00Z", "none")["id"]
    headers = client.headers("POST", "/v1/voices", client.token("enrol", consent=consent))
    headers["Content-Type"] = "multipart/form-data; boundary=x; charset=undefined"
    with pytest.raises(Refused) as refused:
        client.send(
            "POST", "/v1/voices", headers, content=b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n\xff\r\n--x--\r\n'
        )
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")


def test_abandoned_speech_stops_and_others_are_served(running: Installation, voice: str) -> None:
    """Two requests for an hour of digits, left at once: they end as cancelled, and the next client does not wait for them."""
    client, long = running.client("studio"), "1" * 4096
    for _ in range(2):
        token = client.token("speak", voice=voice, text=long)
        head = "".join(f"{name}: {value}\r\n" for name, value in client.headers("POST", SPEECH, token).items())
        body = json.dumps({"input": long, "voice": voice, "speed": 0.5}).encode()
        connection = connected(running, "studio")
        connection.sendall(posted(SPEECH, f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n", body))
        time.sleep(0.5)
        connection.close()
    began = time.monotonic()
    assert len(client.speak(voice, TEXT)) > 10_000
    assert time.monotonic() - began < 25
    for _ in range(100):
        if _outcomes(running).count("cancelled") >= 2:
            return
        time.sleep(0.2)
    raise AssertionError("abandoned requests were not completed as cancelled")


def test_refusals_are_no_crashes_in_the_logs(running: Installation, voice: str) -> None:
    client: VoiceClient = running.client("studio")
    token = client.token("speak", voice=voice, text=TEXT)
    for _ in range(3):
        with pytest.raises(Refused):
            client.call("POST", SPEECH, token, json={"input": "Another text.", "voice": voice})
    logged = "".join(path.read_text() for path in running.settings.log_dir.glob("[ve]*.log"))
    assert "Traceback" not in logged
    assert "Exception in ASGI" not in logged
    assert "TextMismatch" not in logged


def _outcomes(running: Installation) -> list[str]:
    with opened(running.settings.role_url("owner")) as database, database.connect() as connection:
        bodies = connection.execute(text("SELECT body FROM completion")).scalars()
        return [json.loads(bytes(body))["outcome"] for body in bodies]
