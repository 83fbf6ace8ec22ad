"""Names that people give: shown as they are, so that none may rewrite the line it stands in."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.shapes import ConsentRequest, name_of, tenant_of

REFUSED = [
    "",
    "a\nb",
    "a\x00",
    "\x1b[2J",
    "a\x7f",
    "a\x85b",
    "a\u2028b",
    "a\u2029b",
    "\u202eevil",
    "\u202a",
    "\u2066a\u2069",
    "\udcff",
]
CONSENT = {"purposes": ["speak"], "expires_at": "2030-01-01T00:00:00Z", "evidence": "paper"}


@pytest.mark.parametrize("text", REFUSED)
def test_names_that_would_deceive_are_refused_everywhere(text):
    assert name_of(text) is None
    assert tenant_of(text) is None
    with pytest.raises(ValidationError):
        ConsentRequest.model_validate(CONSENT | {"subject": text})


@pytest.mark.parametrize("text", ["acme", "Zoë Ångström", "田中 さくら", "علی\u200cرضا", "x" * 64])
def test_names_of_people_are_taken(text):
    assert name_of(text) == text
    assert tenant_of(text) == text
    assert ConsentRequest.model_validate(CONSENT | {"subject": text}).subject == text


def test_a_tenants_name_has_64_characters_at_most():
    assert tenant_of("x" * 65) is None
