"""A second client's word: for one text, in one voice, for one client, once; every attack beside the accepted twin."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from fakes import FakeHsm
from house import TEXT, Device, House, sha256_hex
from hsm_fixtures import ServingToken
from sqlalchemy import Engine

from keyvault.records import RecordMac
from policies import jws
from policies.approval_errors import ApprovalExpired, ApprovalInvalid, ApprovalOwn, ApprovalRequired, ApprovalUsed, ApproverRefused
from policies.authority import Role, VoiceTerm
from policies.dual_control import LIFETIME_S, DualControl, Utterance
from policies.errors import (
    AuthorityRowTampered,
    AuthorizationDetailsInvalid,
    ConsentPurpose,
    Denied,
    ForeignVoice,
    GrantMismatch,
    PurposeMismatch,
    TextMismatch,
    TokenInvalid,
    VoiceMismatch,
)
from policies.grants import Agreed, Purpose
from policies.wishes import Wish

OTHER = "Another text."


class Desk:
    """A house with a client that speaks, one that approves, and a voice that demands both."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.speaker = house.client(f"speaker-{uuid4()}", roles=(Role.SPEAKER, Role.VERIFIER))
        self.approver = house.client(f"approver-{uuid4()}", roles=(Role.APPROVER,))
        self.voice = self.demanding()

    def demanding(self, **consent: object) -> UUID:
        voice = self.house.voice(**consent)
        with self.house.database.begin() as transaction:
            self.house.registry.set_voice_terms(transaction, voice, (VoiceTerm.DUAL_CONTROL,))
        return voice

    def asked(self, *, by: Device | None = None, voice: UUID | None = None, text: str = TEXT, client: str | None = None) -> str:
        """A token to approve."""
        named = {"voice": voice or self.voice, "text_sha256": sha256_hex(text), "client": client or self.speaker.client_id}
        return self.house.minting.issue(self.house.request(by or self.approver, "approve", **named)).access_token

    def approved(self, *, by: Device | None = None, voice: UUID | None = None, text: str = TEXT, client: str | None = None) -> str:
        """An approval, as the vault gives one: under a grant to approve."""
        by, voice, client = by or self.approver, voice or self.voice, client or self.speaker.client_id
        token = self.asked(by=by, voice=voice, text=text, client=client)
        named = {"text_sha256": sha256_hex(text), "beneficiary": client}
        grant = self.house.gate.admit(self.house.call(by, token, Purpose.APPROVE, voice, **named))
        utterance = Utterance(grant.token.tenant, client, voice, sha256_hex(text))
        return self.house.dual_control.approve(utterance, grant.token.client_id).text

    def token(self, approval: str | None, *, by: Device | None = None, voice: UUID | None = None, text: str = TEXT) -> str:
        """A token to speak."""
        named = {"voice": voice or self.voice, "text_sha256": sha256_hex(text)}
        named |= {} if approval is None else {"approval": approval}
        return self.house.minting.issue(self.house.request(by or self.speaker, "speak", **named)).access_token

    def speak(self, token: str, voice: UUID | None = None):
        return self.house.gate.admit(self.house.call(self.speaker, token, Purpose.SPEAK, voice or self.voice))

    def change(self, method: str, *arguments: object, **named: object) -> None:
        with self.house.database.begin() as transaction:
            getattr(self.house.registry, method)(transaction, *arguments, **named)


@pytest.fixture(scope="module")
def everyones(module_database: Engine, serving_token: ServingToken) -> House:
    return House(module_database, serving_token.hsm)


@pytest.fixture
def desk(everyones: House) -> Desk:
    """One house for all tests: each has clients and a voice of its own."""
    everyones.clock.offset, everyones.clock.stopped, everyones.glass = 0.0, None, frozenset()
    return Desk(everyones)


def claims_of(token: str) -> dict:
    return json.loads(jws.decode(token.split(".")[1]))


def test_with_a_second_clients_word_the_voice_says_exactly_that(desk):
    with pytest.raises(ApprovalRequired):
        desk.token(None)
    token = desk.token(desk.approved())
    assert claims_of(token)["agreed"]["approver"] == desk.approver.client_id
    grant = desk.speak(token)
    assert grant.agreed == grant.token.agreed
    assert grant.decided_by == ("role.speaker",)


def test_the_voice_is_compared_without(desk):
    desk.house.gate.admit(
        desk.house.call(desk.speaker, desk.house.token(desk.speaker, Purpose.COMPARE, desk.voice), Purpose.COMPARE, desk.voice)
    )


