"""The inbox of approvals on a real database: what counts is people of the roster, over exactly what was shown, in time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_world import NOW, PEOPLE, SITES, Signer, make_roster, propose

from keyvault.approval_kinds import MEANINGS, Explanation, Facts, Kind, Request, described, explained, statement_fact
from keyvault.approvals import Approval, Officer, Operation, signed_by
from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.inbox import Inbox, InboxParts
from keyvault.sync.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalMissing,
    RequesterApproved,
    RequestUnknown,
    StatementMalformed,
)
from keyvault.sync.ledger import Ledger
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.statement import DESTROY, Op, destruction_subject

ROSTER = make_roster()
FACTS: Facts = {"versions": "ring/main/1", "delay_hours": 168, "reason": "worn out"}
SUBJECT = destruction_subject(ROSTER.cluster, ["ring/main/1"])
ENDS = NOW + timedelta(days=14)


@dataclass
class World:
    """One site's inbox, its clock and its roster, which tests may turn."""

    database: sqlalchemy.Engine
    now: datetime = NOW
    roster: Roster = ROSTER
    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        assert transaction.in_transaction()
        self.events.append(event)

    @property
    def inbox(self) -> Inbox:
        parts = InboxParts(self.database, self, lambda: self.roster, "site/a", SITES["a"], verify_p256, lambda: self.now)
        return Inbox(parts)

    def filed(self) -> Request:
        return self.inbox.one(self.inbox.request(DESTROY, SUBJECT, FACTS, ENDS)).request

    def sign(self, request: Request, *people: str) -> None:
        for person in people:
            self.inbox.add(signed(request, person))


def signed(request: Request, person: str, key: Signer | None = None, role: str = "approve") -> Request:
    approval = signed_by(request.operation, person, role, key or PEOPLE[person])
    return replace(request, approvals=(approval,))


def by_officer(kind: str, subject: bytes, facts: Facts, person: str = "ada", nonce: bytes = b"") -> Request:
    operation = Operation(ROSTER.cluster, kind, subject, person, nonce or os.urandom(16), ENDS)
    return Request(operation, described(facts), (signed_by(operation, person, "request", PEOPLE[person]),))


@pytest.fixture
def world(database: sqlalchemy.Engine) -> World:
    return World(database)


def approved(world: World) -> bool:
    return world.inbox.approved(DESTROY, SUBJECT, world.now) is not None


def test_enough_people_approve_and_the_sites_take_what_comes_out(world: World) -> None:
    request = world.filed()
    for person in ("bo", "cy"):
        assert not approved(world)
        world.sign(request, person)
    found = world.inbox.approved(DESTROY, SUBJECT, world.now)
    assert found is not None
    assert found.operation is not None
    ROSTER.quorum.check(found.operation, found.approvals, verify_p256, world.now)
    assert world.inbox.approved(DESTROY, destruction_subject(ROSTER.cluster, ["ring/main/2"]), world.now) is None
    assert [event.action for event in world.events] == ["approval.requested", "approval.signed", "approval.signed"]
    standing = world.inbox.one(request.operation.digest.hex()[:8])
    assert (standing.approved_by, standing.needed, standing.open) == (("bo", "cy"), 2, True)


def test_the_same_is_not_requested_twice_while_it_is_open(world: World) -> None:
    first = world.inbox.request(DESTROY, SUBJECT, FACTS, ENDS)
    assert world.inbox.request(DESTROY, SUBJECT, FACTS, ENDS) == first
    world.inbox.cancel(first)
    assert world.inbox.request(DESTROY, SUBJECT, FACTS, ENDS) != first
    with pytest.raises(ApprovalInvalid, match="cancelled already"):
        world.inbox.cancel(first)


def test_a_cancelled_request_s_signatures_are_used_for_nothing(world: World) -> None:
    request = world.filed()
    world.sign(request, "bo", "cy")
    world.inbox.cancel(request.operation.digest.hex())
    assert not approved(world)
    with pytest.raises(ApprovalInvalid, match="takes no more signatures"):
        world.sign(request, "di")


def test_whoever_asked_withdraws_every_open_request_for_exactly_that(world: World) -> None:
    first, other = world.filed(), by_officer(DESTROY, SUBJECT, FACTS)
    world.inbox.file(other)
    world.sign(first, "bo", "cy")
    assert world.inbox.withdraw("keys.rotate", SUBJECT, "changed my mind") == ()
    assert approved(world)
    withdrawn = world.inbox.withdraw(DESTROY, SUBJECT, "changed my mind")
    assert set(withdrawn) == {one.operation.digest.hex() for one in (first, other)}
    assert not approved(world)
    assert world.inbox.withdraw(DESTROY, SUBJECT, "again") == ()


def test_what_was_carried_out_is_asked_for_no_more(world: World) -> None:
    request = world.filed()
    world.sign(request, "bo", "cy")
    world.inbox.done(request.operation)
    world.inbox.done(request.operation)
    assert not approved(world)
    assert world.inbox.one(request.operation.digest.hex()).outcome == "done"


