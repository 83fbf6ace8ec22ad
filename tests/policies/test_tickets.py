"""Upload tickets: one enrolment, for the client that minted it, as long as the policies still allow that client to enrol."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from house import House
from sqlalchemy import text as sql

from policies import caller_errors, errors
from policies.authority import Role
from policies.errors import PolicyError
from policies.grants import Purpose
from policies.store import durable
from policies.tickets import IssuedTicket, Tickets

AT_ONCE = 64


@pytest.fixture
def tickets(house):
    return Tickets(
        database=house.database,
        engine=house.engine,
        store=house.store,
        intents=house.audit,
        refusals=house.refusals,
        territory=house.territory,
        random=house.hsm.random,
        clock=house.clock,
    )


def ticket(house: House, tickets: Tickets, device, consent=None, *, max_bytes: int = 1000, lifetime_s: int = 600) -> IssuedTicket:
    """A ticket as the vault mints one: under a grant to enrol."""
    consent = consent or house.consent()
    token = house.token(device, Purpose.ENROL, consent=consent.consent_id)
    grant = house.gate.admit(house.call(device, token, Purpose.ENROL))
    with durable(house.database, grant.token.tenant) as transaction:
        return tickets.issue(transaction, grant, max_bytes=max_bytes, lifetime_s=lifetime_s)


def denials(house: House) -> list[str | None]:
    """Codes of the refusals on record, oldest first."""
    with house.database.connect() as connection:
        rows = connection.execute(sql("SELECT intent_id, body FROM intent ORDER BY counter")).all()
    denied = [row.intent_id for row in rows if json.loads(bytes(row.body))["outcome"] == "denied"]
    return [house.audit.disclose(intent)["code"]["value"] for intent in denied]


@contextmanager
def nothing_happened(house: House, refusal: type[PolicyError]):
    """The block is refused so, and leaves no intent that allows anything."""
    before = house.count("intent"), len(denials(house))
    with pytest.raises(refusal) as refused:
        yield refused
    assert refused.type is refusal
    assert house.count("intent") - before[0] == len(denials(house)) - before[1]


def test_a_ticket_admits_one_enrolment_under_its_consent(house, tickets):
    device, consent = house.client(), house.consent()
    made = ticket(house, tickets, device, consent, max_bytes=77)
    assert tickets.look(made.ticket).max_bytes == made.max_bytes == 77
    grant = tickets.redeem(made.ticket)
    grant.require(Purpose.ENROL)
    assert (grant.token.consent, grant.token.tenant, grant.token.client_id) == (consent.consent_id, "acme", "app")
    assert grant.decided_by == ("role.enroller",)
    for again in (tickets.redeem, tickets.look):
        with nothing_happened(house, caller_errors.TicketUsed):
            again(made.ticket)
    assert denials(house) == ["ticket_used"], "recorded once, and counted after that"
    assert house.refusals.codes == {"ticket_used": 1}


def test_the_database_does_not_know_the_ticket(house, tickets):
    made = ticket(house, tickets, house.client())
    assert len(made.ticket) == 43
    with house.database.connect() as connection:
        row = connection.execute(sql("SELECT * FROM upload_ticket")).one()
        assert made.ticket not in str(row)
    assert made.ticket not in repr(made)


def test_64_uses_at_once_have_one_success(house, tickets):
    made = ticket(house, tickets, house.client())

    def use(_: int) -> str:
        try:
            tickets.redeem(made.ticket)
        except PolicyError as refusal:
            return refusal.code
        return "admitted"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = Counter(threads.map(use, range(AT_ONCE)))
    assert outcomes["admitted"] == 1, outcomes
    assert outcomes["ticket_used"] == AT_ONCE - 1 - outcomes["audit_unavailable"], outcomes


def test_a_ticket_of_a_client_revoked_meanwhile_is_worth_nothing(house, tickets):
    device = house.client()
    made = ticket(house, tickets, device)
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, device.client_id)
    with nothing_happened(house, errors.ClientInactive):
        tickets.redeem(made.ticket)
    assert denials(house) == ["client_inactive"]


def test_a_consent_withdrawn_meanwhile_ends_the_ticket(house, tickets):
    consent = house.consent()
    made = ticket(house, tickets, house.client(), consent)
    with house.database.begin() as transaction:
        house.registry.withdraw_consent(transaction, consent.consent_id)
    with nothing_happened(house, errors.ConsentWithdrawn):
        tickets.redeem(made.ticket)


def test_a_refusal_does_not_use_the_ticket_up(house, tickets):
    """The client's quota was used up; a minute later the same ticket works."""
    device = house.client()
    made = ticket(house, tickets, device)
    house.edit("UPDATE usage SET requests = 2000000000, minute = now() + interval '1 minute'")
    with nothing_happened(house, errors.RateLimited):
        tickets.redeem(made.ticket)
    house.edit("DELETE FROM usage")
    tickets.redeem(made.ticket)


