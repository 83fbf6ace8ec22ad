"""The token endpoint: who gets a token, for what, and what is written down about it."""

from __future__ import annotations

import json
from dataclasses import replace
from uuid import uuid4

import pytest
from house import BASE, House, sha256_hex
from hypothesis import given
from hypothesis import strategies as st

from keyvault.hsm import KeyName
from policies import errors, jws
from policies.authority import Role
from policies.errors import PolicyError
from policies.grants import Purpose
from policies.proofs import make_proof
from policies.tokens import MAX_CHARS, TOKEN_LIFETIME_S, jwks
from policies.wishes import Wish
from service.refusals import refusal_of

VOICE = "7c7a0b3e-6a52-4d0e-9d5c-0e6c2f5b7a11"
HASH = "a" * 64


def details(**members):
    return {"type": "glottis_voice", "actions": ["speak"], "voice": VOICE, "text_sha256": HASH} | members


def test_a_token_says_what_was_asked_and_no_more(house: House):
    device, voice = house.client(), house.voice()
    issued = house.minting.issue(house.request(device, "speak", voice=voice, text_sha256=sha256_hex("Hello.")))
    token = house.verifier.verify(issued.access_token)
    assert (token.voice, token.purpose, token.text_sha256) == (voice, Purpose.SPEAK, sha256_hex("Hello."))
    assert (token.x5t_s256, token.jkt) == (device.x5t, device.jkt)
    assert (token.tenant, token.client_id) == ("acme", "app")
    assert token.key is not None
    assert token.max_chars == MAX_CHARS
    assert token.expires_at - token.issued_at == TOKEN_LIFETIME_S == issued.expires_in
    assert len(jws.decode(token.jti)) == 16
    assert issued.authorization_details == [
        {
            "type": "glottis_voice",
            "actions": ["speak"],
            "voice": str(voice),
            "text_sha256": sha256_hex("Hello."),
            "max_chars": MAX_CHARS,
        }
    ]
    shown = {name: item["value"] for name, item in house.audit.disclose(issued.intent_id).items()}
    assert shown["jti"] == token.jti
    assert shown["key_version"] == 1
    assert shown["policies"] == "role.speaker"


def test_jwks_names_the_key_in_the_header(house: House):
    device = house.client()
    header = jws.split(house.token(device, Purpose.READ), limit=4096).header
    published = jwks([house.hsm.public_key(KeyName.TOKEN_SIGNER)])
    (key,) = published["keys"]
    assert key["kid"] == header["kid"]
    assert key.keys() == {"kty", "crv", "x", "y", "kid", "use", "alg"}


def test_a_proof_gets_one_token(house: House):
    device = house.client()
    request = house.request(device, "read")
    house.minting.issue(request)
    with pytest.raises(errors.ProofReplayed):
        house.minting.issue(request)
    assert house.refusals.codes == {"proof_replayed": 1}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"certificate_der": None}, errors.CertificateRequired),
        ({"certificate_der": b"another"}, errors.ClientUnknown),
        ({"grant_type": "authorization_code"}, errors.GrantTypeUnsupported),
        ({"grant_type": ""}, errors.GrantTypeUnsupported),
        ({"path": "/oauth/other"}, errors.ProofInvalid),
        ({"method": "GET"}, errors.ProofInvalid),
        ({"proof": ""}, errors.ProofInvalid),
        ({"authorization_details": ""}, errors.AuthorizationDetailsInvalid),
    ],
)
def test_what_is_not_the_clients_own_request_is_counted(house: House, change, kind):
    request = house.request(house.client(), "read")
    with pytest.raises(kind) as refused:
        house.minting.issue(replace(request, **change))
    assert house.refusals.codes == {refused.value.code: 1}
    assert house.count("intent") == 0
    house.minting.issue(request)


def test_a_proof_for_a_token_is_not_one_for_the_endpoint(house: House):
    device = house.client()
    proof = make_proof(device.key, "POST", f"{BASE}/oauth/token", "some token")
    with pytest.raises(errors.ProofInvalid):
        house.minting.issue(replace(house.request(device, "read"), proof=proof))


