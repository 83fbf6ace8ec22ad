"""Browsers: a key registered once by a code, and tokens that name the key alone, for what the policies let a browser do."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from house import BASE, PATHS, Device, House, forge
from sqlalchemy import text as sql

from policies import caller_errors, errors, jws
from policies.authority import Client, ClientState, Role
from policies.browsers import BrowserKeys, Presented, invite
from policies.errors import PolicyError
from policies.gate import Call
from policies.grants import Binding, Purpose
from policies.proofs import make_proof, public_jwk
from policies.store import durable

REGISTER = "/v1/browser-keys"
AT_ONCE = 16


@pytest.fixture
def browsers(house):
    return BrowserKeys(
        database=house.database,
        proofs=house.proofs,
        store=house.store,
        intents=house.audit,
        refusals=house.refusals,
        clock=house.clock,
    )


def code(house: House, client_id: str = "page", *, roles=None, voice: UUID | None = None, lifetime_s: int = 600) -> str:
    """A code; of a browser that reads, and speaks if it has a voice."""
    roles = (Role.READER, *((Role.SPEAKER,) if voice else ())) if roles is None else roles
    with durable(house.database) as transaction:
        terms = {"client_id": client_id, "tenant": "acme", "roles": roles, "voice": voice}
        return invite(house.store, transaction, **terms, now=house.clock(), lifetime_s=lifetime_s).code


def presented(code: str, key: ec.EllipticCurvePrivateKey, **changes: str) -> Presented:
    proof = make_proof(key, "POST", BASE + REGISTER, changes.pop("for_code", code))
    return replace(Presented("POST", REGISTER, code, proof), **changes)


def browser(house: House, browsers: BrowserKeys, client_id: str = "page", **terms) -> Device:
    """A registered browser; it has no certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    browsers.register(presented(code(house, client_id, **terms), key))
    return Device(client_id, b"", key)


def token(house: House, device: Device, purpose: Purpose, voice: UUID | None = None) -> str:
    return house.token(Bare(device), purpose, voice)


class Bare(Device):
    """A device that shows no certificate."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.client_id, None, device.key)  # type: ignore[arg-type]


def call(house: House, device: Device, purpose: Purpose, voice: UUID | None = None, **changes) -> Call:
    return house.call(Bare(device), token(house, device, purpose, voice), purpose, voice, **changes)


def intents(house: House, action: str) -> list[str]:
    with house.database.connect() as connection:
        bodies = [json.loads(bytes(row.body)) for row in connection.execute(sql("SELECT body FROM intent ORDER BY counter"))]
    return [body["outcome"] for body in bodies if body["action"] == action]


def test_a_browser_speaks_with_its_own_voice(house, browsers):
    voice = house.voice()
    device = browser(house, browsers, voice=voice)
    grant = house.gate.admit(call(house, device, Purpose.SPEAK, voice))
    grant.recheck(house.clock(), key=grant.token.key)
    assert grant.token.bound is Binding.KEY
    assert (grant.token.x5t_s256, grant.token.jkt, grant.proof.jkt) == (None, device.jkt, device.jkt)
    assert intents(house, "client.registered") == ["allowed"]
    assert house.of_client("page").browser


def test_the_token_names_the_key_alone(house, browsers):
    issued = token(house, browser(house, browsers), Purpose.READ)
    assert json.loads(jws.decode(issued.split(".")[1]))["cnf"].keys() == {"jkt"}


def test_a_code_works_once(house, browsers):
    made = code(house)
    browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))
    for _ in range(2):
        with pytest.raises(caller_errors.InvitationUsed):
            browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))
    assert intents(house, "client.registered") == ["allowed", "denied"], "recorded once, and counted after that"
    assert house.refusals.codes == {"invitation_used": 1}


def test_uses_of_a_code_at_once_have_one_success(house, browsers):
    made = code(house)

    def use(_: int) -> str:
        try:
            browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))
        except PolicyError as refusal:
            return refusal.code
        return "registered"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert Counter(threads.map(use, range(AT_ONCE))) == {"registered": 1, "invitation_used": AT_ONCE - 1}
    assert house.count("client") == 1


def test_a_code_out_of_time(house, browsers):
    made, key = code(house, lifetime_s=20), ec.generate_private_key(ec.SECP256R1())
    house.clock.offset = 20
    with pytest.raises(caller_errors.InvitationExpired):
        browsers.register(presented(made, key))
    assert house.count("client") == 0
    house.clock.offset = 0
    browsers.register(presented(made, key))


def test_a_code_put_back_stays_used(house, browsers):
    made = code(house)
    house.edit("CREATE TABLE kept AS SELECT * FROM browser_invitation")
    browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))
    house.edit("DELETE FROM browser_invitation; DELETE FROM client; INSERT INTO browser_invitation SELECT * FROM kept")
    with pytest.raises(caller_errors.InvitationUsed):
        browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))


def test_a_code_changed_in_the_database_is_refused(house, browsers):
    voice = house.voice()
    for change in ("roles = '{enroller}'", "tenant = 'other'", "voice_id = NULL", "client_id = 'app'"):
        made = code(house, voice=voice)
        house.edit(f"UPDATE browser_invitation SET {change}")
        with pytest.raises(errors.AuthorityRowTampered):
            browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))
        house.edit("DELETE FROM browser_invitation")


def test_the_proof_is_for_this_code_and_this_call(house, browsers):
    """Who saw a proof on its way cannot use it for another code, nor the code with another's proof."""
    made, key = code(house), ec.generate_private_key(ec.SECP256R1())
    jwk = public_jwk(key.public_key())
    claims = {"htm": "POST", "htu": BASE + REGISTER, "iat": int(house.clock()), "jti": "a" * 22}
    without_code = forge({"typ": "dpop+jwt", "alg": "ES256", "jwk": jwk}, claims, key)
    for wrong in (
        presented(made, key, for_code="A" * 43),
        presented(made, key, method="PUT"),
        presented(made, key, path="/oauth/token"),
        presented(made, key, proof=""),
        presented(made, key, proof=without_code),
        presented(made, key, proof=forge({"typ": "dpop+jwt", "alg": "none", "jwk": jwk}, claims, key)),
    ):
        with pytest.raises(errors.ProofInvalid):
            browsers.register(wrong)
    browsers.register(presented(made, key))


