"""Challenges and passes: whose they are, how long they last, and that each works once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from fakes import FakeHsm
from house import Device, House
from hsm_fixtures import ServingToken
from sqlalchemy import Engine

from keyvault.records import RecordMac
from policies import jws
from policies.authority import Role, VoiceTerm
from policies.errors import (
    ConsentPurpose,
    Denied,
    GrantMismatch,
    LivenessExpired,
    LivenessInvalid,
    LivenessRequired,
    LivenessUsed,
    PolicyError,
    PurposeMismatch,
    TokenExpired,
    TokenInvalid,
    VoiceMismatch,
)
from policies.grants import Purpose
from policies.liveness import DIGITS, WINDOW_S, Challenge, Liveness, Owner, Pass
from policies.store import RETENTION_S
from policies.tokens import TOKEN_LIFETIME_S
from policies.wishes import Wish


class Booth:
    """A house with a client and a voice that demands liveness."""

    def __init__(self, house: House, *terms: VoiceTerm, **consent: object) -> None:
        self.house, self.device = house, house.client(f"app-{uuid4()}")
        self.voice = house.voice(**consent)
        self.demand(self.voice, *terms)

    def demand(self, voice: UUID, *terms: VoiceTerm) -> None:
        with self.house.database.begin() as transaction:
            self.house.registry.set_voice_terms(transaction, voice, terms or (VoiceTerm.LIVENESS,))

    def owner(self, **other: object) -> Owner:
        return replace(Owner("acme", self.device.client_id, self.voice), **other)

    def challenge(self) -> Challenge:
        return self.house.liveness.ask(self.owner())

    def answered(self) -> Pass:
        return self.house.liveness.passed(self.challenge(), self.owner())

    def given(self, ago: float) -> Pass:
        """A pass given out so many seconds ago."""
        self.house.clock.offset = -ago
        passed = self.answered()
        self.house.clock.offset = 0
        return passed

    def remembered(self, passed: Pass) -> int:
        with self.house.database.begin() as transaction:
            found = transaction.exec_driver_sql("SELECT count(*) FROM used_token WHERE jti = %s", (str(passed.id),)).scalar()
        return int(found or 0)

    def call(self, challenge: str, device: Device | None = None, voice: UUID | None = None, **changes: object):
        device = device or self.device
        token = self.house.token(device, Purpose.LIVENESS, voice or self.voice)
        return self.house.call(device, token, Purpose.LIVENESS, challenge=challenge, **changes)

    def token(self, passed: str | None, device: Device | None = None, purpose: str = "compare", voice: UUID | None = None) -> str:
        members = {"voice": voice or self.voice} | ({} if passed is None else {"liveness": passed})
        return self.house.minting.issue(self.house.request(device or self.device, purpose, **members)).access_token

    def compare(self, token: str):
        return self.house.gate.admit(self.house.call(self.device, token, Purpose.COMPARE, self.voice))


@pytest.fixture(scope="module")
def everyones(module_database: Engine, serving_token: ServingToken) -> House:
    return House(module_database, serving_token.hsm)


@pytest.fixture
def house(everyones: House) -> House:
    """One house for all tests: each has a client and a voice of its own."""
    everyones.clock.offset, everyones.clock.stopped = 0.0, None
    return everyones


@pytest.fixture
def booth(house: House) -> Booth:
    return Booth(house)


def claims_of(token: str) -> dict:
    return json.loads(jws.decode(token.split(".")[1]))


# --- digits


def test_digits_are_six_and_differ(booth):
    asked = [booth.challenge() for _ in range(50)]
    assert all(len(one.digits) == DIGITS and one.digits.isascii() and one.digits.isdigit() for one in asked)
    assert len({one.digits for one in asked}) > 45
    assert len({one.id for one in asked}) == 50
    assert {one.expires_at - one.asked_at for one in asked} == {WINDOW_S}


@pytest.mark.parametrize(("drawn", "digits"), [(7, "000007"), (999_999, "999999"), (1_000_000, "000000"), (2**128 - 1, "211455")])
def test_digits_are_what_the_hsm_drew(house, drawn, digits):
    liveness = Liveness(RecordMac(house.hsm), lambda length: drawn.to_bytes(length), house.clock)
    assert liveness.ask(Owner("acme", "app", uuid4())).digits == digits


def test_a_challenge_reads_back_as_it_was_given(booth):
    given = booth.challenge()
    assert booth.house.liveness.asked(given.text, booth.owner()) == given


# --- whose they are


@pytest.mark.parametrize(
    "other", [{"tenant": "other"}, {"client_id": "app2"}, {"voice": uuid4()}], ids=["tenant", "client", "voice"]
)
def test_a_challenge_and_a_pass_are_nobody_elses(booth, other):
    liveness, challenge, passed = booth.house.liveness, booth.challenge(), booth.answered()
    assert liveness.asked(challenge.text, booth.owner()) == challenge
    assert liveness.presented(passed.text, booth.owner()) == passed.id
    with pytest.raises(LivenessInvalid):
        liveness.asked(challenge.text, booth.owner(**other))
    with pytest.raises(LivenessInvalid):
        liveness.presented(passed.text, booth.owner(**other))


def test_another_sites_challenge_and_pass_are_none_of_ours(booth):
    other = Liveness(RecordMac(FakeHsm()), booth.house.hsm.random, booth.house.clock)
    challenge = other.ask(booth.owner())
    assert other.asked(challenge.text, booth.owner()) == challenge
    with pytest.raises(LivenessInvalid):
        booth.house.liveness.asked(challenge.text, booth.owner())
    with pytest.raises(LivenessInvalid):
        booth.house.liveness.presented(other.passed(challenge, booth.owner()).text, booth.owner())


def test_no_bit_of_a_challenge_or_a_pass_may_change(booth):
    liveness = booth.house.liveness
    for text, read in ((booth.challenge().text, liveness.asked), (booth.answered().text, liveness.presented)):
        data = bytearray(jws.decode(text))
        for position in range(len(data)):
            data[position] ^= 1
            with pytest.raises(LivenessInvalid):
                read(jws.encode(bytes(data)), booth.owner())
            data[position] ^= 1
        read(jws.encode(bytes(data)), booth.owner())


@pytest.mark.parametrize("text", ["", "x", "ä", "A" * 53, "A" * 54, "A" * 62, "A" * 63, "=" * 54, "A" * 255])
def test_what_is_no_pass_is_refused(booth, text):
    with pytest.raises(LivenessInvalid):
        booth.house.liveness.presented(text, booth.owner())
    with pytest.raises(LivenessInvalid):
        booth.house.liveness.asked(text, booth.owner())


def test_a_challenge_is_no_pass_and_a_pass_no_challenge(booth):
    """Nobody passes by sending the challenge back, cut to a pass's length or not."""
    challenge, passed = booth.challenge(), booth.answered()
    data = jws.decode(challenge.text)
    for text in (challenge.text, jws.encode(data[:24] + data[-16:])):
        with pytest.raises(LivenessInvalid):
            booth.house.liveness.presented(text, booth.owner())
    data = jws.decode(passed.text)
    for text in (passed.text, jws.encode(data[:24] + b"000000" + data[-16:])):
        with pytest.raises(LivenessInvalid):
            booth.house.liveness.asked(text, booth.owner())


