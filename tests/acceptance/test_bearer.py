"""Tokens bound to a certificate alone, from the outside: as a bearer token, or where other services' clients put their key."""

from __future__ import annotations

import json
from typing import Any

import jwt
import pytest
from cli_here import glottis_here
from installation import VARIABLES, Installation

from service.client import Refused, VoiceClient

SPEECH, TEXT = "/v1/audio/speech", "Only the certificate says who asks."


def allow(running: Installation, voice: str, *more: str) -> dict[str, Any]:
    done = glottis_here("voices", "bearer", voice, "--yes", "--json", *more, environ=VARIABLES | running.settings.environ())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spoken(client: VoiceClient, voice: str, headers: dict[str, str]) -> bytes:
    return client.send("POST", SPEECH, headers, json={"input": TEXT, "voice": voice, "model": "hibari"}).content


def refused(client: VoiceClient, voice: str, headers: dict[str, str], expected: tuple[int, str]) -> None:
    with pytest.raises(Refused) as told:
        spoken(client, voice, headers)
    assert (told.value.status, told.value.code) == expected


def test_only_a_voice_that_allows_it_opens_for_the_certificate_alone(running: Installation, voice: str) -> None:
    client = running.client("studio")
    with pytest.raises(Refused) as told:
        client.token("speak", voice=voice, text=TEXT, bearer=True)
    assert (told.value.status, told.value.code) == (401, "proof_required")
    assert allow(running, voice)["changed"]
    try:
        both_ways(running, client, voice)
    finally:
        assert allow(running, voice, "--off")["changed"]
    with pytest.raises(Refused) as told:
        client.token("speak", voice=voice, text=TEXT, bearer=True)
    assert told.value.code == "proof_required"
    assert client.speak(voice, TEXT)


def both_ways(running: Installation, client: VoiceClient, voice: str) -> None:
    def fresh() -> str:
        return client.token("speak", voice=voice, text=TEXT, bearer=True)

    options = ("studio", "speak", "POST", SPEECH, "--voice", voice, "--text", TEXT, "--bearer")
    shown = glottis_here("headers", *options, environ=VARIABLES | running.settings.environ())
    token = shown.stdout.removeprefix("Authorization: Bearer ").strip()
    assert spoken(client, voice, {"Authorization": f"Bearer {token}"})[:4] == b"RIFF"
    refused(client, voice, {"Authorization": f"Bearer {token}"}, (401, "token_replayed"))
    assert spoken(client, voice, {"xi-api-key": fresh()})[:4] == b"RIFF"
    both = {"Authorization": f"Bearer {fresh()}", "xi-api-key": fresh()}
    refused(client, voice, both, (400, "invalid_request"))
    strong = client.token("speak", voice=voice, text=TEXT)
    for headers in ({"Authorization": f"Bearer {strong}"}, {"xi-api-key": strong}):
        refused(client, voice, headers, (401, "scheme_invalid"))
    refused(client, voice, client.headers("POST", SPEECH, fresh()), (401, "scheme_invalid"))
    refused(running.client("mallory"), voice, {"Authorization": f"Bearer {fresh()}"}, (401, "binding_mismatch"))


def test_the_token_endpoint_asks_for_a_nonce_with_400_and_everything_else_with_401(running: Installation) -> None:

    client = running.client("studio")
    details = json.dumps([{"type": "glottis_voice", "actions": ["read"]}])
    form = {"grant_type": "client_credentials", "authorization_details": details}
    token = client.token("read")
    for method, path, status, more, options in (
        ("POST", "/oauth/token", 400, {}, {"data": form}),
        ("GET", "/v1/voices", 401, {"Authorization": f"DPoP {token}"}, {}),
    ):
        given = token if more else None
        proof = jwt.decode(client.proof(method, path, given), options={"verify_signature": False})
        header = jwt.get_unverified_header(client.proof(method, path, given))
        late = jwt.encode(
            {**proof, "iat": proof["iat"] - 3600}, client.dpop_key, "ES256", headers={"typ": "dpop+jwt", "jwk": header["jwk"]}
        )
        answer = client._http.request(method, path, headers={"DPoP": late, **more}, **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "use_dpop_nonce")
        assert answer.headers["DPoP-Nonce"]
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
