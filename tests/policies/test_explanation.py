"""Explanations: the policy that decides, and changes that were tried and do give the other answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.authority import ClientState
from policies.cases import HONEST, NOW, tables
from policies.engine import PolicyEngine
from policies.explanation import explain
from policies.grants import Purpose

ENGINE = PolicyEngine.shipped()
ALLOWED = [case for case in tables() if case.expected.allowed]
DENIED = [case for case in tables() if not case.expected.allowed]


@pytest.mark.parametrize("case", DENIED, ids=str)
def test_every_denial_in_the_tables_has_a_way_out(case):
    found = explain(ENGINE, case.question, replace(HONEST, purpose=case.question.purpose))
    assert found.decision == case.expected
    assert [reason.policy for reason in found.reasons] == list(case.expected.decided_by)
    assert all(reason.sentence.endswith(".") for reason in found.reasons)
    assert found.code
    assert found.changes
    assert all(found.changes)


@pytest.mark.parametrize("case", ALLOWED, ids=str)
def test_every_permission_in_the_tables_hangs_on_something(case):
    found = explain(ENGINE, case.question, HONEST)
    assert found.code is None
    assert found.changes
    assert {len(way) for way in found.changes} == {1}


def test_a_single_change_that_suffices_is_told_alone():
    question = replace(HONEST, consent=replace(HONEST.consent, purposes=("compare",)))
    found = explain(ENGINE, question, HONEST)
    assert found.changes == (("the consent names the purpose speak",),)
    assert found.code == "consent_purpose"


def test_where_no_single_change_suffices_none_of_those_told_can_be_left_out():
    question = replace(
        HONEST,
        client=replace(HONEST.client, roles=("reader",), state=ClientState.REVOKED),
        voice=None,
        consent=replace(HONEST.consent, expires_at=NOW),
    )
    found = explain(ENGINE, question, HONEST)
    assert found.code == "voice_unknown"
    assert found.changes == (
        (
            "there is such a voice",
            "there is a new consent, that has not expired",
            "the client has the role speaker",
            "the client is another one, that is not revoked",
        ),
    )


def test_a_set_that_never_permits_has_no_way_out():
    engine = PolicyEngine(
        """entity Tenant; entity Client in [Tenant] = { tenant: Tenant, active: Bool, roles: Set<String> };
        action read appliesTo { principal: Client, resource: Tenant, context: { purpose: String, now: Long } };""",
        '@id("never") forbid (principal, action, resource);',
    )
    found = explain(engine, replace(HONEST, purpose=Purpose.READ, voice=None), HONEST)
    assert not found.decision.allowed
    assert found.changes == ()