# --- the window


def test_a_challenge_lasts_a_minute(booth):
    booth.house.clock.stop()
    challenge = booth.challenge()
    booth.house.clock.offset = WINDOW_S - 1
    booth.house.liveness.asked(challenge.text, booth.owner())
    booth.house.clock.offset = WINDOW_S
    with pytest.raises(LivenessExpired):
        booth.house.liveness.asked(challenge.text, booth.owner())
    booth.house.clock.offset = -2.0  # given out by a clock that is not ours
    with pytest.raises(LivenessExpired):
        booth.house.liveness.asked(challenge.text, booth.owner())


def test_a_pass_lasts_another_and_the_token_no_longer_than_any(booth):
    booth.house.clock.stop()
    passed = booth.given(WINDOW_S)
    with pytest.raises(LivenessExpired):
        booth.token(passed.text)
    passed = booth.given(WINDOW_S - 1)
    token = booth.token(passed.text)
    booth.house.clock.offset = 5
    with pytest.raises(TokenExpired):
        booth.compare(token)


# --- the token


def test_a_voice_that_demands_liveness_gives_no_token_without(booth):
    with pytest.raises(LivenessRequired):
        booth.token(None)
    passed = booth.answered()
    assert claims_of(booth.token(passed.text))["liveness"] == str(passed.id)