def test_what_is_no_code_is_counted_and_not_recorded(house, browsers):
    before, guesses = house.count("intent"), ["", "x", "A" * 43, "A" * 44, "é" * 43]
    for guess in guesses:
        with pytest.raises(caller_errors.InvitationUnknown):
            browsers.register(presented(guess, ec.generate_private_key(ec.SECP256R1())))
    assert (house.count("intent"), house.refusals.codes) == (before, {"invitation_unknown": len(guesses)})


def test_a_key_is_one_client(house, browsers):
    device = browser(house, browsers)
    with pytest.raises(errors.RowChanged):
        browsers.register(presented(code(house, "second"), device.key))
    with pytest.raises(errors.RowChanged):
        code(house, "page")


def test_a_clients_own_key_becomes_no_browser_and_the_code_stays_good(house, browsers):
    """One key under two names would be a way around the certificate."""
    device, made = house.client(), code(house)
    with pytest.raises(caller_errors.KeyUsedOtherwise):
        browsers.register(presented(made, device.key))
    assert intents(house, "client.registered") == ["denied"]
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, device.client_id)
    with pytest.raises(caller_errors.KeyUsedOtherwise):
        browsers.register(presented(made, device.key))
    browsers.register(presented(made, ec.generate_private_key(ec.SECP256R1())))


def test_a_browsers_key_is_registered_for_no_client_with_a_certificate(house, browsers):
    device = browser(house, browsers)
    house.client("other")
    with house.database.begin() as transaction, pytest.raises(caller_errors.KeyUsedOtherwise):
        house.registry.register_client(
            transaction, client_id="app", tenant="rival", cert_sha256="A" * 43, jkt=device.jkt, roles=[Role.READER]
        )
    with house.database.begin() as transaction, pytest.raises(caller_errors.KeyUsedOtherwise):
        house.registry.rotate_client(transaction, "other", cert_sha256="A" * 43, jkt=device.jkt)
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "other")
        revoked = house.store.client(transaction, "other")
        house.store.take(transaction, replace(revoked, jkt=device.jkt, row_version=9))  # a revocation arrives, whatever else is so
    assert house.of_client("other").state is ClientState.REVOKED


def test_of_two_uses_of_one_key_at_once_one_is_registered(house, browsers):
    key = ec.generate_private_key(ec.SECP256R1())
    made = code(house)

    def as_browser() -> None:
        browsers.register(presented(made, key))

    def as_client() -> None:
        device = Device("app", b"certificate", key)
        with durable(house.database) as transaction:
            terms = {"client_id": "app", "tenant": "acme", "cert_sha256": device.x5t, "jkt": device.jkt, "roles": [Role.READER]}
            house.registry.register_client(transaction, **terms)

    def tried(use) -> str:
        try:
            use()
        except PolicyError as refusal:
            return refusal.code
        return "registered"

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(tried, (as_browser, as_client))) == ["key_used_otherwise", "registered"]
    assert house.count("client") == 1


def test_a_browser_is_given_no_more_than_browsers_may_have(house):
    """A speaker needs the one voice; the other roles are for clients with a certificate."""
    for roles in ((), (Role.ENROLLER,), (Role.READER, Role.CONSENT_KEEPER), (Role.VERIFIER,), (Role.SPEAKER,)):
        with pytest.raises(caller_errors.BrowserRolesRefused):
            code(house, roles=roles)


