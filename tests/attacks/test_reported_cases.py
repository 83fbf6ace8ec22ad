"""What was reported of others' access checks, row by row, tried on ours. What needs whole processes stands elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import anyio
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from house import BASE, PATHS, House, forge
from starlette.datastructures import Headers
from starlette.requests import Request

from keyvault.hsm import KeyName
from policies import errors, jws
from policies.grants import Purpose
from policies.jws import P256_ORDER
from policies.proofs import make_proof, public_jwk
from service.edge.app import create_app
from service.edge.relay import Relay, Worker
from service.edge.tls import Connection
from service.vault.http import _credentials

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scene(house: House):
    device, voice = house.client(), house.voice()
    return house, device, voice, house.token(device, Purpose.SPEAK, voice)


def sealed(house: House, header: bytes | dict, claims: bytes | dict) -> str:
    """Signed by the real token signer, whatever it says."""
    signed = ".".join(jws.encode(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (header, claims))
    return f"{signed}.{jws.encode(house.hsm.sign(KeyName.TOKEN_SIGNER, signed.encode()))}"


def parts(token: str) -> tuple[dict, dict]:
    header, claims, _ = token.split(".")
    return json.loads(jws.decode(header)), json.loads(jws.decode(claims))


@pytest.mark.parametrize("changes", [{"scheme": "Bearer"}, {"scheme": "bearer"}, {"scheme": ""}, {"proof": ""}])
def test_a_bound_token_is_no_bearer_token(scene, changes):
    """D1: a token bound to a key, sent as Bearer, or as DPoP without a proof, is refused."""
    house, device, voice, token = scene
    call = house.call(device, token, Purpose.SPEAK, voice)
    with pytest.raises((errors.SchemeInvalid, errors.ProofInvalid)):
        house.gate.admit(replace(call, **changes))
    house.gate.admit(call)


def test_a_valid_proof_by_another_key(scene):
    """D2: a stolen token with the thief's own proof, `ath` right and all, is refused."""
    house, device, voice, token = scene
    thief = replace(device, key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(errors.BindingMismatch):
        house.gate.admit(house.call(thief, token, Purpose.SPEAK, voice))
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


def test_both_bindings_must_hold_and_no_other_is_taken(scene):
    """D3: with `jkt` and `x5t#S256` in the token both must hold; a member of `cnf` that nobody checks is refused."""
    house, device, voice, token = scene
    other = house.client("other")
    for stolen in (replace(device, certificate=other.certificate), replace(device, key=other.key)):
        with pytest.raises(errors.BindingMismatch):
            house.gate.admit(house.call(stolen, token, Purpose.SPEAK, voice))
    header, claims = parts(token)
    for cnf in (
        {"kid": "x"},
        {"jkt": claims["cnf"]["jkt"] + "="},
        claims["cnf"] | {"jwk": {}},
        {},
    ):
        with pytest.raises(errors.TokenInvalid):
            house.verifier.verify(sealed(house, header, claims | {"cnf": cnf}))
    alone = sealed(house, header, claims | {"cnf": {"x5t#S256": claims["cnf"]["x5t#S256"]}})
    for changes, refusal in (({}, errors.SchemeInvalid), ({"scheme": "Bearer", "proof": None}, errors.ProofRequired)):
        with pytest.raises(refusal):
            house.gate.admit(house.call(device, alone, Purpose.SPEAK, voice, **changes))
    # A browser's token names its key alone: this client is no browser, so nobody is found by it.
    key_alone = sealed(house, header, claims | {"cnf": {"jkt": claims["cnf"]["jkt"]}})
    for certificate in (device.certificate, None):
        with pytest.raises(errors.ClientUnknown):
            house.gate.admit(house.call(device, key_alone, Purpose.SPEAK, voice, certificate_der=certificate))
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


FORWARDED = {
    "x-forwarded-host": "evil.example",
    "x-forwarded-proto": "http",
    "x-forwarded-prefix": "/evil",
    "forwarded": "host=evil.example;proto=http",
    "x-original-url": "/evil",
    "host": "evil.example",
}


def test_no_header_moves_the_address_that_a_proof_is_for(scene):
    """D6: `htu` is held against the configured address; what a proxy, or whoever says he is one, forwards changes nothing.

    The table of spellings (port, case, percent signs, query, fragment, slash) is in tests/policies/test_proofs.py.
    """
    house, device, voice, token = scene
    path = PATHS[Purpose.SPEAK]
    headers = FORWARDED | {
        "authorization": f"DPoP {token}",
        "dpop": make_proof(device.key, "POST", f"http://evil.example{path}", token),
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": Headers(headers).raw,
        "query_string": b"",
        "server": ("x", 1),
    }
    seen = _credentials(Request(scope))
    assert (seen.method, seen.path) == ("POST", path)
    call = house.call(device, token, Purpose.SPEAK, voice, proof=seen.proof)
    with pytest.raises(errors.ProofInvalid):
        house.gate.admit(call)
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


async def forwarded_by_the_edge(headers: dict[str, str]) -> httpx.Headers:
    """What the vault gets to see of a request with these headers and a certificate."""
    seen: list[httpx.Request] = []

    def vault(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers={"DPoP-Nonce": "n"})

    client = httpx.AsyncClient(transport=httpx.MockTransport(vault), base_url="http://vault")
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/voices",
        "query_string": b"",
        "headers": Headers(headers).raw,
        "extensions": {"glottis.connection": Connection(b"der")},
    }

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    answer = await Relay([Worker(client)]).forward(Request(scope, receive))
    assert answer.headers["dpop-nonce"] == "n"
    await client.aclose()
    return seen[0].headers