def test_any_other_voice_needs_no_pass(house):
    device, voice = house.client(f"app-{uuid4()}"), house.voice()
    assert "liveness" not in claims_of(house.token(device, Purpose.COMPARE, voice))


def test_another_clients_pass_is_worth_nothing(booth):
    other = booth.house.client(f"other-{uuid4()}")
    with pytest.raises(LivenessInvalid):
        booth.token(booth.answered().text, device=other)


def test_another_voices_pass_is_worth_nothing(booth):
    second = booth.house.voice()
    booth.demand(second)
    with pytest.raises(LivenessInvalid):
        booth.token(booth.answered().text, voice=second)


def test_a_pass_belongs_only_beside_what_opens_a_voice():
    for action, needed in (("read", {}), ("erase", {"voice": str(uuid4())}), ("liveness", {"voice": str(uuid4())})):
        details = [{"type": "glottis_voice", "actions": [action], "liveness": "A", **needed}]
        with pytest.raises(PolicyError):
            Wish.parse(json.dumps(details))


def test_a_token_that_names_a_nonce_for_another_purpose_is_no_token_of_ours(booth):
    house, now = booth.house, int(booth.house.clock())
    token = booth.token(booth.answered().text)
    assert booth.house.verifier.verify(token).liveness is not None
    claims = claims_of(token)
    forged = {"iat": now, "nbf": now, "exp": now + 5}
    for change in ({"liveness": "x"}, {"liveness": None}, {"liveness": [str(uuid4())]}, {"purpose": "liveness"}):
        bad = _signed(house, claims | forged | change)
        with pytest.raises(TokenInvalid):
            house.verifier.verify(bad)
    house.verifier.verify(_signed(house, claims | forged))


def _signed(house: House, claims: dict) -> str:
    """Honest in all but the claims: signed by the token's own key."""
    signer = house.mint._keys.signer()
    from policies.tokens import TOKEN_TYPE, key_id

    header = {"alg": "ES256", "typ": TOKEN_TYPE, "kid": key_id(signer.public_key)}
    signed = f"{jws.encode(json.dumps(header).encode())}.{jws.encode(json.dumps(claims).encode())}"
    return f"{signed}.{jws.encode(house.mint._keys.sign(signer, signed.encode()))}"


# --- once


def test_a_pass_opens_once(booth):
    passed = booth.answered()
    first, second = booth.token(passed.text), booth.token(passed.text)
    grant = booth.compare(first)
    assert grant.liveness == grant.token.liveness == passed.id
    with pytest.raises(LivenessUsed):
        booth.compare(second)


def test_a_pass_opens_once_of_many_at_once(booth):
    passed = booth.answered()
    tokens = [booth.token(passed.text) for _ in range(8)]

    def admitted(token: str) -> bool:
        try:
            booth.compare(token)
        except LivenessUsed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(admitted, tokens)) == 1


def test_a_refused_use_leaves_the_pass_good(booth):
    passed = booth.answered()
    token = booth.token(passed.text)
    with pytest.raises(VoiceMismatch):
        booth.house.gate.admit(booth.house.call(booth.device, token, Purpose.COMPARE, uuid4()))
    assert booth.compare(token).liveness == passed.id


def test_a_challenge_is_answered_once_and_a_refused_answer_uses_nothing_up(booth):
    challenge = booth.challenge()
    stranger = booth.house.client(f"other-{uuid4()}")
    with pytest.raises(LivenessInvalid):
        booth.house.gate.admit(booth.call(challenge.text, device=stranger))
    grant = booth.house.gate.admit(booth.call(challenge.text))
    assert (grant.token.purpose, grant.liveness) == (Purpose.LIVENESS, None)
    with pytest.raises(LivenessUsed):
        booth.house.gate.admit(booth.call(challenge.text))


