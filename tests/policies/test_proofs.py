"""DPoP proofs: which addresses are the same, which keys are keys, and when a proof is too old."""

from __future__ import annotations

import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from house import BASE, forge
from hypothesis import given
from hypothesis import strategies as st

from policies import jws
from policies.errors import ProofInvalid
from policies.proofs import PROOF_AGE_S, PROOF_LEAD_S, ProofVerifier, make_proof, normal_url, public_jwk, public_key, token_hash
from policies.tokens import jwk_thumbprint

KEY = ec.generate_private_key(ec.SECP256R1())
JWK = public_jwk(KEY.public_key())
PATH = "/v1/audio/speech"
NOW = 1_800_000_000
VERIFIER = ProofVerifier(BASE, lambda: NOW)


def proof(header=None, key=KEY, **claims):
    honest = {"htm": "POST", "htu": BASE + PATH, "iat": NOW, "jti": "a" * 22}
    wanted = {name: value for name, value in (honest | claims).items() if value is not None}
    return forge({"typ": "dpop+jwt", "alg": "ES256", "jwk": JWK} | (header or {}), wanted, key)


def test_a_clients_proof_verifies():
    verified = ProofVerifier(BASE, time.time).verify(make_proof(KEY, "POST", BASE + PATH, "token"), "POST", PATH, "token")
    assert verified.jkt == jwk_thumbprint(JWK)
    assert VERIFIER.verify(proof(), "POST", PATH, None).issued_at == NOW


@pytest.mark.parametrize(
    "htu",
    [
        "https://voice.example/v1/audio/speech",
        "HTTPS://Voice.Example/v1/audio/speech",
        "https://voice.example:443/v1/audio/speech",
        "https://voice.example/v1/audio/speech?x=1",
        "https://voice.example/v1/audio/speech#part",
        "https://voice.example/v1/%61udio/speech",
    ],
)
def test_the_same_address_spelled_otherwise(htu):
    VERIFIER.verify(proof(htu=htu), "POST", PATH, None)


@pytest.mark.parametrize(
    "htu",
    [
        "http://voice.example/v1/audio/speech",
        "https://voice.example:8443/v1/audio/speech",
        "https://voice.example/v1/audio/speech/",
        "https://voice.example/v1/audio%2Fspeech",
        "https://voice.example/v1/audio//speech",
        "https://voice.example/v1/audio/../audio/speech",
        "https://voice.example/v1/audio/%2e%2e/audio/speech",
        "https://voice.example/V1/audio/speech",
        "https://voice.example.evil.example/v1/audio/speech",
        "https://voice.example@evil.example/v1/audio/speech",
        "https://user@voice.example/v1/audio/speech",
        "https://voice.example\\@evil.example/v1/audio/speech",
        "https://vo\u0131ce.example/v1/audio/speech",
        "https://voice.example/v1/audio/\u017fpeech",
        " https://voice.example/v1/audio/speech",
        "https://voice.example/v1/audio/speech\n",
        "https://voice.example\t/v1/audio/speech",
        "//voice.example/v1/audio/speech",
        "/v1/audio/speech",
        "https://voice.example/v1/audio/speech%",
        "",
        7,
        ["https://voice.example/v1/audio/speech"],
    ],
)
def test_another_address(htu):
    with pytest.raises(ProofInvalid):
        VERIFIER.verify(proof(htu=htu), "POST", PATH, None)


def test_a_base_with_a_path():
    verifier = ProofVerifier("https://voice.example:8443/api/", lambda: NOW)
    verifier.verify(proof(htu="https://voice.example:8443/api/v1/voices"), "POST", "/v1/voices", None)
    with pytest.raises(ProofInvalid):
        verifier.verify(proof(htu="https://voice.example:8443/v1/voices"), "POST", "/v1/voices", None)


def test_a_base_that_is_no_address_is_refused_at_the_start():
    with pytest.raises(ValueError, match="address"):
        ProofVerifier("voice.example", lambda: NOW)