# --- whose word, and about what


def test_an_approval_is_for_no_other_text_voice_or_client(desk):
    approval, second = desk.approved(), desk.demanding()
    stranger = desk.house.client(f"other-{uuid4()}", roles=(Role.SPEAKER,))
    for otherwise in ({"text": OTHER}, {"voice": second}, {"by": stranger}):
        with pytest.raises(ApprovalInvalid):
            desk.token(approval, **otherwise)
    desk.speak(desk.token(approval))


def test_another_tenants_word_is_worth_nothing(desk):
    rival = desk.house.client(f"rival-{uuid4()}", "rival", roles=(Role.APPROVER,))
    with pytest.raises(ForeignVoice):
        desk.asked(by=rival)
    # One made with the right MAC all the same, and that of a client that is not there:
    said = Utterance("acme", desk.speaker.client_id, desk.voice, sha256_hex(TEXT))
    with pytest.raises(ApproverRefused):
        desk.token(desk.house.dual_control.approve(said, rival.client_id).text)
    with pytest.raises(ApproverRefused):
        desk.token(desk.house.dual_control.approve(said, "nobody").text)
    other = replace(said, tenant="rival")
    with pytest.raises(ApprovalInvalid):
        desk.token(desk.house.dual_control.approve(other, desk.approver.client_id).text)
    desk.speak(desk.token(desk.house.dual_control.approve(said, desk.approver.client_id).text))


def test_nobody_approves_for_themselves(desk):
    both = desk.house.client(f"both-{uuid4()}", roles=(Role.SPEAKER, Role.APPROVER))
    with pytest.raises(ApprovalOwn):
        desk.asked(by=both, client=both.client_id)
    said = Utterance("acme", both.client_id, desk.voice, sha256_hex(TEXT))
    with pytest.raises(ApprovalOwn) as refused:
        desk.token(desk.house.dual_control.approve(said, both.client_id).text, by=both)
    assert refused.value.decided_by == ("dual-control.another",)
    desk.token(desk.approved(client=both.client_id), by=both)


def test_a_second_name_with_the_same_dpop_key_is_no_second_client(desk):
    row = desk.house.of_client(desk.speaker.client_id)
    desk.change("rotate_client", desk.approver.client_id, cert_sha256=desk.approver.x5t, jkt=row.jkt)
    twin = replace(desk.approver, key=desk.speaker.key)
    with pytest.raises(ApprovalOwn):
        desk.token(desk.approved(by=twin))


def test_only_an_approver_approves_and_only_speech_that_the_consent_names(desk):
    with pytest.raises(Denied):
        desk.asked(by=desk.speaker, client=desk.approver.client_id)
    with pytest.raises(ConsentPurpose):
        desk.asked(voice=desk.demanding(purposes=["compare"]))
    desk.asked()


def test_a_token_to_approve_approves_what_it_names_and_nothing_else(desk):
    named = {"text_sha256": sha256_hex(TEXT), "beneficiary": desk.speaker.client_id}
    token = desk.asked()
    admit, call = desk.house.gate.admit, desk.house.call
    for otherwise, refusal in (
        ({"text_sha256": sha256_hex(OTHER)}, TextMismatch),
        ({"text_sha256": None}, TextMismatch),
        ({"beneficiary": "another"}, VoiceMismatch),
        ({"beneficiary": None}, VoiceMismatch),
    ):
        with pytest.raises(refusal):
            admit(call(desk.approver, token, Purpose.APPROVE, desk.voice, **named | otherwise))
    with pytest.raises(VoiceMismatch):
        admit(call(desk.approver, token, Purpose.APPROVE, uuid4(), **named))
    with pytest.raises(PurposeMismatch):
        admit(call(desk.approver, token, Purpose.SPEAK, desk.voice))
    admit(call(desk.approver, token, Purpose.APPROVE, desk.voice, **named))


# --- how long, and once


def test_an_approval_lasts_ten_minutes(desk):
    desk.house.clock.stop()
    said = Utterance("acme", desk.speaker.client_id, desk.voice, sha256_hex(TEXT))

    def given(ago: float) -> str:
        desk.house.clock.offset = -ago
        text = desk.house.dual_control.approve(said, desk.approver.client_id).text
        desk.house.clock.offset = 0.0
        return text

    desk.speak(desk.token(given(LIFETIME_S - 1)))
    for late in (given(LIFETIME_S), given(-2.0)):  # the second by a clock that is not ours
        with pytest.raises(ApprovalExpired):
            desk.token(late)


