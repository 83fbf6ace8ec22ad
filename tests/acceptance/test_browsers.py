"""Browsers from the outside: the example page's own code in Node, and what the server tells pages of other origins."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from installation import ORIGIN, VARIABLES, Installation

from policies.authority import Role
from policies.proofs import make_proof
from service import clients

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
TEXT = "Spoken in a browser."
NOBODY = "00000000-0000-4000-8000-000000000001"  # the same in every test process: it stands in tests' names


@pytest.fixture
def page(running: Installation) -> Iterator[httpx.Client]:
    """A connection without a certificate."""
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    with httpx.Client(base_url=running.settings.public_base_url, verify=context, timeout=60.0, trust_env=False) as http:
        yield http


def invited(running: Installation, name: str, *more: str) -> str:
    """A code, as the operator makes one."""
    argv = [sys.executable, "-P", "-m", "service.cli.main", "clients", "invite", name, "--tenant", "acceptance", *more, "--json"]
    environ = VARIABLES | running.settings.environ()
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["code"])


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def form(action: str) -> dict[str, str]:
    details = json.dumps([{"type": "glottis_voice", "actions": [action]}])
    return {"grant_type": "client_credentials", "authorization_details": details}


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node to run the page's code in")
def test_the_page_registers_its_key_reads_and_speaks(running: Installation, voice: str) -> None:
    name = f"page-{uuid4().hex[:8]}"
    code = invited(running, name, "--role", "reader", "--role", "speaker", "--voice", voice)
    script = Path(__file__).with_name("browser_in_node.mjs")
    argv = [shutil.which("node"), script, EXAMPLE, running.settings.public_base_url, code, voice, TEXT]
    environ = {"PATH": VARIABLES["PATH"], "NODE_EXTRA_CA_CERTS": str(running.settings.officer_dir / "ca.pem")}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["export"].keys() == {"refused"}, "the key can be read out of the page"
    assert told["control"] > 100, "nor can one that was made to be read out: the test sees nothing"
    assert told["before"] == {"refused": "certificate_required"}, "a key that nobody registered"
    assert told["register"]["client_id"] == name
    assert told["register"]["voice"] == voice
    assert told["again"] == {"refused": "invitation_used"}
    assert told["read"]["id"] == voice
    assert told["other"] == told["foreign"] == {"refused": "voice_unknown"}
    assert told["spoken"] > 10_000
    assert told["thief"] == {"refused": "certificate_required"}


def test_a_browser_sees_its_own_voice_and_ends_when_it_is_revoked(running: Installation, voice: str, page: httpx.Client) -> None:
    name, key, base = f"page-{uuid4().hex[:8]}", ec.generate_private_key(ec.SECP256R1()), running.settings.public_base_url
    terms = {"tenant": "acceptance", "roles": [Role.READER], "voice": None, "lifetime_s": 60}
    code = clients.invite(running.settings, name, **terms)["code"]
    proof = make_proof(key, "POST", f"{base}/v1/browser-keys", code)
    assert page.post("/v1/browser-keys", json={"code": code}, headers={"DPoP": proof}).status_code == 201

    def call(path: str) -> httpx.Response:
        asked = page.post("/oauth/token", data=form("read"), headers={"DPoP": make_proof(key, "POST", f"{base}/oauth/token")})
        if not asked.is_success:
            return asked
        token = asked.json()["access_token"]
        proof = make_proof(key, "GET", base + path, token)
        return page.get(path, headers={"Authorization": f"DPoP {token}", "DPoP": proof})

    assert call("/v1/voices").json() == {"voices": []}, "it was invited for no voice"
    assert error(call(f"/v1/voices/{voice}")) == (404, "voice_unknown")
    clients.revoke(running.settings, name)
    assert error(call("/v1/voices")) == (403, "client_inactive")


def test_a_certificates_client_needs_it_still(running: Installation, page: httpx.Client) -> None:
    """With its DPoP key alone it gets no token, and a token that names both opens nothing."""
    studio, base = running.client("studio"), running.settings.public_base_url
    alone = page.post("/oauth/token", data=form("read"), headers={"DPoP": studio.proof("POST", "/oauth/token")})
    assert error(alone) == (401, "certificate_required")
    token = studio.token("read")
    stolen = page.get("/v1/voices", headers=studio.headers("GET", "/v1/voices", token))
    assert error(stolen) == (401, "certificate_required")
    assert studio.call("GET", "/v1/voices", token).is_success
    assert base == studio.base_url


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/consents"),
        ("POST", "/v1/voices"),
        ("POST", "/v1/uploads"),
        ("DELETE", f"/v1/voices/{NOBODY}"),
        ("POST", f"/v1/voices/{NOBODY}/verify"),
        ("GET", f"/v1/voices/{NOBODY}/verify"),
        ("PUT", "/oauth/token"),
    ],
)
def test_other_calls_need_a_certificate_whatever_they_bring(page: httpx.Client, method: str, path: str) -> None:
    answer = page.request(method, path, headers={"DPoP": "x", "Authorization": "DPoP x", "Origin": ORIGIN})
    assert error(answer) == (401, "certificate_required")


def test_pages_of_other_origins_are_told_nothing(page: httpx.Client) -> None:
    """The server allows exactly the origins that are set; the browser does the rest."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,dpop"}
    allowed = page.options("/oauth/token", headers={"Origin": ORIGIN, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in allowed.headers
    answer = page.post("/oauth/token", data=form("read"), headers={"Origin": ORIGIN, "DPoP": "x"})
    assert error(answer) == (401, "proof_invalid")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "DPoP-Nonce" in answer.headers["access-control-expose-headers"]
    for origin in ("https://evil.example", "null", ORIGIN + ".evil.example", ORIGIN + ":444", ORIGIN.replace("https", "http")):
        refused = page.options("/oauth/token", headers={"Origin": origin, **asked})
        assert "access-control-allow-origin" not in refused.headers, origin
        simple = page.get("/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in simple.headers, origin
    other = page.options("/v1/voices", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "DELETE"})
    assert other.status_code == 400