def test_hopeless_requests_are_refused_here_and_recorded(house: House):
    device, limited = house.client(), house.client("limited", roles=(Role.READER,))
    voice, only_compared = house.voice(), house.voice(purposes=["compare"])
    hopeless = [
        (limited, {"voice": voice}, "denied"),
        (device, {"voice": only_compared}, "consent_purpose"),
        (device, {"voice": uuid4()}, "voice_unknown"),
        (device, {"voice": house.voice("other")}, "voice_unknown"),
    ]
    for caller, members, code in hopeless:
        before = house.count("intent")
        with pytest.raises(PolicyError) as refused:
            house.minting.issue(house.request(caller, "speak", text_sha256=HASH, **members))
        assert refused.value.code == code
        assert house.count("intent") == before + 1
    for consent in (uuid4(), house.consent("other").consent_id):
        with pytest.raises(PolicyError) as refused:
            house.token(device, Purpose.ENROL, consent=consent)
        assert refused.value.code == "consent_unknown"


def test_details_as_they_may_be():
    wish = Wish.parse(json.dumps([details(max_chars=12)]))
    assert (str(wish.voice), wish.text_sha256, wish.max_chars) == (VOICE, HASH, 12)
    assert Wish.parse(json.dumps(wish.details())) == wish
    assert Wish.parse('[{"type":"glottis_voice","actions":["read"]}]') == Wish(Purpose.READ)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        json.dumps(details()),
        json.dumps([details(), details()]),
        json.dumps([[details()]]),
        json.dumps([details(type="other")]),
        json.dumps([details(actions=[])]),
        json.dumps([details(actions=["speak", "compare"])]),
        json.dumps([details(actions="speak")]),
        json.dumps([details(actions=["fly"])]),
        json.dumps([details(actions=[["speak"]])]),
        json.dumps([details(voice="x")]),
        json.dumps([details(voice=None)]),
        json.dumps([details(voice=7)]),
        json.dumps([details(text_sha256=HASH.upper())]),
        json.dumps([details(text_sha256=HASH[1:])]),
        json.dumps([details(max_chars=0)]),
        json.dumps([details(max_chars=MAX_CHARS + 1)]),
        json.dumps([details(max_chars="5")]),
        json.dumps([details(max_chars=True)]),
        json.dumps([details(locations=["https://evil.example"])]),
        json.dumps([details(consent=VOICE)]),
        json.dumps([{"type": "glottis_voice", "actions": ["speak"], "voice": VOICE}]),  # speech is bound to its text
        json.dumps([details(actions=["compare"])]),
        json.dumps([details()]).replace('"type"', '"type": "x", "type"'),
        json.dumps([details()]) + " " * 2048,
        "[" * 1000,
        "\ud800",
        "\ufeff" + json.dumps([details()]),
    ],
)
def test_details_that_are_not_understood(text):
    with pytest.raises(errors.AuthorizationDetailsInvalid):
        Wish.parse(text)


@pytest.mark.parametrize(
    ("changed", "member"),
    [
        ({"voice": "secret"}, "voice"),
        ({"voice": None}, "voice"),
        ({"text_sha256": "secret"}, "text_sha256"),
        ({"max_chars": "secret"}, "max_chars"),
        ({"liveness": ["secret"]}, "liveness"),
        ({"consent": VOICE}, "consent"),
        ({"type": "secret"}, "type"),
        ({"actions": ["secret"]}, "actions"),
        ({"actions": [{"secret": 1}]}, "actions"),
        ({"secret": VOICE}, None),
    ],
)
def test_the_member_that_does_not_hold_is_named_and_nothing_that_was_sent(changed, member):
    with pytest.raises(errors.AuthorizationDetailsInvalid) as refused:
        Wish.parse(json.dumps([details(**changed)]))
    told = refusal_of(refused.value)
    assert told.extra == {"param": member}
    assert "secret" not in f"{told}{told.fix}{told.extra}"
    assert member is None or f"Mend this: {member} is" in told.fix


@given(st.text(max_size=300))
def test_no_text_breaks_the_details(text):
    with pytest.raises(errors.AuthorizationDetailsInvalid):
        Wish.parse(text)
