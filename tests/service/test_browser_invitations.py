"""Inviting a browser from the command line: one entry in the log, and no way past the officers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from house import House
from sqlalchemy import text

from policies.authority import Client, ClientState, Role, key_alone
from policies.caller_errors import BrowserRolesRefused
from policies.store import durable
from service.exits import Exit, exit_for
from service.registration import Registration


def registration(house: House, *marked: str) -> Registration:
    """As officers marked these roles."""
    return Registration(house.database, house.store, house.audit, SimpleNamespace(marked=frozenset(marked)))  # type: ignore[arg-type]


def test_an_invitation_is_on_record_and_its_code_is_not(house: House) -> None:
    made = registration(house).invite("page", "acme", ["reader"], None, 60)
    with house.database.connect() as connection:
        row = connection.execute(text("SELECT intent_id, body FROM intent ORDER BY counter DESC LIMIT 1")).one()
    said = {name: item["value"] for name, item in house.audit.disclose(row.intent_id).items()}
    assert (json.loads(bytes(row.body))["action"], said["roles"]) == ("client.invited", "reader")
    assert made.code not in str(said)
    assert made.code not in repr(made)


def test_roles_that_officers_marked_are_not_given_to_browsers(house: House) -> None:
    """They would have to sign a key that is not there yet."""
    with pytest.raises(BrowserRolesRefused) as refused:
        registration(house, "reader").invite("page", "acme", ["reader"], None, 60)
    assert exit_for(refused.value) == Exit.REFUSED
    assert house.count("browser_invitation") == 0
    registration(house, "speaker", "enroller").invite("page", "acme", ["reader"], None, 60)


def test_a_browser_is_given_no_role_later_that_it_could_not_be_invited_with(house: House) -> None:
    jkt = "b" * 43
    with durable(house.database) as transaction:
        browser = Client("page", "acme", key_alone(jkt), jkt, (Role.READER,), ClientState.ACTIVE, 1)
        house.store.insert(transaction, browser)
    for roles in (["enroller"], ["reader", "speaker"]):
        with pytest.raises(BrowserRolesRefused):
            registration(house).change_roles("page", roles)
