"""`glottis policy`: what it says and what it ends with, for the set that ships and for sets that are broken."""

from __future__ import annotations

import json
import shutil
from subprocess import CompletedProcess

import pytest
from cli_here import glottis_here

from policies.engine import SHIPPED


@pytest.fixture
def own(tmp_path):
    """A copy of the shipped set, to be broken."""
    for source in (*SHIPPED.glob("*.cedar"), SHIPPED / "schema.cedarschema"):
        shutil.copy(source, tmp_path)
    shutil.copytree(SHIPPED / "cases", tmp_path / "cases")
    return tmp_path


def policy(*arguments: object) -> CompletedProcess[str]:
    return glottis_here("policy", *arguments, environ={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_shipped_set_is_valid_and_its_tables_hold():
    assert json.loads(policy("check", "--json").stdout)["valid"] is True
    tested = policy("test", "--json")
    assert tested.returncode == 0
    facts = json.loads(tested.stdout)
    assert facts["rows"] > 40
    assert (facts["failed"], facts["uncovered"]) == ([], [])


def test_check_ends_with_3_for_a_policy_that_does_not_fit_the_schema(own):
    edit(own / "roles.cedar", "principal.roles.contains", "principal.rolls.contains")
    for verb in ("check", "test", "show"):
        refused = policy(verb, "--folder", own)
        assert refused.returncode == 3
        assert "rolls" in refused.stderr
        assert "policy_set_invalid" in refused.stderr


def test_check_wants_a_sentence_for_each_policy(own):
    edit(own / "base.cedar", "// A revoked client does nothing.\n", "")
    refused = policy("check", "--folder", own)
    assert refused.returncode == 3
    assert "base.client-active" in refused.stderr


def test_test_names_the_row_that_fails_and_the_policy_that_no_row_decides(own):
    edit(own / "consent.cedar", "context.now < context.consent.expires", "context.now <= context.consent.expires")
    with (own / "roles.cedar").open("a") as roles:
        roles.write('\n// Nobody asks for this.\n@id("role.extra")\npermit (principal, action == Action::"read", resource)\n')
        roles.write('when { principal.roles.contains("extra") };\n')
    failed = policy("test", "--folder", own)
    assert failed.returncode == 3
    assert "FAILS  consent: expires now: expected denied by consent.unexpired, found allowed by role.speaker" in failed.stdout
    assert "role.extra" in failed.stdout
    facts = json.loads(policy("test", "--folder", own, "--json").stdout)
    assert [row["row"] for row in facts["failed"]] == ["consent: expires now", "dual_control: nor under a consent that is over"]


def test_a_table_that_cannot_be_read_is_told(own):
    edit(own / "cases" / "roles.json", '"action": "enrol"', '"act": "enrol"')
    refused = policy("test", "--folder", own)
    assert refused.returncode == 3
    assert "roles.json" in refused.stderr


def test_show_lists_every_policy_with_its_sentence():
    shown = json.loads(policy("show", "--json").stdout)["policies"]
    found = {row["id"]: (row["effect"], row["sentence"]) for row in shown}
    assert found["base.client-active"] == ("forbid", "A revoked client does nothing.")
    assert found["role.speaker"] == ("permit", "A speaker makes voices speak.")


@pytest.mark.parametrize(
    ("arguments", "decided_by", "code"),
    [
        (("speak",), ["role.speaker"], None),
        (("speak", "--role", "reader"), ["no-permit"], "denied"),
        (("read", "--no-role"), ["no-permit"], "denied"),
        (("speak", "--consent-purpose", "compare"), ["consent.purpose"], "consent_purpose"),
        (("speak", "--consent-expires", "-1d"), ["consent.unexpired"], "consent_expired"),
        (("speak", "--consent-expires", "2020-01-01T00:00:00Z"), ["consent.unexpired"], "consent_expired"),
        (("enrol", "--consent-state", "withdrawn"), ["consent.active"], "consent_withdrawn"),
        (("speak", "--territory", "DE", "--consent-territory", "FR"), ["consent.territory"], "consent_territory"),
        (("speak", "--voice-state", "suspended"), ["base.voice-active"], "voice_suspended"),
        (("speak", "--voice-term", "liveness"), ["liveness.demanded"], "liveness_required"),
        (("speak", "--voice-term", "liveness", "--live"), ["role.speaker"], None),
        (("read", "--client-state", "revoked"), ["base.client-active"], "client_inactive"),
        (("compare", "--voice-tenant", "b"), ["base.tenant-isolation"], "voice_unknown"),
        (("enrol", "--consent-tenant", "b"), ["consent.tenant"], "consent_unknown"),
        (("speak", "--no-consent"), ["not-decidable"], "consent_unknown"),
    ],
)
def test_explain_says_which_policy_decides_and_what_would_change_it(arguments, decided_by, code):
    answer = policy("explain", *arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert (facts["decided_by"], facts["code"], facts["allowed"]) == (decided_by, code, code is None)
    assert facts["would_change"]


def test_explain_refuses_an_expiry_that_is_none():
    refused = policy("explain", "speak", "--consent-expires", "soon")
    assert refused.returncode == 1
    assert "--consent-expires" in refused.stderr
