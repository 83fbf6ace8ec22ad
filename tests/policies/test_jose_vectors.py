"""Published vectors: RFC 7515, 7638, 8037 and 9449 examples, and Wycheproof's JWS, JWK and P-256 signature sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from jwt.algorithms import ECAlgorithm

from policies import jws, proofs
from policies.errors import PolicyError, ProofInvalid
from policies.proofs import ProofVerifier, public_key, token_hash
from policies.tokens import TokenVerifier, jwk_thumbprint

WYCHEPROOF = Path(__file__).parent.parent / "vectors" / "wycheproof"
ES256 = ECAlgorithm(ECAlgorithm.SHA256, SECP256R1)

RFC7638_N = (
    "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64t"
    "Z_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbO"
    "pbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw"
)
RFC9449_JWK = (
    "eyJ0eXAiOiJkcG9wK2p3dCIsImFsZyI6IkVTMjU2IiwiandrIjp7Imt0eSI6IkVDIiwieCI6Imw4dEZyaHgtMzR0VjNoUklDUkRZOXpDa0RscEJoRjQyVVFV"
    "ZldWQVdCRnMiLCJ5IjoiOVZFNGpmX09rX282NHpiVFRsY3VOSmFqSG10NnY5VERWclUwQ2R2R1JEQSIsImNydiI6IlAtMjU2In19"
)
RFC9449_TOKEN_PROOF = (
    f"{RFC9449_JWK}.eyJqdGkiOiItQndDM0VTYzZhY2MybFRjIiwiaHRtIjoiUE9TVCIsImh0dSI6Imh0dHBzOi8vc2VydmVyLmV4YW1wbGUuY29tL3Rva2Vu"
    "IiwiaWF0IjoxNTYyMjYyNjE2fQ.2-GxA6T8lP4vfrg8v-FdWP0A0zdrj8igiMLvqRMUvwnQg4PtFLbdLXiOSsX0x7NVY-FNyJK70nfbV37xRZT3Lg"
)
RFC9449_RESOURCE_PROOF = (
    f"{RFC9449_JWK}.eyJqdGkiOiJlMWozVl9iS2ljOC1MQUVCIiwiaHRtIjoiR0VUIiwiaHR1IjoiaHR0cHM6Ly9yZXNvdXJjZS5leGFtcGxlLm9yZy9wcm90"
    "ZWN0ZWRyZXNvdXJjZSIsImlhdCI6MTU2MjI2MjYxOCwiYXRoIjoiZlVIeU8ycjJaM0RaNTNFc05yV0JiMHhXWG9hTnk1OUlpS0NBcWtzbVFFbyJ9"
    ".2oW9RP35yRqzhrtNP86L-Ey71EOptxRimPPToA1plemAgR6pxHF8y6-yqyVnmcw6Fy1dqd-jfxSYoMxhAJpLjA"
)
RFC9449_ACCESS_TOKEN = "Kz~8mXK1EalYznwH-LC-1fBAo.4Ljp~zsPE_NeO.gxU"


def test_rfc7638_and_rfc8037_thumbprints():
    rsa = {"kty": "RSA", "n": RFC7638_N, "e": "AQAB", "alg": "RS256", "kid": "2011-04-29"}
    assert jwk_thumbprint(rsa) == "NzbLsXh8uDCcd-6MNwXF4W_7noWXFZAfHkxZsRGC9Xs"
    okp = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}
    assert jwk_thumbprint(okp) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_rfc7515_appendix_a3():
    jwk = {
        "kty": "EC",
        "crv": "P-256",
        "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
        "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
    }
    example = (
        "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
        ".DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q"
    )
    assert accepts(example, jwk)


@pytest.mark.parametrize(
    ("proof", "base", "method", "path", "token", "now"),
    [
        (RFC9449_TOKEN_PROOF, "https://server.example.com", "POST", "/token", None, 1562262616),
        (RFC9449_RESOURCE_PROOF, "https://resource.example.org", "GET", "/protectedresource", RFC9449_ACCESS_TOKEN, 1562262618),
    ],
)
def test_rfc9449_examples(monkeypatch, proof, base, method, path, token, now):
    verifier = ProofVerifier(base, lambda: now)
    # The one deviation: the examples' identifiers have 96 random bits and we ask for 128.
    with pytest.raises(ProofInvalid) as refused:
        verifier.verify(proof, method, path, token)
    assert refused.value.detail == "jti is not an identifier of 128 bits"
    monkeypatch.setattr(jws, "identifier", lambda value: value)
    assert verifier.verify(proof, method, path, token).jkt == "0ZcOCORZNYy-DWpqq30jZyJGHTN0d2HglBV3uiguA4I"
    with pytest.raises(ProofInvalid):
        verifier.verify(proof, method, path + "x", token)


def test_rfc9449_ath():
    assert token_hash(RFC9449_ACCESS_TOKEN) == "fUHyO2r2Z3DZ53EsNrWBb0xWXoaNy59IiKCAqksmQEo"


# Wycheproof's JWS set, read by the parts of our verifiers


def accepts(compact: str, jwk: dict) -> bool:
    """Our reading of any ES256 message: the same calls as the verifiers make, without the claims that only ours have."""
    try:
        message = jws.split(compact, limit=4096)
        key = public_key({name: value for name, value in jwk.items() if name != "d"})
    except ValueError:
        return False
    header = message.header
    if header.keys() - {"alg", "typ", "kid"} or header.get("alg") != "ES256" or jwk.get("alg", "ES256") != "ES256":
        return False
    if header.get("kid", jwk.get("kid")) != jwk.get("kid"):
        return False
    return len(message.signature) == 64 and ES256.verify(message.signed, key, message.signature)


def jws_cases():
    for group in json.loads((WYCHEPROOF / "json_web_signature_test.json").read_text())["testGroups"]:
        for case in group["tests"]:
            yield group, group.get("public") or group["private"], case


def test_wycheproof_jws():
    """All 401: nothing invalid is accepted, and of the valid ones all ES256; every other algorithm is refused by us."""
    wrong, refused_valid, right, seen = [], [], 0, 0
    for _, jwk, case in jws_cases():
        seen += 1
        accepted = isinstance(case["jws"], str) and accepts(case["jws"], jwk)
        if accepted and case["result"] != "valid":
            wrong.append(case["tcId"])
        if not accepted and case["result"] == "valid" and jwk.get("alg") == "ES256":
            refused_valid.append(case["tcId"])
        right += accepted
    assert (wrong, refused_valid) == ([], [])
    assert (right, seen) == (2, 401)


def test_wycheproof_jws_handed_to_the_verifiers():
    """None of the 401 is one of our tokens or proofs, whatever keys we hold; and each is refused as ours are, not by accident."""
    seen = 0
    for _, jwk, case in jws_cases():
        compact = case["jws"] if isinstance(case["jws"], str) else json.dumps(case["jws"])
        keys = []
        if jwk.get("crv") == "P-256":
            key = ES256.from_jwk({name: value for name, value in jwk.items() if name != "d"})
            keys = [key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)]
        with pytest.raises(PolicyError):
            TokenVerifier(keys, "https://i", "https://i", lambda: 1.0).verify(compact)
        with pytest.raises(PolicyError):
            ProofVerifier("https://i", lambda: 1.0).verify(compact, "GET", "/", None)
        seen += 1
    assert seen == 401


def test_wycheproof_jwk():
    """A key that is not a sound P-256 verification key is no key: of the set, only the sound ES256 key is taken."""
    taken = []
    for group in json.loads((WYCHEPROOF / "json_web_key_test.json").read_text())["testGroups"]:
        keys = (group.get("public") or group["private"])["keys"]
        for case in group["tests"]:
            if any(accepts(case["jws"], key) for key in keys):
                taken.append((case["tcId"], case["result"]))
    assert all(result == "valid" for _, result in taken), taken


def test_wycheproof_p256_signatures():
    seen = 0
    for group in json.loads((WYCHEPROOF / "ecdsa_secp256r1_sha256_p1363_test.json").read_text())["testGroups"]:
        key = load_der_public_key(bytes.fromhex(group["publicKeyDer"]))
        assert isinstance(key, EllipticCurvePublicKey)
        for case in group["tests"]:
            signature = bytes.fromhex(case["sig"])
            verified = len(signature) == 64 and proofs._ES256.verify(bytes.fromhex(case["msg"]), key, signature)
            assert verified == (case["result"] == "valid"), case["tcId"]
            seen += 1
    assert seen == 262