def test_a_code_is_for_a_voice_of_its_tenant(house):
    for voice in (house.voice("other"), uuid4()):
        with pytest.raises(errors.VoiceUnknown):
            code(house, voice=voice)


def test_another_voice_looks_like_none(house, browsers):
    voice, other = house.voice(), house.voice()
    device = browser(house, browsers, voice=voice)
    with pytest.raises(PolicyError) as refused:
        token(house, device, Purpose.SPEAK, other)
    assert refused.value.code == "voice_unknown"


def test_a_browser_does_nothing_else(house, browsers):
    voice = house.voice()
    device = browser(house, browsers, voice=voice)
    with house.database.begin() as transaction:  # whatever roles it has
        row = house.store.client(transaction, "page")
        house.store.swap(transaction, row, replace(row, roles=tuple(Role)))
    for purpose in (Purpose.COMPARE, Purpose.CONSENT, Purpose.ERASE):
        with pytest.raises(errors.Denied) as refused:
            token(house, device, purpose, voice if purpose is not Purpose.CONSENT else None)
        assert refused.value.decided_by == ("browser.purposes",)


def test_a_client_with_a_certificate_needs_it_still(house):
    """Its DPoP key alone gets no token, and its token without the certificate opens nothing."""
    device, voice = house.client(), house.voice()
    with pytest.raises(errors.CertificateRequired):
        token(house, device, Purpose.READ)
    good = house.speech(device, voice)
    with pytest.raises(errors.CertificateRequired):
        house.gate.admit(replace(good, certificate_der=None))
    house.gate.admit(good)


def test_a_stolen_token_is_worth_nothing_without_the_key(house, browsers):
    voice = house.voice()
    device, thief = browser(house, browsers, voice=voice), house.client("thief")
    stolen = token(house, device, Purpose.SPEAK, voice)
    for certificate in (None, thief.certificate):
        with pytest.raises(errors.BindingMismatch):
            house.gate.admit(house.call(thief, stolen, Purpose.SPEAK, voice, certificate_der=certificate))
    for scheme in ("Bearer", "Ticket", ""):
        with pytest.raises(errors.CertificateRequired):
            house.gate.admit(house.call(Bare(device), stolen, Purpose.SPEAK, voice, scheme=scheme))
        with pytest.raises(errors.SchemeInvalid):
            house.gate.admit(house.call(device, stolen, Purpose.SPEAK, voice, scheme=scheme, certificate_der=thief.certificate))
    admitted = house.call(Bare(device), stolen, Purpose.SPEAK, voice)
    house.gate.admit(admitted)
    again = make_proof(device.key, "POST", BASE + PATHS[Purpose.SPEAK], stolen)
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(replace(admitted, proof=again))


def test_a_revoked_browser_is_refused_with_a_token_in_hand(house, browsers):
    voice = house.voice()
    device = browser(house, browsers, voice=voice)
    in_hand = call(house, device, Purpose.SPEAK, voice)
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "page")
    with pytest.raises(errors.ClientInactive):
        house.gate.admit(in_hand)
    with pytest.raises(errors.ClientInactive):
        token(house, device, Purpose.READ)


def test_a_browser_is_given_no_certificate(house, browsers):
    browser(house, browsers)
    with house.database.begin() as transaction, pytest.raises(caller_errors.BrowserHasNoCertificate):
        house.registry.rotate_client(transaction, "page", cert_sha256="A" * 43, jkt="B" * 43)


def test_a_browsers_row_changed_in_the_database_is_refused(house, browsers):
    voice = house.voice()
    for number, change in enumerate(("voice_id = NULL", "voice_id = gen_random_uuid()", "cert_sha256 = repeat('A', 43)")):
        device = browser(house, browsers, f"page-{number}", voice=voice)
        token(house, device, Purpose.SPEAK, voice)
        house.edit(f"UPDATE client SET {change} WHERE client_id = 'page-{number}'")
        with pytest.raises((errors.AuthorityRowTampered, errors.CertificateRequired)):
            token(house, device, Purpose.SPEAK, voice)


def test_strangers_without_a_certificate_shut_nobody_out(house, browsers):
    """They are nobody in particular: counted together, each of them could use up the attempts of all."""
    house.limits = replace(house.limits, attempts=3)
    house.__post_init__()
    device = browser(house, browsers)
    for _ in range(10):
        with pytest.raises(errors.CertificateRequired):
            token(house, replace(device, key=ec.generate_private_key(ec.SECP256R1())), Purpose.READ)
    house.gate.admit(call(house, device, Purpose.READ))


def test_rows_without_a_voice_keep_the_bytes_of_their_macs():
    plain = Client("app", "acme", "A" * 43, "B" * 43, ("reader",), ClientState.ACTIVE, 1)
    assert len(plain.fields()) == 7
    assert replace(plain, voice_id=uuid4()).fields()[:7] == plain.fields()
