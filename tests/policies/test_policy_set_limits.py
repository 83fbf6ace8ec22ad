"""Sets of policies made to end the process that reads them, or to say one thing to a reader and another to the code."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from policies.engine import SHIPPED
from policies.errors import PolicySetInvalid
from policies.sets.policy_set import PERMISSIONS, PolicySet

ROLES = (SHIPPED / PERMISSIONS).read_text()
HEAD = '// Says something.\n@id("own.one")\n'
NEVER = 'forbid (principal, action, resource) when { principal.roles.contains("nobody") };'


def written(**files: str) -> bytes:
    """The bytes of a set, however strange."""
    said = {"files": {PERMISSIONS: ROLES, **{name.replace("__", "/").replace("_", "."): text for name, text in files.items()}}}
    return json.dumps(said | {"format": 1}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def when(expression: str) -> str:
    return HEAD + f"forbid (principal, action, resource) when {{ {expression} }};"


def refused(reading: Callable[[], object]) -> str:
    """Why it was."""
    with pytest.raises(PolicySetInvalid) as told:
        reading()
    return told.value.detail or ""


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 5000 + "true" + ")" * 5000,
        "[" * 5000 + "]" * 5000 + " == []",
        "{a: " * 5000 + "1" + "}" * 5000 + " == {}",
        "if true then true else " * 8000 + "true",
        " && ".join(["true"] * 40_000),
        '";" == ";" && ' * 2000 + "true",
        ")" * 90 + "(" * 90,
    ],
    ids=["parentheses", "sets", "records", "conditions", "a chain", "a chain of semicolons in strings", "closed before opened"],
)
def test_what_is_nested_or_chained_too_far_is_refused_before_it_is_parsed(expression: str) -> None:
    assert "at most" in refused(lambda: PolicySet.decode(written(own_cedar=when(expression))).engine())


def test_a_chain_below_the_limit_is_refused_where_it_cannot_be_described() -> None:
    said = refused(lambda: PolicySet.decode(written(own_cedar=when("true || " * 900 + "true"))).engine())
    assert said == "a policy is nested too deeply"


def test_the_control_brackets_below_the_limit_load() -> None:
    assert PolicySet.decode(written(own_cedar=when("(" * 50 + "true" + ")" * 50))).engine()


def test_brackets_in_strings_and_comments_do_not_count() -> None:
    text = HEAD.replace("something", "(" * 100) + f'forbid (principal, action, resource) when {{ "{"(" * 100}" == "" }};'
    assert PolicySet.decode(written(own_cedar=text)).engine()


def test_a_template_is_refused_because_nobody_would_be_shown_it() -> None:
    text = HEAD + "permit (principal == ?principal, action, resource);"
    assert "template" in refused(lambda: PolicySet.decode(written(own_cedar=text)).engine())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"client_roles":["enroller"],"client_roles":[]}'], ids=["deep", "said twice"])
def test_officers_are_read_strictly(text: str) -> None:
    with pytest.raises(PolicySetInvalid):
        PolicySet.decode(written(own_cedar=HEAD + NEVER, officers_json=text)).engine()


def test_a_deep_table_of_cases_is_refused() -> None:
    with pytest.raises(PolicySetInvalid):
        PolicySet.decode(written(own_cedar=HEAD + NEVER, cases__own_json="[" * 100_000)).check()


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"files":{"a.cedar":"\\ud800"},"format":1}'], ids=["deep", "no character"])
def test_bytes_that_are_no_set_are_refused(data: bytes) -> None:
    assert "no set of policies" in refused(lambda: PolicySet.decode(data))
