"""Attacks on tokens and proofs, each beside the honest request that differs in that one thing.

Where an attack needs a valid signature over wrong content, the real token signer makes it: the check under test is then the
only one left to refuse.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import resource
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from house import BASE, PATHS, House, forge, new_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.hsm import KeyName
from policies import errors, jws
from policies.errors import PolicyError, TokenExpired, TokenInvalid, TokenMalformed
from policies.grants import Purpose
from policies.jws import P256_ORDER
from policies.proofs import make_proof, public_jwk

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture
def token(house: House) -> str:
    return house.token(house.client(), Purpose.SPEAK, house.voice())


def parts(token: str) -> tuple[dict, dict]:
    header, claims, _ = token.split(".")
    return json.loads(jws.decode(header)), json.loads(jws.decode(claims))


def sealed(house: House, header: bytes | dict, claims: bytes | dict) -> str:
    """Signed by the real token signer, whatever it says."""
    signed = ".".join(jws.encode(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (header, claims))
    return f"{signed}.{jws.encode(house.hsm.sign(KeyName.TOKEN_SIGNER, signed.encode()))}"


def refused(house: House, attack: str, kind: type[PolicyError] | tuple[type[PolicyError], ...]) -> None:
    with pytest.raises(kind):
        house.verifier.verify(attack)


def test_positive_control(house, token):
    assert house.verifier.verify(token) == house.verifier.verify(sealed(house, *parts(token)))


def without(mapping: dict, name: str) -> dict:
    return {key: value for key, value in mapping.items() if key != name}


def test_header_attacks(house, token):
    header, claims = parts(token)
    jwk = public_jwk(load_der_public_key(house.hsm.public_key(KeyName.TOKEN_SIGNER)))
    malformed = [
        *({"alg": alg} for alg in ("none", "None", "NONE", "nOnE", "HS256", "ES384", "RS256", "PS256", "EdDSA", "", None, 7)),
        *({"typ": typ} for typ in ("JWT", "at+jwt", "dpop+jwt", "application/voice-synth+jwt", "VOICE-SYNTH+JWT", "", None)),
        *({name: "https://evil.example/"} for name in ("jku", "x5u")),
        *({"jwk": jwk}, {"x5c": ["AAAA"]}, {"x5t": "AAAA"}, {"crit": ["exp"]}, {"crit": []}, {"b64": False}),
        *({"cty": "JWT"}, {"zip": "DEF"}, {"epk": jwk}, {"x": 1}),
    ]
    for change in malformed:
        refused(house, sealed(house, header | change, claims), TokenMalformed)
    for kid in (
        "",
        "/dev/null",
        "../../etc/passwd",
        "|sleep 10",
        "' UNION SELECT 'x",
        "%00",
        header["kid"] + " ",
        7,
        None,
        ["x"],
        {},
    ):
        refused(house, sealed(house, header | {"kid": kid}, claims), TokenInvalid)
    for name in header:
        refused(house, sealed(house, without(header, name), claims), TokenMalformed)


def raw_objects(value: dict) -> list[bytes]:
    """The same object in spellings that lenient readers take."""
    text = json.dumps(value)
    first = next(iter(value))
    return [
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        text.encode("utf-32-be"),
        f'{{"{first}": "x", {text[1:]}'.encode(),
        f'{text[:-1]}, "{first}": {json.dumps(value[first])}}}'.encode(),
        f'{{"\\u{ord(first[0]):04x}{first[1:]}": 1, {text[1:]}'.encode(),
        f"[{text}]".encode(),
        text.encode() + b"\x00",
        text.encode() + b" {}",
        text.encode() + b"//",
        text.replace('"', "'").encode(),
        b"",
        b"null",
        b"\xff" + text.encode(),
    ]


def test_spellings_of_json(house, token):
    header, claims = parts(token)
    for spelling in raw_objects(header):
        refused(house, sealed(house, spelling, claims), TokenMalformed)
    for spelling in raw_objects(claims):
        refused(house, sealed(house, header, spelling), TokenInvalid)
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    refused(house, sealed(house, header, b'{"cnf":' + b"[" * 6 + b"]" * 6 + b"}"), TokenInvalid)
    refused(house, sealed(house, deep, claims), TokenMalformed)


def test_claims_attacks(house, token):
    header, claims = parts(token)
    now = claims["iat"]
    cnf = claims["cnf"]
    changes = [
        *({"exp": exp} for exp in (str(now + 5), True, now + 4.5, now + 6, 2**60, -1, None, [now + 5], now)),
        *({"iat": iat} for iat in (str(now), now - 1, now + 1, True, None)),
        *({"nbf": nbf} for nbf in (str(now), now - 1, now + 5, None)),
        *({"iss": "https://evil.example"}, {"iss": BASE + "/"}, {"iss": [BASE]}, {"iss": None}),
        *({"aud": [BASE]}, {"aud": "https://evil.example"}, {"aud": [BASE, "x"]}, {"aud": None}),
        *({"sub": "another"}, {"sub": None}, {"client_id": "another"}, {"client_id": ""}, {"client_id": 7}, {"client_id": "a\nb"}),
        *({"tenant": ""}, {"tenant": None}, {"tenant": ["acme"]}, {"tenant": "a\u202eb"}),
        *({"jti": jti} for jti in ("", "short", "a" * 200, 7, None, ["a" * 22], "a" * 21 + " ")),
        *({"purpose": purpose} for purpose in ("compare", "read", "SPEAK", "", "admin", None, ["speak"])),
        *({"voice": str(house.voice()).upper()}, {"voice": "{" + claims["voice"] + "}"}, {"voice": None}, {"voice": 7}),
        *({"text_sha256": "0" * 63}, {"text_sha256": "A" * 64}, {"text_sha256": None}, {"text_sha256": ["0" * 64]}),
        *({"max_chars": "5"}, {"max_chars": -1}, {"max_chars": True}, {"max_chars": None}),
        *({"vkey": None}, {"vkey": {}}, {"vkey": claims["vkey"] | {"x": 1}}, {"vkey": claims["vkey"] | {"version": "1"}}),
        *({"cnf": {"jkt": cnf["jkt"] + "="}}, {"cnf": {"x5t#S256": cnf["jkt"] + "="}}, {"cnf": {}}, {"cnf": None}, {"cnf": [cnf]}),
        *({"cnf": cnf | {"kid": "x"}}, {"cnf": {"jwk": {}}}, {"cnf": cnf | {"jkt": ""}}, {"cnf": cnf | {"jkt": cnf["jkt"] + "="}}),
        *({"consent": claims["voice"]}, {"admin": True}, {"scope": "all"}),
    ]
    for change in changes:
        refused(house, sealed(house, header, claims | change), (TokenInvalid, TokenExpired))
    for name in claims:
        refused(house, sealed(house, header, without(claims, name)), TokenInvalid)
    for raw in (b"NaN", b"Infinity", b"1e400", b"-0.0", b"1e9"):
        text = json.dumps(claims).encode().replace(str(claims["exp"]).encode(), raw)
        refused(house, sealed(house, header, text), TokenInvalid)


def test_time(house, token):
    for offset in (5.0, 6, 3600, -3600, -2.5):
        house.clock.offset = offset
        refused(house, token, TokenExpired)
    house.clock.offset = 0
    house.verifier.verify(token)


def test_signature_attacks(house, token):
    signed, _, segment = token.rpartition(".")
    signature = jws.decode(segment)
    r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])

    def raw(r: int, s: int) -> bytes:
        return r.to_bytes(32) + s.to_bytes(32)

    public = load_der_public_key(house.hsm.public_key(KeyName.TOKEN_SIGNER))
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    wrong = [
        *(b"", bytes(64), raw(0, s), raw(r, 0), raw(P256_ORDER, s), raw(r, P256_ORDER), raw(1, 1), raw(s, r)),
        raw(r, P256_ORDER - s),  # the same signature, respelled
        *(signature[:-1], signature + b"\x00", b"\x00" + signature, signature[:32] + b"\x00" * 32 + signature[32:]),
        encode_dss_signature(r, s),
        hmac.digest(pem, signed.encode(), "sha256"),
        ec.generate_private_key(ec.SECP256R1()).sign(signed.encode(), ec.ECDSA(hashes.SHA256())),
    ]
    for attack in wrong:
        refused(house, f"{signed}.{jws.encode(attack)}", TokenInvalid)


def test_spellings_of_the_message(house, token):
    header, claims, signature = token.split(".")
    as_json = json.dumps({"protected": header, "payload": claims, "signature": signature})
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    noncanonical = signature[:-1] + last[last.index(signature[-1]) ^ 1]
    spellings = [
        *(token + "=", token + ".", "." + token, token + "\n", " " + token, "Bearer " + token, token.replace(".", "..", 1)),
        *(f"{header}=.{claims}.{signature}", f"{header}\n.{claims}.{signature}", f"{header}.{claims}.{signature}=="),
        *(f"{header}.{claims}", f"{header}.{claims}.", f"{header}..{signature}", f".{claims}.{signature}", "..", "", "."),
        *(f"{header}.{claims}.{noncanonical}", f"{header}.{claims}.{signature[:-1]}%", as_json, token + "\u2028"),
        *(token.replace("_", "/").replace("-", "+") + "+", base64.b64encode(token.encode()).decode(), token + "." + signature),
        token.translate({ord("e"): "\uff45"}),
    ]
    for spelling in spellings:
        refused(house, spelling, (TokenMalformed, TokenInvalid))


def test_huge_input_costs_nothing(house, token):
    """40 MB are refused by their length: no parsing, no copy of note, less than the cost of an honest token."""
    started = time.perf_counter()
    for _ in range(20):
        house.verifier.verify(token)
    honest = (time.perf_counter() - started) / 20
    huge = token + "A" * 40_000_000
    dots = "." * 40_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    for attack in (huge, dots):
        refused(house, attack, TokenMalformed)
    assert (time.perf_counter() - started) / 2 < 10 * honest
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_no_refusal_costs_much_more_than_accepting(house, token):
    header, claims = parts(token)
    filler = sealed(house, header, json.dumps(claims | {"x": [[[]]] * 300}).encode())
    attacks = [filler, sealed(house, b"[" * 2900, b""), sealed(house, b'{"a":' * 570, b""), "A" * 4096, "." * 4096]

    def cost(attack: str) -> float:
        best = 1.0
        for _ in range(20):
            started = time.perf_counter()
            with contextlib.suppress(PolicyError):
                house.verifier.verify(attack)
            best = min(best, time.perf_counter() - started)
        return best

    honest = cost(token)
    for attack in attacks:
        assert len(attack) <= 4096
        assert cost(attack) < 10 * honest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.data())
def test_no_mutation_of_a_good_token_is_accepted(house, token, data):
    place = data.draw(st.integers(0, len(token)))
    mutated = token[:place] + data.draw(st.text(max_size=3)) + token[place + data.draw(st.integers(0, 3)) :]
    if mutated != token:
        refused(house, mutated, PolicyError)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(JSON, st.data())
def test_no_other_value_of_a_claim_is_accepted(house, token, value, data):
    """The signer is honest about nothing here, and the verifier still refuses or reads exactly what was honest."""
    header, claims = parts(token)
    name = data.draw(st.sampled_from([name for name in claims if name not in ("tenant", "jti", "max_chars")]))
    if value != claims[name]:
        refused(house, sealed(house, header, claims | {name: value}), PolicyError)


# Through the whole gate


@pytest.fixture
def scene(house):
    device, voice = house.client(), house.voice()
    return house, device, voice


def gate_refuses(house, call, kind):
    with pytest.raises(kind):
        house.gate.admit(call)


def test_stolen_token_with_own_keys(scene):
    house, device, voice = scene
    thief = house.client("thief")
    token = house.token(device, Purpose.SPEAK, voice)
    own_proof = house.call(thief, token, Purpose.SPEAK, voice)
    gate_refuses(house, own_proof, errors.BindingMismatch)
    gate_refuses(house, replace(own_proof, certificate_der=device.certificate), errors.BindingMismatch)
    gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, certificate_der=thief.certificate), errors.BindingMismatch)
    gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, certificate_der=None), errors.CertificateRequired)
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


def test_scheme_downgrade(scene):
    house, device, voice = scene
    token = house.token(device, Purpose.SPEAK, voice)
    for scheme in ("Bearer", "bearer", "", "Basic", "DPoP ", "MAC"):
        gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, scheme=scheme), errors.SchemeInvalid)
    for proof in ("", "null", token):
        gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, proof=proof), errors.ProofInvalid)
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, scheme="dpop"))


def test_token_and_proof_are_not_each_other(scene):
    house, device, voice = scene
    token = house.token(device, Purpose.SPEAK, voice)
    proof = make_proof(device.key, "POST", BASE + PATHS[Purpose.SPEAK], token)
    gate_refuses(house, house.call(device, proof, Purpose.SPEAK, voice), TokenMalformed)
    gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, proof=token), errors.ProofInvalid)


def test_a_proof_is_for_one_token_and_one_request(scene):
    house, device, voice = scene
    token, other = (house.token(device, Purpose.SPEAK, voice) for _ in range(2))
    url = BASE + PATHS[Purpose.SPEAK]
    for proof in (
        make_proof(device.key, "POST", url, other),
        make_proof(device.key, "POST", url),
        make_proof(device.key, "GET", url, token),
        make_proof(device.key, "POST", url + "/x", token),
    ):
        gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, proof=proof), errors.ProofInvalid)
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


def test_another_purpose_voice_or_text(scene):
    house, device, voice = scene
    other = house.voice()
    token = house.token(device, Purpose.SPEAK, voice)
    gate_refuses(house, house.call(device, token, Purpose.SPEAK, other), errors.VoiceMismatch)
    gate_refuses(house, house.call(device, token, Purpose.SPEAK, None), errors.VoiceMismatch)
    gate_refuses(house, house.call(device, token, Purpose.COMPARE, voice), errors.PurposeMismatch)
    for text in ("The quick brown fox", "The quick brown fox. ", "the quick brown fox.", "", None):
        gate_refuses(house, house.call(device, token, Purpose.SPEAK, voice, text=text), errors.TextMismatch)
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


def test_a_respelled_proof_is_the_same_proof(scene):
    """ECDSA lets anybody respell a signature; single use does not rest on its spelling."""
    house, device, voice = scene
    request = house.request(device, "speak", voice=voice, text_sha256="0" * 64)
    house.minting.issue(request)
    signed, _, segment = request.proof.rpartition(".")
    signature = jws.decode(segment)
    respelled = signature[:32] + (P256_ORDER - int.from_bytes(signature[32:])).to_bytes(32)
    with pytest.raises(errors.ProofReplayed):
        house.minting.issue(replace(request, proof=f"{signed}.{jws.encode(respelled)}"))


def test_a_token_of_another_signer(scene):
    house, device, voice = scene
    token = house.token(device, Purpose.SPEAK, voice)
    header, claims = parts(token)
    gate_refuses(house, house.call(device, forge(header, claims, device.key), Purpose.SPEAK, voice), TokenInvalid)


def test_unregistered_device(scene):
    house, device, voice = scene
    stranger = new_device("stranger")
    with pytest.raises(errors.ClientUnknown):
        house.token(stranger, Purpose.SPEAK, voice)
    half = replace(device, key=stranger.key)
    with pytest.raises(errors.BindingMismatch):
        house.token(half, Purpose.SPEAK, voice)
    assert house.refusals.codes == {"client_unknown": 1, "binding_mismatch": 1}
