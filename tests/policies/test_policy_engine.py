"""The policies: tables of cases, errors that deny, and what holds whatever the data."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import errors
from policies.authority import Client, ClientState, Role, Voice, VoiceState, VoiceTerm, key_alone
from policies.cases import APPROVER, HONEST, NOW, tables, uncovered
from policies.consent import Consent, ConsentState
from policies.engine import SHIPPED, Decision, PolicyEngine, Question
from policies.errors import Denied, PolicySetInvalid
from policies.grants import ON_A_VOICE, UNDER_CONSENT, Binding, Purpose
from policies.quotas import Left

ENGINE = PolicyEngine.shipped()
CASES = tables()
CLIENT, VOICE, CONSENT = HONEST.client, HONEST.voice, HONEST.consent


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_of_cases(case):
    assert ENGINE.decide(case.question) == case.expected


def test_every_policy_has_a_case_that_it_decides():
    assert not uncovered(ENGINE, CASES)


def test_every_policy_is_introduced_by_a_sentence():
    for policy in ENGINE.policies:
        assert policy.sentence.endswith("."), policy
        assert policy.effect in ("permit", "forbid")


SCHEMA = (SHIPPED / "schema.cedarschema").read_text()
PERMIT = '@id("all") permit (principal, action, resource);'


@pytest.mark.parametrize(
    "policies",
    [
        "permit (",
        "permit (principal, action, resource);",  # without a name
        PERMIT + PERMIT,
        '@id("typo") permit (principal, action, resource) when { principal.rolls.contains("x") };',
        '@id("type") permit (principal, action, resource) when { principal.active > 1 };',
        '@id("action") permit (principal, action == Action::"fly", resource);',
        '@id("optional") forbid (principal, action, resource) when { context.consent.active };',
    ],
)
def test_a_bad_set_is_refused_at_construction(policies):
    with pytest.raises(PolicySetInvalid) as refused:
        PolicyEngine(SCHEMA, policies)
    assert refused.value.detail


def test_a_bad_schema_is_refused():
    with pytest.raises(PolicySetInvalid):
        PolicyEngine("entity", PERMIT)


def test_a_prohibition_that_fails_is_not_skipped():
    """Cedar itself would allow here: the failing forbid is left out and the permit stands. The engine denies."""
    overflow = '@id("overflow") forbid (principal, action, resource) when { context.now + 9223372036854775807 > 0 };'
    engine = PolicyEngine(SCHEMA, PERMIT + overflow)
    assert PolicyEngine(SCHEMA, PERMIT).decide(HONEST).allowed
    assert engine.decide(HONEST) == Decision(False, ("not-decidable",))
    with pytest.raises(Denied):
        engine.decide(HONEST).require()


def test_no_permit_is_a_denial():
    engine = PolicyEngine(SCHEMA, '@id("never") forbid (principal, action, resource) when { false };')
    assert engine.decide(HONEST) == Decision(False, ("no-permit",))


@pytest.mark.parametrize(
    ("decided_by", "kind"),
    [
        (("base.client-active",), errors.ClientInactive),
        (("base.tenant-isolation", "consent.active", "base.client-active"), errors.ForeignVoice),
        (("base.voice-active",), errors.VoiceSuspended),
        (("consent.active", "consent.unexpired"), errors.ConsentWithdrawn),
        (("consent.unexpired",), errors.ConsentExpired),
        (("consent.purpose",), errors.ConsentPurpose),
        (("consent.territory",), errors.ConsentTerritory),
        (("consent.tenant",), errors.ForeignConsent),
        (("no-permit",), Denied),
        (("somebody.elses",), Denied),
    ],
)
def test_a_denial_says_why(decided_by, kind):
    with pytest.raises(Denied) as refused:
        Decision(False, decided_by).require()
    assert type(refused.value) is kind
    assert refused.value.decided_by == decided_by


NAMES = st.text(max_size=12) | st.sampled_from(["acme", "other", ""])
WORDS = st.lists(st.sampled_from(["speak", "compare", "identify", "*", ""]) | st.text(max_size=6), max_size=4).map(tuple)
ROLES = st.lists(st.sampled_from(list(Role)), max_size=5).map(tuple) | st.just(tuple(Role))
TIMES = st.integers(-(10**7), 10**7).map(lambda seconds: NOW + timedelta(seconds=seconds))
IDS = st.uuids() | st.just(VOICE.voice_id)


@st.composite
def clients(draw) -> Client:
    """With a certificate, or with the key of a browser alone; some may reach one voice only."""
    jkt = draw(NAMES)
    thumbprint = key_alone(jkt) if draw(st.booleans()) else draw(NAMES)
    return Client(
        draw(NAMES), draw(NAMES), thumbprint, jkt, draw(ROLES), draw(st.sampled_from(ClientState)), 1, draw(st.none() | IDS)
    )


TERMS = st.lists(st.sampled_from(list(VoiceTerm)), max_size=3).map(tuple)
CONSENTS = st.builds(
    Consent, st.uuids(), NAMES, NAMES, WORDS, WORDS, TIMES, st.just("0" * 64), st.sampled_from(ConsentState), TIMES, st.just(1)
)
VOICES = st.builds(
    Voice, IDS, NAMES, NAMES, st.uuids(), st.sampled_from(VoiceState), st.uuids(), st.just(1), TIMES, st.just(1), TERMS
)
HONEST_CLIENTS = st.builds(
    lambda browser, voice: replace(CLIENT, cert_sha256=key_alone(CLIENT.jkt) if browser else CLIENT.cert_sha256, voice_id=voice),
    st.booleans(),
    st.none() | IDS,
)
HONEST_VOICES = (TERMS | st.just((VoiceTerm.BEARER,))).map(lambda terms: replace(VOICE, terms=terms))


def mostly(honest, wild):
    """Honest parts are frequent, so that much is allowed: what is refused at once says little."""
    return st.integers(0, 6).flatmap(lambda drawn: honest if drawn else wild)


QUESTIONS = st.builds(
    Question,
    st.sampled_from([*Purpose, *[Purpose.SPEAK, Purpose.COMPARE] * 3]),
    mostly(HONEST_CLIENTS, clients()),
    mostly(HONEST_VOICES, st.none() | VOICES),
    mostly(st.just(CONSENT), st.none() | CONSENTS),
    st.sampled_from(["DE", "*"]),
    mostly(st.just(NOW.timestamp()), TIMES.map(datetime.timestamp)),
    mostly(st.just(HONEST.left), st.builds(Left, *[st.integers(-2, 5)] * 4)),
    bound=st.sampled_from(Binding),
    live=st.booleans(),
    approver=st.none() | mostly(st.just(APPROVER), clients()),
)


def lawful(question: Question) -> None:
    """What holds of every request that is allowed. Raises AssertionError."""
    client, voice, consent = question.client, question.voice, question.consent
    assert client.state is ClientState.ACTIVE
    if question.purpose in ON_A_VOICE:
        assert voice is not None
        assert voice.tenant == client.tenant
        assert question.purpose is Purpose.ERASE or voice.state is VoiceState.ACTIVE
    if question.purpose in (Purpose.SPEAK, Purpose.COMPARE):
        assert question.purpose.value in consent.purposes
    if question.purpose is Purpose.LIVENESS:
        assert {"speak", "compare"} & set(consent.purposes)
    if question.purpose in UNDER_CONSENT:
        assert consent.tenant == client.tenant
        assert consent.state is ConsentState.ACTIVE
        assert consent.expires_at.timestamp() > int(question.now)
        assert {question.territory, "*"} & set(consent.territory)
    assert min(question.left.requests, question.left.attempts - 1) >= 0
    callers(question)


def callers(question: Question) -> None:
    """What comes without a proof, without a certificate, without its speaker or without a second client."""
    opens = question.purpose in (Purpose.SPEAK, Purpose.COMPARE)
    terms = set(question.voice.terms) if question.voice else set()
    if question.bound is Binding.CERTIFICATE:
        assert opens
        assert VoiceTerm.BEARER in terms
    if question.client.browser:
        assert question.purpose in (Purpose.READ, Purpose.SPEAK)
        assert question.purpose is Purpose.READ or question.client.voice_id == question.voice.voice_id
    assert not opens or VoiceTerm.LIVENESS not in terms or question.live
    if question.purpose is Purpose.SPEAK and VoiceTerm.DUAL_CONTROL in terms:
        assert question.approver is not None
        assert question.approver.tenant == question.client.tenant


def test_whatever_the_data_no_tenant_is_crossed_and_nothing_is_used_without_consent():
    """With the control that something is allowed whatever a token is bound to, so that the rules above are looked at."""
    allowed: set[Binding] = set()

    @settings(max_examples=700, derandomize=True, database=None, deadline=None)
    @given(QUESTIONS)
    def ask(question: Question) -> None:
        if ENGINE.decide(question).allowed:
            lawful(question)
            allowed.add(question.bound)

    ask()
    assert allowed == set(Binding)


def test_a_decision_takes_well_under_a_millisecond():
    best = 1.0
    for _ in range(200):
        started = time.perf_counter()
        ENGINE.decide(HONEST)
        best = min(best, time.perf_counter() - started)
    assert best < 0.002