def test_an_approval_is_used_once_and_by_success_alone(desk):
    approval = desk.approved()
    first, second, third = (desk.token(approval) for _ in range(3))
    with pytest.raises(TextMismatch):
        desk.house.gate.admit(desk.house.call(desk.speaker, first, Purpose.SPEAK, desk.voice, text=OTHER))
    desk.speak(second)
    for late in (first, third):
        with pytest.raises(ApprovalUsed):
            desk.speak(late)


def test_an_approval_is_used_once_of_many_at_once(desk):
    approval = desk.approved()
    tokens = [desk.token(approval) for _ in range(8)]

    def admitted(token: str) -> bool:
        try:
            desk.speak(token)
        except ApprovalUsed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(admitted, tokens)) == 1


def test_who_may_delete_guards_makes_no_approval_fresh(desk):
    approval = desk.approved()
    desk.speak(desk.token(approval))
    desk.house.edit("DELETE FROM used_token; DELETE FROM used_proof")
    with pytest.raises(ApprovalUsed):
        desk.speak(desk.token(approval))


# --- what the approver is at the moment of use


@pytest.mark.parametrize("change", [("revoke_client",), ("change_roles", [Role.SPEAKER])], ids=["revoked", "without the role"])
def test_an_approver_that_may_not_any_more(desk, change):
    method, *arguments = change
    approval = desk.approved()
    token = desk.token(approval)
    desk.change(method, desk.approver.client_id, *arguments)
    for use in (lambda: desk.token(approval), lambda: desk.speak(token)):
        with pytest.raises(ApproverRefused) as refused:
            use()
        assert refused.value.decided_by == ("dual-control.approver",)


def test_an_approver_whose_old_row_is_put_back(desk):
    """Before it was revoked, MAC and all: the list that only grows knows better."""
    approval = desk.approved()
    name = desk.approver.client_id
    desk.house.edit("CREATE TABLE kept AS SELECT * FROM client WHERE client_id = :name", name=name)
    desk.change("revoke_client", name)
    desk.house.edit("DELETE FROM client WHERE client_id = :name", name=name)
    desk.house.edit("INSERT INTO client SELECT * FROM kept; DROP TABLE kept")
    with pytest.raises(AuthorityRowTampered):
        desk.token(approval)


def test_an_approver_with_new_keys_is_the_same_approver(desk):
    approval = desk.approved()
    desk.change("rotate_client", desk.approver.client_id, cert_sha256="N" * 43, jkt="M" * 43)
    desk.speak(desk.token(approval))


# --- texts that lie


def test_no_bit_of_an_approval_may_change(desk):
    said = Utterance("acme", desk.speaker.client_id, desk.voice, sha256_hex(TEXT))
    approval = desk.approved()
    data = bytearray(jws.decode(approval))
    for position in range(len(data)):
        data[position] ^= 1
        with pytest.raises(ApprovalInvalid):
            desk.house.dual_control.presented(jws.encode(bytes(data)), said)
        data[position] ^= 1
    assert desk.house.dual_control.presented(approval, said).approver == desk.approver.client_id


@pytest.mark.parametrize("text", ["", "x", "ä", "A" * 53, "A" * 54, "=" * 54, "_" * 80, "A" * 1023, "A" * 5000])
def test_what_is_no_approval_is_refused(desk, text):
    said = Utterance("acme", desk.speaker.client_id, desk.voice, sha256_hex(TEXT))
    with pytest.raises(ApprovalInvalid):
        desk.house.dual_control.presented(text, said)


def test_another_sites_approval_is_none_of_ours(desk):
    said = Utterance("acme", desk.speaker.client_id, desk.voice, sha256_hex(TEXT))
    other = DualControl(RecordMac(FakeHsm()), desk.house.hsm.random, desk.house.clock)
    text = other.approve(said, desk.approver.client_id).text
    assert other.presented(text, said).approver == desk.approver.client_id
    with pytest.raises(ApprovalInvalid):
        desk.token(text)


