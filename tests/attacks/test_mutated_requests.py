"""Of each kind of token: no request that differs from a good one in anything that counts is accepted, and none spoils the good one.

A browser's token names its key alone, a bearer token the certificate alone, and comes in `Authorization` or in `xi-api-key`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from house import BASE, PATHS, TEXT, Device, House, new_device, sha256_hex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from test_token_attacks import JSON, parts, sealed

from policies.authority import Client, ClientState, Role, VoiceTerm, key_alone
from policies.errors import PolicyError
from policies.gate import Call
from policies.grants import Binding, Purpose
from policies.proofs import make_proof
from service.refusals import Refusal
from service.vault.http import _credentials

SPEECH = PATHS[Purpose.SPEAK]
PROPERTY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None, derandomize=True, database=None
)


@dataclass
class Good:
    """A good request of one kind; each `again` is the same with a fresh proof where it has one."""

    house: House
    device: Device
    other: Device
    call: Call

    def again(self) -> Call:
        proof = None if self.call.proof is None else make_proof(self.device.key, "POST", BASE + SPEECH, self.call.token)
        return replace(self.call, proof=proof)


def _browser(house: House) -> Good:
    voice, device = house.voice(), Device("page", None, ec.generate_private_key(ec.SECP256R1()))  # type: ignore[arg-type]
    row = Client("page", "acme", key_alone(device.jkt), device.jkt, (Role.SPEAKER,), ClientState.ACTIVE, 1, voice)
    with house.database.begin() as transaction:
        house.store.insert(transaction, row)
    return Good(house, device, house.client("other"), house.speech(device, voice))


def _bearer(house: House) -> Good:
    device, voice = house.client(), house.voice()
    with house.database.begin() as transaction:
        house.registry.set_voice_terms(transaction, voice, [VoiceTerm.BEARER])
    asked = replace(house.request(device, "speak", voice=voice, text_sha256=sha256_hex(TEXT)), proof=None)
    token = house.minting.issue(asked).access_token
    return Good(house, device, house.client("other"), house.call(device, token, Purpose.SPEAK, voice, scheme="Bearer", proof=None))


@pytest.fixture(params=[_browser, _bearer], ids=["browser", "bearer"])
def good(request: pytest.FixtureRequest, house: House) -> Good:
    house.clock.stop()
    return request.param(house)


@pytest.fixture
def bearer(house: House) -> Good:
    house.clock.stop()
    return _bearer(house)


def refused(good: Good, call: Call) -> None:
    with pytest.raises(PolicyError):
        good.house.gate.admit(call)


def spliced(text: str, data: st.DataObject) -> str:
    """The text with a few characters more, fewer or others in one place."""
    place = data.draw(st.integers(0, len(text)))
    return text[:place] + data.draw(st.text(max_size=3)) + text[place + data.draw(st.integers(0, 3)) :]


def changed(good: Good, call: Call, data: st.DataObject) -> Call | None:
    """The call, different in one thing that counts for it; None where nothing came out different."""
    kinds = ["token", "scheme", "text", "voice", "purpose", *(["proof", "method", "path"] if call.proof else ["certificate"])]
    match data.draw(st.sampled_from(kinds)):
        case "token":
            return replace(call, token=spliced(call.token, data))
        case "scheme":
            scheme = data.draw(st.sampled_from(["DPoP", "Bearer", "Basic", "Ticket", ""]) | st.text(max_size=8))
            return None if scheme.lower() == call.scheme.lower() else replace(call, scheme=scheme)
        case "text":
            return replace(call, text=spliced(call.text or "", data))
        case "voice":
            return replace(call, voice=data.draw(st.none() | st.just(uuid4())))
        case "purpose":
            return replace(call, purpose=data.draw(st.sampled_from([one for one in Purpose if one is not Purpose.SPEAK])))
        case "proof":
            of_another = make_proof(good.other.key, "POST", BASE + SPEECH, call.token)
            return replace(
                call, proof=data.draw(st.sampled_from([None, "", of_another, call.token]) | st.just(spliced(call.proof, data)))
            )
        case "method":
            return replace(call, method=data.draw(st.sampled_from(["GET", "PUT", "post", ""])))
        case "path":
            return replace(call, path=data.draw(st.sampled_from(["/", SPEECH + "/", "/oauth/token", SPEECH.upper()])))
        case _:
            unknown = [None, b"", good.other.certificate, new_device("stranger").certificate, (call.certificate_der or b"")[:-1]]
            return replace(call, certificate_der=data.draw(st.sampled_from(unknown)))


@PROPERTY
@given(data=st.data())
def test_no_mutation_of_a_good_request_is_accepted(good: Good, data: st.DataObject) -> None:
    call = good.again()
    other = changed(good, call, data)
    if other is not None and other != call:
        refused(good, other)


@PROPERTY
@given(value=JSON, data=st.data())
def test_no_other_binding_of_a_token_is_accepted(good: Good, value: object, data: st.DataObject) -> None:
    """The signer is honest about nothing here: a token that says anything else in `cnf` is another kind, or none."""
    header, claims = parts(good.call.token)
    [own] = claims["cnf"]
    members = st.sampled_from([own, "jkt", "x5t#S256", "kid", "jwk", "x5t"])
    cnf = data.draw(st.dictionaries(members, st.just(value) | st.sampled_from([good.other.jkt, good.other.x5t]), max_size=3))
    if cnf != claims["cnf"]:
        other = replace(good.again(), token=sealed(good.house, header, claims | {"cnf": cnf}))
        proof = None if other.proof is None else make_proof(good.device.key, "POST", BASE + SPEECH, other.token)
        refused(good, replace(other, proof=proof))


def test_the_good_request_is_good_after_all_that(good: Good) -> None:
    for other in (replace(good.call, text="Another."), replace(good.call, token=good.call.token[:-1])):
        refused(good, other)
    grant = good.house.gate.admit(good.again())
    assert grant.token.bound is (Binding.CERTIFICATE if good.call.proof is None else Binding.KEY)
    assert json.dumps(parts(good.call.token)[1]["cnf"]).count(":") == 1


def headers(*pairs: tuple[bytes, bytes]) -> Request:
    return Request(
        {"type": "http", "method": "POST", "path": SPEECH, "headers": list(pairs), "query_string": b"", "scheme": "https"}
    )


@PROPERTY
@given(data=st.data())
def test_no_mutation_of_a_good_api_key_is_accepted(bearer: Good, data: st.DataObject) -> None:
    token = bearer.call.token
    sent = spliced(token, data).encode("latin-1", "replace")
    name = data.draw(st.sampled_from([b"xi-api-key", b"xi_api_key", b"authorization", b"x-api-key"]))
    twice = data.draw(st.sampled_from([(), ((b"xi-api-key", token.encode()),), ((b"authorization", b"Bearer " + token.encode()),)]))
    if (name, sent, twice) == (b"xi-api-key", token.encode(), ()) or (name, len(twice)) in ((b"xi_api_key", 1), (b"x-api-key", 1)):
        return  # the good one, perhaps beside a header that nobody reads
    try:
        found = _credentials(headers((name, sent), *twice))
    except Refusal:
        return  # several, or both
    refused(bearer, replace(bearer.call, scheme=found.scheme, token=found.token, proof=found.proof))


def test_an_api_key_is_a_bearer_token_and_nothing_else(bearer: Good) -> None:
    found = _credentials(headers((b"xi-api-key", bearer.call.token.encode())))
    assert (found.scheme, found.token, found.proof) == ("bearer", bearer.call.token, None)
    bearer.house.gate.admit(replace(bearer.call, scheme=found.scheme, token=found.token, proof=found.proof))
