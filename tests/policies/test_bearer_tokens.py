"""Tokens bound to a certificate alone: only where the voice allows it, only as Bearer, once, and never in place of another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from house import BASE, PATHS, TEXT, Device, House, sha256_hex
from sqlalchemy import text as sql

from policies import errors, jws
from policies.authority import VoiceTerm
from policies.grants import Binding, Grant, Purpose, VerifiedProof
from policies.minting import IssuedToken, TokenRequest
from policies.proofs import make_proof
from policies.tokens import Entitlement


def allow(house: House, voice, *terms: VoiceTerm) -> None:
    with house.database.begin() as transaction:
        house.registry.set_voice_terms(transaction, voice, terms)


def asked(house: House, device: Device, action: str, **members) -> TokenRequest:
    """A token request without a proof."""
    return replace(house.request(device, action, **members), proof=None)


def issued(house: House, device: Device, voice, text: str = TEXT) -> IssuedToken:
    return house.minting.issue(asked(house, device, "speak", voice=voice, text_sha256=sha256_hex(text)))


def bearer(house: House, device: Device, token: str, voice, **changes):
    return house.call(device, token, Purpose.SPEAK, voice, **{"scheme": "Bearer", "proof": None} | changes)


@pytest.fixture
def scene(house: House):
    device, voice = house.client(), house.voice()
    allow(house, voice, VoiceTerm.BEARER)
    return house, device, voice


def test_it_carries_the_certificate_alone_and_opens_the_voice_once(scene):
    house, device, voice = scene
    given = issued(house, device, voice)
    assert given.token_type == "Bearer"
    claims = json.loads(jws.decode(given.access_token.split(".")[1]))
    assert claims["cnf"] == {"x5t#S256": device.x5t}
    grant = house.gate.admit(bearer(house, device, given.access_token, voice))
    grant.recheck(house.clock(), key=grant.token.key)
    assert (grant.proof, grant.token.jkt, grant.token.bound) == (None, None, Binding.CERTIFICATE)
    shown = {name: item["value"] for name, item in house.audit.disclose(grant.intent_id).items()}
    assert (shown["jkt"], shown["proof_jti"], shown["x5t"]) == (None, None, device.x5t)
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(bearer(house, device, given.access_token, voice))
    assert house.count("used_token") == 1


def test_a_client_that_proves_its_key_gets_the_stronger_token_for_the_same_voice(scene):
    house, device, voice = scene
    assert house.verifier.verify(house.token(device, Purpose.SPEAK, voice)).jkt == device.jkt


# The attack table: which token, sent how, is refused with what


WRONG = {
    "bound to a key, as Bearer": (Binding.BOTH, {"scheme": "Bearer", "proof": None}),
    "bound to a key, as bearer": (Binding.BOTH, {"scheme": "bearer", "proof": None}),
    "bound to a key, as Bearer with its proof": (Binding.BOTH, {"scheme": "Bearer"}),
    "bound to the certificate, as DPoP with a proof": (Binding.CERTIFICATE, {"scheme": "DPoP"}),
    "bound to the certificate, as DPoP without one": (Binding.CERTIFICATE, {"scheme": "DPoP", "proof": None}),
    "bound to the certificate, as Bearer with a proof": (Binding.CERTIFICATE, {"scheme": "Bearer"}),
    "bound to the certificate, as Bearer with an empty proof": (Binding.CERTIFICATE, {"scheme": "Bearer", "proof": ""}),
    "bound to the certificate, in no scheme": (Binding.CERTIFICATE, {"scheme": "", "proof": None}),
    "bound to the certificate, in another scheme": (Binding.CERTIFICATE, {"scheme": "Basic", "proof": None}),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_token_has_one_scheme(scene, name):
    house, device, voice = scene
    binding, changes = WRONG[name]
    token = (
        issued(house, device, voice).access_token if binding is Binding.CERTIFICATE else house.token(device, Purpose.SPEAK, voice)
    )
    with pytest.raises(errors.SchemeInvalid):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, **changes))
    assert house.count("used_token") == 0
    honest = (
        bearer(house, device, token, voice) if binding is Binding.CERTIFICATE else house.call(device, token, Purpose.SPEAK, voice)
    )
    house.gate.admit(honest)


def test_a_token_bound_to_a_key_needs_its_proof(scene):
    house, device, voice = scene
    token = house.token(device, Purpose.SPEAK, voice)
    with pytest.raises(errors.ProofInvalid):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, proof=None))


def test_everything_else_holds_for_it_too(scene):
    house, device, voice = scene
    other, thief = house.voice(), house.client("thief")
    token = issued(house, device, voice).access_token
    for changes, refusal in (
        ({"certificate_der": thief.certificate}, errors.BindingMismatch),
        ({"certificate_der": None}, errors.CertificateRequired),
        ({"voice": other}, errors.VoiceMismatch),
        ({"text": "Another text."}, errors.TextMismatch),
        ({"purpose": Purpose.COMPARE}, errors.PurposeMismatch),
    ):
        with pytest.raises(refusal):
            house.gate.admit(replace(bearer(house, device, token, voice), **changes))
    house.clock.offset = 6
    with pytest.raises(errors.TokenExpired):
        house.gate.admit(bearer(house, device, token, voice))
    house.clock.offset = 0
    house.gate.admit(bearer(house, device, token, voice))


@pytest.mark.parametrize("action", ["speak", "compare", "enrol", "consent", "read", "erase"])
def test_without_a_proof_nothing_is_given_that_no_voice_allows(house, action):
    device, voice = house.client(), house.voice()
    members = {"speak": {"voice": voice, "text_sha256": sha256_hex(TEXT)}, "compare": {"voice": voice}, "erase": {"voice": voice}}
    members["enrol"] = {"consent": house.consent().consent_id}
    with pytest.raises(errors.ProofRequired):
        house.minting.issue(asked(house, device, action, **members.get(action, {})))


@pytest.mark.parametrize("action", ["consent", "read", "erase"])
def test_a_voice_that_allows_it_opens_and_does_no_more(scene, action):
    house, device, voice = scene
    with pytest.raises(errors.ProofRequired):
        house.minting.issue(asked(house, device, action, **({"voice": voice} if action == "erase" else {})))


def test_what_is_taken_back_counts_for_tokens_in_hand(scene):
    house, device, voice = scene
    token = issued(house, device, voice).access_token
    allow(house, voice)
    with pytest.raises(errors.ProofRequired):
        house.gate.admit(bearer(house, device, token, voice))
    with pytest.raises(errors.ProofRequired):
        issued(house, device, voice)
    house.gate.admit(house.speech(device, voice))


@pytest.mark.parametrize("statement", ["UPDATE voice SET terms = '{bearer}'", "UPDATE voice SET terms = '{bearer,x}'"])
def test_the_database_alone_allows_nothing(house, statement):
    device, voice = house.client(), house.voice()
    house.edit(statement)
    with pytest.raises(errors.AuthorityRowTampered):
        issued(house, device, voice)


def test_a_row_that_allowed_it_put_back_is_noticed(scene):
    house, device, voice = scene
    with house.database.connect() as connection:
        old = connection.execute(sql("SELECT row_version, mac, terms FROM voice")).mappings().one()
    allow(house, voice)
    house.edit("UPDATE voice SET row_version = :row_version, mac = :mac, terms = :terms", **old)
    with pytest.raises(errors.AuthorityRowTampered):
        issued(house, device, voice)


def test_an_unknown_or_revoked_client_gets_none(scene):
    house, device, voice = scene
    with pytest.raises(errors.ClientUnknown):
        house.minting.issue(replace(asked(house, device, "speak", voice=voice, text_sha256="0" * 64), certificate_der=b"another"))
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "app")
    with pytest.raises(errors.ClientInactive):
        issued(house, device, voice)


def test_refusals_without_a_proof_do_not_fill_the_log(scene):
    house, device, voice = scene
    house.clock.stop()
    token = issued(house, device, voice).access_token
    before = house.count("intent")
    for _ in range(3):
        with pytest.raises(errors.TextMismatch):
            house.gate.admit(bearer(house, device, token, voice, text="Another text."))
        with pytest.raises(errors.ProofRequired):
            house.minting.issue(asked(house, device, "read"))
    assert house.count("intent") == before + 2
    assert house.refusals.codes == {"text_mismatch": 2, "proof_required": 2}


def test_a_weaker_token_signed_by_mistake_is_refused_by_the_policies(house):
    device = house.client()
    token = house.mint.mint(Entitlement(house.mint.new_jti(), "acme", "app", Purpose.READ, device.x5t, None))
    assert house.verifier.verify(token).jkt is None
    with pytest.raises(errors.ProofRequired):
        house.gate.admit(house.call(device, token, Purpose.READ, scheme="Bearer", proof=None))


def test_a_grant_without_a_proof_is_for_such_a_token_alone(scene):
    house, device, voice = scene
    strong = house.gate.admit(house.speech(device, voice))
    weak = house.gate.admit(bearer(house, device, issued(house, device, voice).access_token, voice))
    proof = VerifiedProof(device.jkt, "j" * 22, int(house.clock()))
    for grant in (replace(strong, proof=None), replace(weak, proof=proof), Grant(weak.token, strong.proof, weak.intent_id, ())):
        with pytest.raises(errors.GrantMismatch):
            grant.recheck(house.clock(), key=grant.token.key)
    strong.recheck(house.clock(), key=strong.token.key)


def test_a_proof_for_the_token_endpoint_does_not_open_a_voice(scene):
    house, device, voice = scene
    token = issued(house, device, voice).access_token
    proof = make_proof(device.key, "POST", BASE + PATHS[Purpose.SPEAK], token)
    with pytest.raises(errors.SchemeInvalid):
        house.gate.admit(bearer(house, device, token, voice, scheme="DPoP", proof=proof))