@pytest.mark.parametrize(
    "members",
    [
        {"actions": ["compare"], "voice": str(UUID(int=1)), "approval": "A"},
        {"actions": ["approve"], "voice": str(UUID(int=1)), "text_sha256": "0" * 64},
        {"actions": ["approve"], "voice": str(UUID(int=1)), "client": "app"},
        {"actions": ["approve"], "voice": str(UUID(int=1)), "text_sha256": "0" * 64, "client": ""},
        {"actions": ["speak"], "voice": str(UUID(int=1)), "text_sha256": "0" * 64, "client": "app"},
    ],
)
def test_details_name_exactly_what_an_action_has(members):
    with pytest.raises(AuthorizationDetailsInvalid):
        Wish.parse(json.dumps([{"type": "glottis_voice", **members}]))


def test_a_token_whose_word_is_spelt_otherwise_is_no_token_of_ours(desk):
    token = desk.token(desk.approved())
    agreed = claims_of(token)["agreed"]
    assert desk.house.verifier.verify(token).agreed == Agreed(UUID(agreed["id"]), agreed["approver"])
    for change in ({"agreed": "x"}, {"agreed": None}, {"agreed": agreed | {"more": 1}}, {"agreed": {"id": agreed["id"]}}):
        with pytest.raises(TokenInvalid):
            desk.house.verifier.verify(_signed(desk.house, claims_of(token) | change))
    desk.house.verifier.verify(_signed(desk.house, claims_of(token)))


def _signed(house: House, claims: dict) -> str:
    """Honest in all but the claims: signed by the token's own key."""
    from policies.tokens import TOKEN_TYPE, key_id

    signer = house.mint._keys.signer()
    header = {"alg": "ES256", "typ": TOKEN_TYPE, "kid": key_id(signer.public_key)}
    signed = f"{jws.encode(json.dumps(header).encode())}.{jws.encode(json.dumps(claims).encode())}"
    return f"{signed}.{jws.encode(house.mint._keys.sign(signer, signed.encode()))}"


# --- the unwrap, the demand, the log


def test_the_word_is_compared_again_at_the_moment_of_unwrapping(desk):
    grant = desk.speak(desk.token(desk.approved()))
    assert grant.token.key is not None
    grant.recheck(desk.house.clock(), key=grant.token.key)
    for changed in (replace(grant, agreed=None), replace(grant, token=replace(grant.token, agreed=None))):
        with pytest.raises(GrantMismatch):
            changed.recheck(desk.house.clock(), key=grant.token.key)


def test_a_demand_that_comes_after_the_token_holds_at_the_gate(desk):
    voice = desk.house.voice()
    token = desk.token(None, voice=voice)
    desk.change("set_voice_terms", voice, (VoiceTerm.DUAL_CONTROL,))
    with pytest.raises(ApprovalRequired):
        desk.speak(token, voice)


def test_the_demand_cannot_be_written_away(desk):
    desk.house.edit("UPDATE voice SET terms = '{}' WHERE voice_id = :voice", voice=desk.voice)
    with pytest.raises(AuthorityRowTampered):
        desk.token(None)


def test_broken_glass_replaces_nobodys_word_and_no_proof(desk):
    desk.house.glass = frozenset({"stale-peer", "compromised-key"})
    with pytest.raises(ApprovalRequired):
        desk.token(None)
    desk.speak(desk.token(desk.approved()))
    bearing = desk.house.voice()
    desk.change("set_voice_terms", bearing, (VoiceTerm.BEARER,))
    asked = desk.house.request(desk.speaker, "speak", voice=bearing, text_sha256=sha256_hex(TEXT))
    with pytest.raises(Denied) as refused:
        desk.house.minting.issue(replace(asked, proof=None))
    assert refused.value.decided_by == ("break-glass.proof",)
    desk.house.glass = frozenset()
    desk.house.minting.issue(replace(asked, proof=None))


def test_the_log_names_approval_approver_and_who_is_to_speak(desk, monkeypatch):
    written, append = [], desk.house.audit.append

    def watched(transaction, intent, *more, **named):
        written.append(intent)
        return append(transaction, intent, *more, **named)

    monkeypatch.setattr(desk.house.audit, "append", watched)
    approval = desk.approved()
    grant = desk.speak(desk.token(approval))
    assert [intent.details.get("beneficiary") for intent in written] == [desk.speaker.client_id] * 2 + [None] * 2
    assert [intent.details.get("approval") for intent in written] == [None] * 2 + [str(grant.agreed.id)] * 2
    assert [intent.details.get("approver") for intent in written] == [None] * 2 + [desk.approver.client_id] * 2
    assert approval not in str(written)