@pytest.mark.parametrize(
    "claims",
    [
        {"htm": "GET"},
        {"htm": "post"},
        {"htm": ["POST"]},
        {"htm": None},
        {"htu": None},
        {"iat": None},
        {"jti": None},
        {"jti": "short"},
        {"jti": "a" * 129},
        {"jti": 7},
        {"jti": "a" * 21 + "\x00"},
        {"iat": str(NOW)},
        {"iat": True},
        {"iat": NOW + 0.5},
        {"iat": 10**30},
        {"iat": -1},
        {"iat": NOW - PROOF_AGE_S - 1},
        {"iat": NOW + PROOF_LEAD_S + 1},
        {"ath": token_hash("token")},
    ],
)
def test_claims_that_do_not_hold(claims):
    with pytest.raises(ProofInvalid):
        VERIFIER.verify(proof(**claims), "POST", PATH, None)


@pytest.mark.parametrize("ath", [None, token_hash("another"), "", 7])
def test_a_proof_for_another_token(ath):
    with pytest.raises(ProofInvalid):
        VERIFIER.verify(proof(ath=ath), "POST", PATH, "token")


OTHER = public_jwk(ec.generate_private_key(ec.SECP256R1()).public_key())


@pytest.mark.parametrize(
    "header",
    [
        {"typ": "jwt"},
        {"typ": "DPoP+JWT"},
        {"typ": "voice-synth+jwt"},
        {"alg": "none"},
        {"alg": "HS256"},
        {"alg": "ES384"},
        {"alg": ["ES256"]},
        {"kid": "x"},
        {"crit": ["exp"]},
        {"b64": False},
        {"x5c": ["x"]},
        {"jwk": OTHER},
        {"jwk": JWK | {"d": "AAAA"}},
        {"jwk": JWK | {"use": "enc"}},
        {"jwk": JWK | {"key_ops": ["encrypt"]}},
        {"jwk": JWK | {"key_ops": ["verify", "sign"]}},
        {"jwk": JWK | {"alg": "ES384"}},
        {"jwk": JWK | {"crv": "P-384"}},
        {"jwk": JWK | {"crv": "secp256k1"}},
        {"jwk": JWK | {"y": JWK["x"]}},
        {"jwk": JWK | {"x": JWK["x"] + "="}},
        {"jwk": JWK | {"x": "AA" + JWK["x"]}},
        {"jwk": JWK | {"x": "A" * 43, "y": "A" * 43}},
        {"jwk": JWK | {"x": None}},
        {"jwk": {"kty": "oct", "k": "AAAA"}},
        {"jwk": {"kty": "RSA", "n": "AQAB", "e": "AQAB"}},
        {"jwk": {}},
        {"jwk": None},
        {"jwk": "https://evil.example/jwk"},
        {"jwk": [JWK]},
    ],
)
def test_headers_that_do_not_hold(header):
    with pytest.raises(ProofInvalid):
        VERIFIER.verify(proof(header), "POST", PATH, None)


def test_a_browsers_exported_key_is_a_key():
    public_key(JWK | {"ext": True, "key_ops": ["verify"], "use": "sig", "alg": "ES256", "kid": "mine"})


def test_private_members_are_never_in_a_proof():
    header = jws.split(make_proof(KEY, "GET", BASE), limit=4096).header
    assert header["jwk"].keys() == {"kty", "crv", "x", "y"}


@given(st.data())
def test_no_mutation_of_a_good_proof_is_accepted(data):
    good = proof(ath=token_hash("token"))
    place = data.draw(st.integers(0, len(good)))
    piece = data.draw(st.text(max_size=3))
    mutated = good[:place] + piece + good[place + data.draw(st.integers(0, 3)) :]
    if mutated != good:
        with pytest.raises(ProofInvalid):
            VERIFIER.verify(mutated, "POST", PATH, "token")


@given(st.text(max_size=80))
def test_no_text_breaks_the_address_rules(text):
    try:
        normal = normal_url(BASE + text)
    except ValueError:
        return
    assert normal_url(normal) == normal
    assert normal.startswith("https://voice.example")
