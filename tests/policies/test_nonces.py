"""D5: a client whose clock is minutes off gets a nonce, and succeeds with it (RFC 9449 §8, §9)."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from house import BASE, PATHS, House
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.records import RecordMac
from policies import errors, jws
from policies.grants import Purpose
from policies.nonces import SPAN_S, Nonces
from policies.proofs import PROOF_AGE_S, ProofVerifier, make_proof
from policies.store import RETENTION_S
from service.client import Refused, VoiceClient
from service.problems import problem

READ = BASE + PATHS[Purpose.READ]


@pytest.fixture(params=[-600, 600], ids=["ten minutes slow", "ten minutes fast"])
def skewed(house: House, monkeypatch, request):
    """A house, and a client whose clock is off."""
    device = house.client()
    house.clock.stop()
    monkeypatch.setattr("policies.proofs.time", SimpleNamespace(time=lambda: house.clock() + request.param))
    return house, device


def asked_for(call) -> str:
    with pytest.raises(errors.NonceRequired) as refused:
        call()
    assert refused.value.code == "use_dpop_nonce"
    return refused.value.nonce


def with_nonce(house, device, nonce):
    request = house.request(device, "read")
    return replace(request, proof=make_proof(device.key, "POST", f"{BASE}/oauth/token", nonce=nonce))


def test_a_skewed_client_succeeds_with_the_nonce_at_both_endpoints(skewed):
    house, device = skewed
    nonce = asked_for(lambda: house.token(device, Purpose.READ))
    token = house.minting.issue(with_nonce(house, device, nonce)).access_token
    call = house.call(device, token, Purpose.READ)
    assert asked_for(lambda: house.gate.admit(call)) == nonce
    proof = make_proof(device.key, "GET", READ, token, nonce=nonce)
    house.gate.admit(replace(call, proof=proof))
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(replace(call, proof=make_proof(device.key, "GET", READ, token, nonce=nonce)))
    assert house.count("used_token") == 1, "the refusal before it used nothing up"


def test_a_proof_with_a_nonce_works_once(skewed):
    house, device = skewed
    request = with_nonce(house, device, asked_for(lambda: house.token(device, Purpose.READ)))
    house.minting.issue(request)
    with pytest.raises(errors.ProofReplayed):
        house.minting.issue(request)
    with house.database.begin() as transaction:
        house.store.purge(transaction, house.clock() + RETENTION_S)
    with pytest.raises(errors.ProofReplayed):
        house.minting.issue(request)


def test_a_nonce_is_over_before_its_guard_is_forgotten(skewed):
    house, device = skewed
    request = with_nonce(house, device, asked_for(lambda: house.token(device, Purpose.READ)))
    house.minting.issue(request)
    house.clock.offset = PROOF_AGE_S + 1
    asked_for(lambda: house.minting.issue(request))


@pytest.mark.parametrize("nonce", ["", "x", "A" * 22, "é", "a" * 300, 7, None, ["x"]])
def test_a_made_up_nonce_is_refused(house: House, nonce):
    device = house.client()
    with pytest.raises(errors.ProofInvalid):
        house.minting.issue(with_nonce(house, device, nonce if nonce is not None else "null"))


def test_other_workers_and_later_starts_know_the_nonce(house: House):
    device = house.client()
    nonce = Nonces(RecordMac(house.hsm), house.clock).fresh()
    house.minting.issue(with_nonce(house, device, nonce))


def test_without_nonces_the_proof_is_refused_as_before(house: House):
    house.clock.stop()
    house.clock.offset = 600
    with pytest.raises(errors.ProofInvalid) as refused:
        ProofVerifier(BASE, house.clock).verify(make_proof(house.client().key, "GET", READ), "GET", PATHS[Purpose.READ], None)
    assert refused.value.code == "proof_invalid"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(10**9, 2 * 10**9), st.integers(0, 300))
def test_a_nonce_lives_as_long_as_a_proof_and_no_longer(house: House, given_at, later):
    now = [given_at]
    nonces = Nonces(RecordMac(house.hsm), lambda: now[0])
    nonce = nonces.fresh()
    now[0] += later
    found = nonces.issued_at(nonce, PROOF_AGE_S)
    if later <= PROOF_AGE_S - SPAN_S:
        assert found is not None
    if later > PROOF_AGE_S:
        assert found is None
    assert found is None or 0 <= given_at - found < SPAN_S


def answering(*answers):
    """A client whose server gives these answers, one after the other, and the requests that it sent."""
    sent, left = [], list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return left.pop(0)

    client = VoiceClient.__new__(VoiceClient)
    client.base_url, client.dpop_key, client._nonce = BASE, ec.generate_private_key(ec.SECP256R1()), None
    client._http = httpx.Client(base_url=BASE, transport=httpx.MockTransport(handle))
    return client, sent


def wants_nonce(nonce: str) -> httpx.Response:
    answer = problem("use_dpop_nonce", "message", "fix")
    answer.headers["DPoP-Nonce"] = nonce
    assert answer.headers["WWW-Authenticate"] == 'DPoP error="use_dpop_nonce", algs="ES256"'
    return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.body)


def nonce_in(request: httpx.Request) -> str | None:
    return json.loads(jws.decode(request.headers["DPoP"].split(".")[1])).get("nonce")


def test_the_client_tries_again_once_and_keeps_the_nonce():
    client, sent = answering(
        wants_nonce("first"), httpx.Response(200, json={"access_token": "t"}), httpx.Response(200, json={"voices": []})
    )
    assert client.voices() == []
    assert [nonce_in(request) for request in sent] == [None, "first", "first"]


def test_the_client_does_not_try_for_ever():
    client, sent = answering(wants_nonce("first"), wants_nonce("second"))
    with pytest.raises(Refused) as refused:
        client.token("read")
    assert refused.value.code == "use_dpop_nonce"
    assert len(sent) == 2