def test_the_edge_forwards_none_of_them():
    """D6: and the edge does not even pass them on; a certificate in a header is replaced by that of the connection."""
    seen = anyio.run(forwarded_by_the_edge, FORWARDED | {"x-glottis-client-cert": "ZXZpbA==", "client-cert": ":ZXZpbA==:"})
    assert seen["host"] == "vault"
    assert not seen.keys() & (FORWARDED.keys() - {"host"})
    assert seen.get_list("x-glottis-client-cert") == ["ZGVy"]
    assert "client-cert" not in seen


BODIES = {
    "/v1/consents": {
        "json": {
            "subject": "One",
            "purposes": ["speak"],
            "territory": ["*"],
            "expires_at": "2099-01-01T00:00:00Z",
            "evidence": "form",
        }
    },
    "/v1/audio/speech": {"json": {"model": "hibari", "input": "Hello.", "voice": str(uuid4()), "response_format": "wav"}},
    "/v1/browser-keys": {"json": {"code": "A" * 43}},
    "/oauth/token": {"data": {"grant_type": "client_credentials", "authorization_details": "[]"}},
}
OPEN = {"/", "/healthz", "/readyz", "/.well-known/jwks.json", "/openapi.json", "/v1/models", "/v1/enrolments"}
"""Nobody is known here by a certificate; the last one takes a one-time ticket."""


@pytest.mark.parametrize("origins", [[], ["https://app.example"]], ids=["no browsers", "browsers"])
def test_every_route_demands_the_certificate_that_the_token_names(origins):
    """D8: no route serves a token with `cnf` without a client certificate; each call is asked, none is trusted by its path.

    Nor where browsers may call: those come with a proof by a key that the vault knows.
    """
    app = create_app([], origins=origins)
    asked = []

    async def ask() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="https://edge", headers={"authorization": "DPoP x"}
            ) as client:
                for path, calls in app.openapi()["paths"].items():
                    for method in calls if path not in OPEN else ():
                        wanted = path.replace("{voice}", str(uuid4()))
                        answer = await client.request(method, wanted, **BODIES.get(path, {}))
                        asked.append((method, path, answer.status_code, answer.json()["error"]["code"]))

    anyio.run(ask)
    assert len(asked) >= 7
    assert {(status, code) for _, _, status, code in asked} == {(401, "certificate_required")}, asked


@pytest.mark.parametrize("purpose", list(Purpose))
def test_the_gate_demands_it_for_every_purpose(house: House, purpose):
    """D8: nor does the gate, whatever the purpose."""
    device = house.client()
    call = replace(house.call(device, "x", Purpose.READ, certificate_der=None), purpose=purpose)
    with pytest.raises(errors.CertificateRequired):
        house.gate.admit(call)


