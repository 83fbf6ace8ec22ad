"""The store: compare-and-swap, MACed rows, and how long what was used is remembered."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from house import House, new_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.records import KeyRef
from policies import errors
from policies.authority import Role, VoiceState
from policies.grants import CLOCK_TOLERANCE_S, Purpose, VerifiedProof
from policies.proofs import PROOF_AGE_S
from policies.requests import Request
from policies.store import RETENTION_S
from policies.tokens import TOKEN_LIFETIME_S


def test_rows_come_back_as_they_were_written(house: House):
    device = house.client()
    consent = house.consent(territory=["FR", "DE", "DE"], purposes=["speak", "identify"])
    voice_id = house.voice(consent=consent)
    with house.database.begin() as transaction:
        assert house.store.consent(transaction, consent.consent_id) == consent
        voice = house.store.voice(transaction, "acme", voice_id)
        assert house.store.voices(transaction, "acme") == (voice,)
        assert house.store.clients(transaction) == (house.of_client("app"),)
        proof = VerifiedProof(device.jkt, "p" * 22, int(house.clock()))
        everything, _ = house.store.open(transaction, Request(device.x5t, proof, house.clock(), voice=voice_id)).authority()
    assert (everything.client, everything.voice, everything.consent) == (house.of_client("app"), voice, consent)
    assert consent.territory == ("DE", "FR")
    assert "Speaker One" not in repr(consent)


def test_tenants_do_not_see_each_others_voices(house: House):
    voice = house.voice("other")
    with house.database.begin() as transaction:
        assert house.store.voice(transaction, "acme", voice) is None
        assert house.store.voices(transaction, "acme") == ()
        with pytest.raises(errors.VoiceUnknown):
            house.registry.suspend_voice(transaction, "acme", voice)


def test_changes_are_compare_and_swap(house: House):
    voice_id = house.voice()
    with house.database.begin() as transaction:
        old = house.store.voice(transaction, "acme", voice_id)
        assert old is not None
        new = house.store.swap(transaction, old, replace(old, state=VoiceState.SUSPENDED))
        assert (new.row_version, new.state) == (2, VoiceState.SUSPENDED)
        with pytest.raises(errors.RowChanged):
            house.store.swap(transaction, old, replace(old, name="Two"))
        assert house.store.voice(transaction, "acme", voice_id) == new


def test_a_certificate_belongs_to_one_client(house: House):
    device = house.client()
    other = house.client("other")
    with house.database.begin() as transaction, pytest.raises(errors.RowChanged):
        house.registry.register_client(
            transaction, client_id="third", tenant="acme", cert_sha256=device.x5t, jkt=other.jkt, roles=[Role.READER]
        )
    with pytest.raises(errors.RowChanged), house.database.begin() as transaction:
        house.registry.rotate_client(transaction, "other", cert_sha256=device.x5t, jkt=other.jkt)


def test_rotation_and_revocation_take_effect_at_once(house: House):
    old = house.client()
    new = new_device("app")
    with house.database.begin() as transaction:
        house.registry.rotate_client(transaction, "app", cert_sha256=new.x5t, jkt=new.jkt)
    with pytest.raises(errors.ClientUnknown):
        house.token(old, Purpose.READ)
    house.token(new, Purpose.READ)
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "app")
    with pytest.raises(errors.ClientInactive):
        house.token(new, Purpose.READ)
    newer = new_device("app")
    with house.database.begin() as transaction, pytest.raises(errors.ClientInactive):  # revoked stays revoked
        house.registry.rotate_client(transaction, "app", cert_sha256=newer.x5t, jkt=newer.jkt)
    with house.database.begin() as transaction, pytest.raises(errors.ClientUnknown):
        house.registry.revoke_client(transaction, "nobody")


@pytest.mark.parametrize(
    "terms",
    [
        {"subject": ""},
        {"subject": "a\nb"},
        {"subject": "a" * 257},
        {"purposes": []},
        {"purposes": ["fly"]},
        {"purposes": ["speak", "speak"]},
        {"territory": []},
        {"territory": ["de"]},
        {"territory": ["DEU"]},
        {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"expires_at": datetime(2099, 1, 1)},  # noqa: DTZ001 — that is the point
        {"evidence": ""},
        {"evidence": "\ud800"},
    ],
)
def test_terms_that_cannot_be_recorded(house: House, terms):
    with pytest.raises(errors.ConsentInvalid):
        house.consent(**terms)
    assert house.count("consent") == 0


def test_a_voice_needs_a_consent_of_its_tenant(house: House):
    consent = house.consent("other")
    key = KeyRef(uuid4(), 1, "voices", 1)
    for consent_id in (consent.consent_id, uuid4()):
        with house.database.begin() as transaction, pytest.raises(errors.ConsentUnknown):
            house.registry.register_voice(transaction, voice_id=uuid4(), tenant="acme", name="x", consent_id=consent_id, key=key)
    with house.database.begin() as transaction, pytest.raises(errors.ConsentUnknown):
        house.registry.withdraw_consent(transaction, uuid4())


def test_a_consent_that_ended_during_enrolment_makes_no_voice(house: House):
    consent, short = house.consent(), house.consent(expires_at=datetime.now(UTC) + timedelta(seconds=1))
    with house.database.begin() as transaction:
        house.registry.withdraw_consent(transaction, consent.consent_id)
    with pytest.raises(errors.ConsentWithdrawn):
        house.voice(consent=consent)
    house.clock.offset = 2
    with pytest.raises(errors.ConsentExpired):
        house.voice(consent=short)
    assert house.count("voice") == 0


def remembered(house: House, expires_at: float, purged_at: float) -> bool:
    """Whether a proof that is acceptable until `expires_at` is still refused after a purge at `purged_at`."""
    proof = VerifiedProof("k", uuid4().hex, int(expires_at) - PROOF_AGE_S)
    with house.database.connect() as transaction:
        house.store.consume_proof(transaction, proof)
        house.store.purge(transaction, purged_at)
        known = not house.store.consume_proof(transaction, proof)
        transaction.rollback()
    return known


CLOCK_ERROR = st.floats(-CLOCK_TOLERANCE_S, CLOCK_TOLERANCE_S)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.floats(0, TOKEN_LIFETIME_S + PROOF_AGE_S), CLOCK_ERROR, CLOCK_ERROR, st.floats(0, 100))
def test_nothing_is_forgotten_while_some_clock_would_accept_it(house, life, verifiers, purgers, earlier):
    """True time t; clocks are wrong by up to the tolerance; a purge comes at or before the check."""
    expires_at = 1_800_000_000
    true_time = expires_at - life + 3
    accepted = true_time + verifiers <= expires_at
    purged_at = true_time - earlier + purgers
    if accepted:
        assert remembered(house, expires_at, purged_at)


def test_what_nobody_would_accept_is_forgotten(house: House):
    expires_at = 1_800_000_000
    assert remembered(house, expires_at, expires_at + RETENTION_S)
    assert not remembered(house, expires_at, expires_at + RETENTION_S + 0.001)


def test_a_purge_returns_how_much_it_forgot(house: House):
    device = house.client()
    house.gate.admit(house.call(device, house.token(device, Purpose.READ), Purpose.READ))
    assert (house.count("used_token"), house.count("used_proof")) == (1, 2)
    with house.database.begin() as transaction:
        assert house.store.purge(transaction, house.clock()) == 0
        assert house.store.purge(transaction, house.clock() + 60) == 3


def test_a_request_held_up_past_its_time_is_refused_after_consuming(house: House, monkeypatch):
    """The clock is read again after the guard row is written, so that a forgotten guard cannot be written anew."""
    device = house.client()
    call = house.call(device, house.token(device, Purpose.READ), Purpose.READ)
    consume = house.store.open

    def slowly(*arguments):
        house.clock.offset = 60
        return consume(*arguments)

    monkeypatch.setattr(house.store, "open", slowly)
    with pytest.raises(errors.TokenExpired):
        house.gate.admit(call)
    assert house.count("used_token") == 0