@pytest.mark.parametrize("end", ["cancel", "done"])
def test_an_outcome_taken_out_of_the_database_opens_nothing_again(world: World, end: str) -> None:
    request = world.filed()
    world.sign(request, "bo", "cy")
    assert approved(world)
    name = request.operation.digest.hex()
    world.inbox.cancel(name) if end == "cancel" else world.inbox.done(request.operation)
    with world.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("UPDATE approval_request SET outcome = '', done_at = NULL"))
    assert not approved(world)
    assert not world.inbox.one(name).open
    with pytest.raises(ApprovalInvalid, match="takes no more signatures"):
        world.sign(request, "di")
    with pytest.raises(ApprovalInvalid, match="already"):
        world.inbox.cancel(name)


def test_signatures_of_others_and_for_others_are_refused_as_they_come(world: World) -> None:
    request, other = (
        world.filed(),
        by_officer(DESTROY, destruction_subject(ROSTER.cluster, ["ring/main/2"]), {"versions": "ring/main/2"}),
    )
    attacks: list[Callable[[], Request]] = [
        lambda: signed(request, "bo", Signer()),  # no key of the roster
        lambda: signed(request, "bo", PEOPLE["cy"]),  # one officer in another's name
        lambda: signed(request, "eve", Signer()),
        lambda: signed(request, "site/a", SITES["a"]),  # machines do not approve
        lambda: replace(request, approvals=signed(other, "bo").approvals),  # an approval of another operation
        lambda: replace(request, approvals=(replace(signed(request, "bo", role="request").approvals[0], role="approve"),)),
    ]
    for attack in attacks:
        with pytest.raises(ApprovalInvalid):
            world.inbox.add(attack())
    assert world.inbox.one(request.operation.digest.hex()).approved_by == ()


def test_the_requester_does_not_count(world: World) -> None:
    request = by_officer(DESTROY, SUBJECT, FACTS)
    world.inbox.file(request)
    with pytest.raises(RequesterApproved):
        world.sign(request, "ada")
    world.sign(request, "bo")
    assert not approved(world)
    world.sign(request, "cy")
    assert approved(world)


def test_one_person_counts_once_with_two_keys(world: World) -> None:
    second = Signer()
    both = Officer("bo", (PEOPLE["bo"].public, second.public))
    world.roster = replace(ROSTER, officers=tuple(both if one.person == "bo" else one for one in ROSTER.officers))
    request = world.filed()
    world.sign(request, "bo")
    world.inbox.add(signed(request, "bo", second))
    assert world.inbox.one(request.operation.digest.hex()).approved_by == ("bo",)
    assert not approved(world)


def test_what_is_over_is_refused(world: World) -> None:
    request = world.filed()
    world.sign(request, "bo", "cy")
    world.now = ENDS
    assert not approved(world)
    with pytest.raises(ApprovalExpired):
        world.sign(request, "di")
    with pytest.raises(ApprovalExpired):
        world.inbox.file(by_officer(DESTROY, SUBJECT, FACTS))
    assert not world.inbox.one(request.operation.digest.hex()).open


def test_an_officer_who_left_the_roster_counts_no_more(world: World) -> None:
    request = world.filed()
    world.sign(request, "bo", "cy")
    world.roster = replace(ROSTER, epoch=2, officers=tuple(one for one in ROSTER.officers if one.person != "bo"))
    assert not approved(world)
    world.sign(request, "di")
    assert approved(world)


def test_a_nonce_is_used_once(world: World) -> None:
    nonce = b"n" * 16
    first = by_officer(DESTROY, SUBJECT, FACTS, nonce=nonce)
    world.inbox.file(first)
    again = Operation(ROSTER.cluster, DESTROY, SUBJECT, "ada", nonce, ENDS + timedelta(days=1))
    later = Request(again, first.description, (signed_by(again, "ada", "request", PEOPLE["ada"]),))
    with pytest.raises(ApprovalInvalid, match="nonce"):
        world.inbox.file(later)
    world.inbox.file(first)  # the very same file again is no second request
    assert len(world.inbox.all()) == 1


def test_one_refused_signature_leaves_no_request_behind(world: World) -> None:
    request = by_officer(DESTROY, SUBJECT, FACTS)
    forged = signed(request, "bob", PEOPLE["ada"]).approvals
    with pytest.raises(ApprovalInvalid):
        world.inbox.file(replace(request, approvals=(*request.approvals, *forged)))
    assert world.inbox.all() == []


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE approval_request SET operation = 'x' WHERE operation_sha256 = :id",
        "UPDATE approval SET approval = 'x' WHERE operation_sha256 = :id",
    ],
)
def test_a_garbage_row_hinders_no_other_request(world: World, damage: str) -> None:
    broken = world.inbox.file(by_officer(DESTROY, SUBJECT, FACTS)).request.operation
    request = by_officer(DESTROY, SUBJECT, FACTS)
    with world.database.begin() as transaction:
        transaction.execute(sqlalchemy.text(damage), {"id": broken.digest})
    world.inbox.file(request)
    assert [known.request.operation for known in world.inbox.all()] == [request.operation]