def test_no_library_that_ignores_crit_or_leaves_the_algorithm_open():
    """D11: python-jose is no dependency; the algorithm is fixed in our code, and `crit` is refused (test_token_attacks.py)."""
    names = {
        re.split(r"[=<>~!\[; ]", line.strip())[0].lower()
        for file in (ROOT / "requirements").iterdir()
        for line in file.read_text().splitlines()
        if line and not line.startswith((" ", "#", "-"))
    }
    assert "pyjwt" in names, "the control: names are read"
    assert not names & {"python-jose", "python-jwt", "jose", "jwt"}


def test_a_token_brings_no_key_of_its_own(scene):
    """D12: an access token with `jwk`, `jku`, `x5u` or `x5c` is refused outright, also where its signature holds."""
    house, _, _, token = scene
    header, claims = parts(token)
    own = ec.generate_private_key(ec.SECP256R1())
    for more in (
        {"jwk": public_jwk(own.public_key())},
        {"jku": "https://evil.example"},
        {"x5u": "https://evil.example"},
        {"x5c": ["A"]},
    ):
        for attack in (sealed(house, header | more, claims), forge(header | more, claims, own)):
            with pytest.raises(errors.TokenMalformed):
                house.verifier.verify(attack)
    house.verifier.verify(token)


def lenient(house: House, token: str) -> dict[str, str]:
    """What PyJWT 2.15.1 was measured to accept, or to leave to its caller."""
    header, claims = parts(token)
    signed, _, segment = token.rpartition(".")
    signature = jws.decode(segment)
    other_s = (P256_ORDER - int.from_bytes(signature[32:])).to_bytes(32)
    text = json.dumps(claims)
    return {
        "padding": token + "=",
        "high s": f"{signed}.{jws.encode(signature[:32] + other_s)}",
        "duplicate claim": sealed(house, header, (text[:-1] + ', "purpose": "speak"}').encode()),
        "duplicate alg": sealed(house, (json.dumps(header)[:-1] + ', "alg": "ES256"}').encode(), claims),
        "UTF-16": sealed(house, header, text.encode("utf-16")),
        "BOM": sealed(house, header, b"\xef\xbb\xbf" + text.encode()),
        "string exp": sealed(house, header, claims | {"exp": str(claims["exp"])}),
        "no exp": sealed(house, header, {name: value for name, value in claims.items() if name != "exp"}),
        "other typ": sealed(house, header | {"typ": "JWT"}, claims),
        "aud list": sealed(house, header, claims | {"aud": [claims["aud"]]}),
    }


def test_what_the_library_accepts_we_do_not(scene):
    """D14: padding, high s, duplicate names, other encodings, string or missing exp, any typ: each is refused."""
    house, _, _, token = scene
    for attack in lenient(house, token).values():
        with pytest.raises((errors.TokenMalformed, errors.TokenInvalid)):
            house.verifier.verify(attack)
    assert house.verifier.verify(token)


@pytest.mark.parametrize("member", [{"use": "enc"}, {"key_ops": ["encrypt"]}])
def test_a_key_for_something_else_verifies_nothing(scene, member):
    """D14: a JWK that says it is for encryption is no verification key."""
    house, device, voice, token = scene
    jwk = public_jwk(device.key.public_key()) | member
    header = {"typ": "dpop+jwt", "alg": "ES256", "jwk": jwk}
    _, claims, _ = make_proof(device.key, "POST", BASE + PATHS[Purpose.SPEAK], token).split(".")
    proof = forge(header, json.loads(jws.decode(claims)), device.key)
    with pytest.raises(errors.ProofInvalid):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, proof=proof))


def test_single_use_is_by_issuer_and_jti(scene):
    """D14: the same content signed anew is another spelling of the same token, and was used."""
    house, device, voice, token = scene
    again = sealed(house, *parts(token))
    assert again != token
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(house.call(device, again, Purpose.SPEAK, voice))
