"""The whole OpenAPI document against a running installation, by requests that schemathesis makes of it, good and bad ones.

Whatever is sent, and whoever sends it: no crash, no status that is not described, every refusal with code, message and fix,
and nothing of what was sent in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import just
from installation import Installation
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from service.client import VoiceClient

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
CANARY = "zq7-sent-by-the-caller-zq7"
LONGEST = 40
"""Characters to be spoken: what is tested here is not speech."""

Sign = Callable[[schemathesis.Case], dict[str, str]]


@pytest.fixture(scope="module")
def session(running: Installation) -> Iterator[requests.Session]:
    """Connections without a certificate."""
    with requests.Session() as made:
        made.verify = str(running.settings.officer_dir / "ca.pem")
        made.trust_env = False
        yield made


@pytest.fixture(scope="module")
def certified(running: Installation) -> Iterator[requests.Session]:
    """Connections with a certificate of a client that no other test uses: what fails here is counted for it alone."""
    running.client("contract")
    folder = running.settings.client_dir("contract")
    with requests.Session() as made:
        made.verify, made.cert = str(folder / "ca.pem"), (str(folder / "client.pem"), str(folder / "client.key"))
        made.trust_env = False
        yield made


@pytest.fixture(scope="module")
def document(running: Installation, session: requests.Session) -> Any:
    """The document as the installation shows it."""
    answer = session.get(f"{running.settings.public_base_url}/openapi.json", timeout=30)
    assert answer.status_code == 200
    return schemathesis.openapi.from_dict(answer.json())


def codes_of(document: Any, status: int) -> str:
    described = document.raw_schema["components"]["responses"]
    return str(described[f"Refused{status}"]["description"]) if f"Refused{status}" in described else ""


def examined(document: Any, answer: schemathesis.Response | httpx.Response, case: schemathesis.Case) -> None:
    """One answer. Raises AssertionError, or what schemathesis found."""
    try:
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code < 400:
            return
        assert CANARY not in f"{answer.text} {answer.headers}"
        error = answer.json()["error"]
        assert {"code", "message", "fix", "type", "param"} <= error.keys()
        assert all(error[member] for member in ("code", "message", "fix"))
        assert error["code"] in codes_of(document, answer.status_code) or error["code"] == "use_dpop_nonce"
        told = json.dumps(document.raw_schema)
        for text in texts(case.body), texts(case.query), texts(case.path_parameters):
            assert not [sent for sent in text if sent in answer.text and sent not in told]
    except Exception as failure:
        failure.add_note(f"{case.method} {case.path}: {answer.status_code} {answer.text[:300]}")
        raise


def texts(value: Any) -> list[str]:
    """Every text of four characters and more in what was sent, names of members as well."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts(part)]
    return [value] if isinstance(value, str) and len(value) >= 4 else []