def test_nobody_files_in_another_s_name(world: World) -> None:
    honest = by_officer(DESTROY, SUBJECT, FACTS)
    for approvals in ((), signed(honest, "ada", PEOPLE["di"], role="request").approvals):
        with pytest.raises(ApprovalInvalid):
            world.inbox.file(replace(honest, approvals=approvals))
    assert world.inbox.all() == []


def test_a_request_says_what_its_signatures_cover(world: World) -> None:
    """The facts that people read give the subject that they sign: another description is refused before it is filed."""
    for facts in ({**FACTS, "versions": "ring/main/2"}, {"reason": "none"}, {"versions": ""}):
        with pytest.raises(ApprovalInvalid):
            world.inbox.file(by_officer(DESTROY, SUBJECT, facts))
    for kind in ("policy.activate", "keys.make", ""):
        with pytest.raises((ApprovalInvalid, ValueError)):
            world.inbox.file(by_officer(kind, SUBJECT, FACTS))
    request = world.filed()
    assert request.meaning().signed == (("destroys", "ring/main/1"),)
    assert dict(request.meaning().claims) == {"delay hours": "168", "reason": "worn out"}


def test_names_are_the_first_digits(world: World) -> None:
    world.filed()
    for name in ("", "zz", "0" * 64):
        with pytest.raises(RequestUnknown):
            world.inbox.one(name)


def test_a_changed_description_in_the_database_is_noticed(world: World) -> None:
    request = world.filed()
    with world.database.begin() as transaction:
        changed = {"description": described({**FACTS, "versions": "ring/harmless/9"})}
        transaction.execute(sqlalchemy.text("UPDATE approval_request SET description = :description"), changed)
    with pytest.raises(ApprovalInvalid, match="something else"):
        world.inbox.one(request.operation.digest.hex()).request.meaning()


def test_every_kind_has_a_sentence() -> None:
    assert set(MEANINGS) == set(Kind)
    assert all(meaning.sentence.endswith(".") and meaning.undone.endswith(".") for meaning in MEANINGS.values())


def test_a_new_roster_is_shown_by_what_it_changes() -> None:
    ledger = replace(Ledger.start(ROSTER), endorsed=1)
    officers = tuple(one for one in ROSTER.officers if one.person != "di")
    new = replace(ROSTER, epoch=2, officers=officers, threshold=3)
    proposal = propose(ledger, Op.ROSTER, new_roster=new, approved=False)
    shown = explain("sync.roster", {"proposal": statement_fact(proposal), "old_roster": statement_fact(ROSTER)})
    assert shown.subject == proposal.manifest.digest
    assert ("must approve", "3") in shown.signed
    assert any(name == "takes away" and "a key of di" in said for name, said in shown.signed)
    with pytest.raises(ApprovalInvalid):
        explain("sync.replace", {"proposal": statement_fact(proposal)})
    for broken in ("", "!!", "AAAA"):
        with pytest.raises(ApprovalInvalid):
            explain("sync.roster", {"proposal": broken})


def explain(kind: str, facts: Facts) -> Explanation:
    return explained(kind, ROSTER.cluster, facts)


def test_voices_and_rotations_are_explained() -> None:
    voice = "0b2f1c1e-5f0e-4c60-8f3a-0d9f5f6f7a01"
    assert [str(one) for one in explain("voices.rekey", {"voices": f"{voice} {voice}"}).voices] == [voice]
    assert explain("keys.rotate", {"version": "ring/main/1"}).signed == (("follows", "ring/main/1"),)
    with pytest.raises(ApprovalInvalid):
        explain("voices.rekey", {"voices": "no-uuid"})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["ada", "bo", "cy", "di"]), max_size=6), st.integers(2, 4), st.sampled_from(["ada", "site/a"]))
def test_approval_is_threshold_many_others_and_nothing_else(people: list[str], threshold: int, requester: str) -> None:
    """Whoever signs in whatever order: it is approved exactly when `threshold` different people other than the requester did."""
    quorum = replace(make_roster(threshold=threshold)).quorum
    operation = Operation(ROSTER.cluster, DESTROY, SUBJECT, requester, bytes(16), ENDS)
    key = PEOPLE.get(requester) or SITES["a"]
    approvals: list[Approval] = [signed_by(operation, requester, "request", key)]
    approvals += [signed_by(operation, person, "approve", PEOPLE[person]) for person in people]
    enough = len(set(people)) >= threshold
    try:
        quorum.check(operation, approvals, verify_p256, NOW)
    except RequesterApproved:
        assert requester in people
    except ApprovalMissing:
        assert not enough
    else:
        assert enough
        assert requester not in people


def test_a_request_file_has_one_spelling() -> None:
    request = by_officer(DESTROY, SUBJECT, FACTS)
    data = request.encode()
    assert Request.decode(data) == request
    for changed in (data[:-1], data + b"x"):
        with pytest.raises(StatementMalformed):
            Request.decode(changed)
    spaced = replace(request, description=b'{"versions": "ring/main/1"}')
    with pytest.raises(ApprovalInvalid, match="spelled"):
        spaced.meaning()