def test_a_ticket_out_of_time(house, tickets):
    made = ticket(house, tickets, house.client(), lifetime_s=60)
    house.clock.offset = 60
    for use in (tickets.look, tickets.redeem):
        with nothing_happened(house, caller_errors.TicketExpired):
            use(made.ticket)
    house.clock.offset = 0
    tickets.redeem(made.ticket)


def test_what_is_no_ticket_is_counted_and_not_recorded(house, tickets):
    guesses = ["", "x", "A" * 43, "A" * 44, "é" * 43, "A" * 42 + "\n", "%27" * 20]
    intents = house.count("intent")
    for guess in guesses:
        for use in (tickets.look, tickets.redeem):
            with pytest.raises(caller_errors.TicketUnknown):
                use(guess)
    assert house.count("intent") == intents
    assert house.refusals.codes == {"ticket_unknown": 2 * len(guesses)}


CHANGES = [
    "max_bytes = max_bytes + 1",
    "expires_at = expires_at + interval '1 minute'",
    "client_id = 'other'",
    "tenant = 'other'",
    "consent_id = gen_random_uuid()",
    "mac = decode(repeat('00', 16), 'hex')",
]


def test_a_ticket_changed_in_the_database_is_refused(house, tickets):
    house.client("other", "other")
    device = house.client()
    for change in CHANGES:
        made = ticket(house, tickets, device)
        house.edit(f"UPDATE upload_ticket SET {change}")
        with pytest.raises(errors.AuthorityRowTampered):
            tickets.redeem(made.ticket)
        house.edit("DELETE FROM upload_ticket")


def test_a_used_ticket_put_back_stays_used(house, tickets):
    """Who may write the database as the vault does deletes every guard that it may, and writes the row anew."""
    made = ticket(house, tickets, house.client())
    house.edit("CREATE TABLE kept AS SELECT * FROM upload_ticket")
    tickets.redeem(made.ticket)
    house.edit(
        "DELETE FROM upload_ticket; DELETE FROM used_token; DELETE FROM used_proof; INSERT INTO upload_ticket SELECT * FROM kept"
    )
    with nothing_happened(house, caller_errors.TicketUsed):
        tickets.redeem(made.ticket)


def test_tickets_out_of_time_are_forgotten(house, tickets):
    ticket(house, tickets, house.client(), lifetime_s=60)
    with house.database.begin() as transaction:
        house.store.purge(transaction, house.clock())
    assert house.count("upload_ticket") == 1
    with house.database.begin() as transaction:
        house.store.purge(transaction, house.clock() + 100)
    assert house.count("upload_ticket") == 0


def test_a_ticket_makes_no_tickets_and_opens_nothing(house, tickets):
    made = ticket(house, tickets, house.client())
    grant = tickets.redeem(made.ticket)
    with durable(house.database) as transaction, pytest.raises(errors.GrantMismatch):
        tickets.issue(transaction, grant, max_bytes=1, lifetime_s=1)
    with pytest.raises(errors.GrantMismatch):
        grant.recheck(house.clock(), key=grant.token.key)


def test_tickets_have_bounds(house, tickets):
    device = house.client()
    for max_bytes, lifetime_s in ((1, 601), (1, 0), (0, 1)):
        with pytest.raises(ValueError, match="lifetime or size"):
            ticket(house, tickets, device, max_bytes=max_bytes, lifetime_s=lifetime_s)


def test_a_ticket_is_for_who_may_enrol(house, tickets):
    device = house.client(roles=(Role.READER,))
    with pytest.raises(errors.Denied):
        house.token(device, Purpose.ENROL, consent=house.consent().consent_id)
    reader = house.client("reader")
    grant = house.gate.admit(house.call(reader, house.token(reader, Purpose.READ), Purpose.READ))
    with durable(house.database) as transaction, pytest.raises(errors.GrantMismatch):
        tickets.issue(transaction, grant, max_bytes=1, lifetime_s=1)