def tried(document: Any, session: requests.Session, base: str, times: int, sign: Sign) -> Counter[int]:
    """So many good and so many bad requests for every call; how many answers of each status there were."""
    found: Counter[int] = Counter()

    def check(case: schemathesis.Case, mode: schemathesis.GenerationMode) -> None:
        case.headers = {"X-Canary": CANARY, **sign(case)}
        case.query = {**(case.query or {}), CANARY: CANARY}
        if isinstance(case.body, dict) and mode is schemathesis.GenerationMode.NEGATIVE:
            case.body = {**case.body, CANARY: CANARY}
        answer = case.call(base_url=base, session=session, verify=session.verify, cert=session.cert, timeout=60)
        found[answer.status_code] += 1
        examined(document, answer, case)

    seeded = settings(
        max_examples=times,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in (result.ok() for result in document.get_all_operations()):
        for mode in MODES:
            if mode is schemathesis.GenerationMode.POSITIVE or operation.body or operation.path_parameters:
                seeded(given(operation.as_strategy(generation_mode=mode), just(mode))(check))()
    return found


def signed(client: VoiceClient, voice: str, consent: str) -> Sign:
    """What a client that has every right does: a fresh token for what the request says, and a proof for it."""
    actions = {
        "POST /v1/consents": {"action": "consent"},
        "GET /v1/voices": {"action": "read"},
        "GET /v1/voices/{voice}": {"action": "read"},
        "POST /v1/voices": {"action": "enrol", "consent": consent},
        "POST /v1/uploads": {"action": "enrol", "consent": consent},
        "DELETE /v1/voices/{voice}": {"action": "erase", "voice": voice},
        "POST /v1/voices/{voice}/verify": {"action": "compare", "voice": voice},
        "POST /v1/liveness": {"action": "liveness", "voice": voice},
        "POST /v1/liveness/{challenge}": {"action": "liveness", "voice": voice},
        "POST /v1/audio/speech": {"action": "speak", "voice": voice, "text": "Hello."},
    }

    def sign(case: schemathesis.Case) -> dict[str, str]:
        label, body = case.operation.label, case.body
        if label == "POST /v1/voices/{voice}/verify":
            case.path_parameters = {"voice": voice}
        if isinstance(body, dict) and isinstance(body.get("voice"), str):
            body["voice"] = voice
        wanted = dict(actions.get(label, {}))
        if label == "POST /v1/audio/speech" and isinstance(body, dict) and isinstance(body.get("input"), str):
            wanted["text"] = body["input"] = body["input"][:LONGEST]
        path = case.formatted_path
        if not wanted:
            return {"DPoP": client.proof(case.method, path)}
        return client.headers(case.method, path, client.token(wanted.pop("action"), **wanted))

    return sign


def rounds(
    running: Installation, document: Any, session: requests.Session, certified: requests.Session, voice: str, n: int
) -> None:
    base, client = running.settings.public_base_url, running.client("contract")
    consent = client.record_consent("contract", ["speak"], "2100-01-01T00:00:00Z", "none")["id"]
    strangers = tried(document, session, base, n, lambda _: {})
    unproved = tried(document, certified, base, n, lambda _: {"Authorization": f"DPoP {CANARY}"})
    proved = tried(document, certified, base, n, signed(client, voice, consent))
    for refused in (strangers, unproved):
        assert refused[401], refused
        assert not refused[201], refused
    assert proved.keys() >= {200, 201, 400}, proved


def test_the_document_holds_for_everybody(
    running: Installation, document: Any, session: requests.Session, certified: requests.Session, voice: str
) -> None:
    rounds(running, document, session, certified, voice, 2)
    assert running.client("contract").voice(voice)["id"] == voice


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_document_holds_for_long(
    running: Installation, document: Any, session: requests.Session, certified: requests.Session, voice: str
) -> None:
    rounds(running, document, session, certified, voice, 60)


def test_a_breach_would_be_seen(document: Any) -> None:
    """The control: answers that say too much, or what is not described, are found."""
    operation = document["/v1/consents"]["POST"]
    case = operation.Case(body={"subject": "somebody in particular"}, media_type="application/json")

    def answer(status: int, **error: str) -> httpx.Response:
        told = {"code": "invalid_request", "message": "m", "fix": "f", "type": "t", "param": None, **error}
        made = httpx.Response(status, json={"error": told}, request=httpx.Request("POST", "https://localhost/v1/consents"))
        made.elapsed = timedelta()
        return made

    examined(document, answer(400), case)
    for wrong in (
        answer(500, code="internal_error"),
        answer(418),
        answer(400, code="never_heard_of"),
        answer(400, fix=""),
        answer(400, message="No such subject: somebody in particular"),
        answer(400, message=CANARY),
    ):
        with pytest.raises((AssertionError, schemathesis.core.failures.FailureGroup)):
            examined(document, wrong, case)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "OPTIONS", "HEAD"])
def test_methods_that_no_call_has(running: Installation, certified: requests.Session, method: str) -> None:
    answer = certified.request(method, f"{running.settings.public_base_url}/v1/voices/{uuid4()}?{CANARY}", timeout=30)
    assert answer.status_code == 405
    assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"