def test_a_used_nonce_is_remembered_as_long_as_anything_names_it(booth):
    """The purge forgets it only once its last token is over."""
    booth.house.clock.stop()
    passed = booth.given(0)
    booth.compare(booth.token(passed.text))
    last = booth.house.clock() + WINDOW_S + TOKEN_LIFETIME_S  # of a token asked for as the pass ends
    for now, left in ((last, 1), (last + RETENTION_S + TOKEN_LIFETIME_S + 1, 0)):
        with booth.house.database.begin() as transaction:
            booth.house.store.purge(transaction, now)
        assert booth.remembered(passed) == left


def test_a_token_to_answer_opens_nothing_else(booth):
    token = booth.house.token(booth.device, Purpose.LIVENESS, booth.voice)
    with pytest.raises(PurposeMismatch):
        booth.house.gate.admit(booth.house.call(booth.device, token, Purpose.COMPARE, booth.voice))


# --- at the unwrap


def test_the_nonce_is_compared_again_at_the_moment_of_unwrapping(booth):
    grant = booth.compare(booth.token(booth.answered().text))
    assert grant.token.key is not None
    grant.recheck(booth.house.clock(), key=grant.token.key)
    for changed in (
        replace(grant, liveness=None),
        replace(grant, liveness=uuid4()),
        replace(grant, token=replace(grant.token, liveness=uuid4())),
        replace(grant, token=replace(grant.token, liveness=None)),
    ):
        with pytest.raises(GrantMismatch):
            changed.recheck(booth.house.clock(), key=grant.token.key)


# --- what the database can do


def test_the_demand_cannot_be_written_away(booth):
    booth.house.edit("UPDATE voice SET terms = '{}' WHERE voice_id = :voice", voice=booth.voice)
    with pytest.raises(PolicyError) as refused:
        booth.token(None)
    assert refused.value.code == "authority_row_tampered"


def test_the_demand_ends_when_the_operator_ends_it(booth):
    with booth.house.database.begin() as transaction:
        booth.house.registry.set_voice_terms(transaction, booth.voice, ())
    assert booth.compare(booth.token(None)).liveness is None


def test_a_demand_that_comes_after_the_token_holds_at_the_gate(house):
    device, voice = house.client(f"app-{uuid4()}"), house.voice()
    token = house.token(device, Purpose.COMPARE, voice)
    with house.database.begin() as transaction:
        house.registry.set_voice_terms(transaction, voice, (VoiceTerm.LIVENESS,))
    with pytest.raises(LivenessRequired):
        house.gate.admit(house.call(device, token, Purpose.COMPARE, voice))


def test_a_recording_counts_once_for_its_voice_and_is_forgotten_with_it(booth):
    store, digest, second = booth.house.store, b"d" * 32, booth.house.voice()
    with booth.house.database.begin() as transaction:
        assert store.use_recording(transaction, booth.voice, digest)
        assert not store.use_recording(transaction, booth.voice, digest)
        assert store.use_recording(transaction, second, digest)
        kept = {(row[0], bytes(row[1])) for row in transaction.exec_driver_sql("SELECT voice_id, fingerprint FROM used_recording")}
        assert {voice for voice, _ in kept} == {booth.voice, second}
        assert digest not in {fingerprint for _, fingerprint in kept}
        store.forget_voice(transaction, booth.voice)
        left = {row[0] for row in transaction.exec_driver_sql("SELECT voice_id FROM used_recording")}
        assert left == {second}


# --- who may ask


def test_who_may_not_open_the_voice_is_not_heard(house):
    voice = house.voice(purposes=["identify"])
    with pytest.raises(ConsentPurpose):
        house.token(house.client(f"app-{uuid4()}"), Purpose.LIVENESS, voice)
    reader = house.client(f"reader-{uuid4()}", roles=(Role.READER, Role.ENROLLER))
    with pytest.raises(Denied):
        house.token(reader, Purpose.LIVENESS, house.voice())


def test_the_log_names_the_nonce_and_not_the_pass(booth, monkeypatch):
    written, append = [], booth.house.audit.append

    def watched(transaction, intent, *more, **named):
        written.append(intent)
        return append(transaction, intent, *more, **named)

    monkeypatch.setattr(booth.house.audit, "append", watched)
    passed = booth.answered()
    booth.compare(booth.token(passed.text))
    assert [intent.details["liveness"] for intent in written] == [str(passed.id)] * 2
    assert passed.text not in str(written)
