"""M of N people approve one operation in time; everything less, and everything else, is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sync_world import NOW, PEOPLE, SITES, Signer, approve, make_roster

from keyvault.approvals import Approval, Officer, Operation, Quorum, signed_by
from keyvault.sync.errors import ApprovalExpired, ApprovalInvalid, ApprovalMissing, RequesterApproved, StatementMalformed
from keyvault.sync.signatures import verify_p256

QUORUM = make_roster().quorum
SUBJECT = bytes(32)


def check(operation: Operation, approvals: tuple[Approval, ...], now: datetime | None = NOW, quorum: Quorum = QUORUM) -> None:
    quorum.check(operation, approvals, verify_p256, now)


def test_enough_officers_in_time_approve() -> None:
    check(*approve("keys.destroy", SUBJECT))
    check(*approve("keys.destroy", SUBJECT), now=None)
    check(*approve("keys.destroy", SUBJECT, people=("bo", "cy", "di")))


def test_too_few_people_are_refused() -> None:
    for people in ((), ("bo",)):
        with pytest.raises(ApprovalMissing):
            check(*approve("keys.destroy", SUBJECT, people=people))


def test_one_person_counts_once_with_two_signatures_or_two_keys() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT, people=("bo", "bo"))
    with pytest.raises(ApprovalMissing):
        check(operation, approvals)
    second = Signer()
    both = replace(QUORUM, officers=(Officer("ada", (PEOPLE["ada"].public,)), Officer("bo", (PEOPLE["bo"].public, second.public))))
    signed = (*approvals[:2], signed_by(operation, "bo", "approve", second))
    with pytest.raises(ApprovalMissing):
        check(operation, signed, quorum=both)
    check(operation, signed, quorum=replace(both, threshold=1))


def test_the_requester_does_not_approve() -> None:
    with pytest.raises(RequesterApproved):
        check(*approve("keys.destroy", SUBJECT, people=("ada", "bo", "cy")))


def test_nobody_requests_in_anothers_name() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT)
    forged = signed_by(operation, "ada", "request", PEOPLE["di"])
    with pytest.raises(ApprovalInvalid):
        check(operation, (forged, *approvals[1:]))
    with pytest.raises(ApprovalInvalid):
        check(operation, approvals[1:])
    with pytest.raises(ApprovalInvalid):
        check(operation, (approvals[0], *approvals))


def test_a_request_does_not_pass_as_an_approval() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT, people=("bo",))
    asked = signed_by(operation, "cy", "request", PEOPLE["cy"])
    with pytest.raises(ApprovalInvalid):
        check(operation, (*approvals, replace(asked, role="approve")))


def test_machines_request_and_never_approve() -> None:
    operation = Operation("cluster-1", "keys.rotate", SUBJECT, "site/a", bytes(16), NOW + timedelta(hours=1))
    asked = signed_by(operation, "site/a", "request", SITES["a"])
    people = [signed_by(operation, name, "approve", PEOPLE[name]) for name in ("ada", "bo")]
    check(operation, (asked, *people))
    with pytest.raises(ApprovalInvalid):
        check(operation, (asked, people[0], signed_by(operation, "site/b", "approve", SITES["b"])))


def test_time_ends_an_approval() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT)
    check(operation, approvals, now=operation.expires_at - timedelta(microseconds=1))
    with pytest.raises(ApprovalExpired):
        check(operation, approvals, now=operation.expires_at)


@pytest.mark.parametrize("change", [{"subject": b"\x01" * 32}, {"kind": "keys.cancel"}, {"nonce": b"\x01" * 16}, {"cluster": "x"}])
def test_an_approval_is_for_one_operation(change: dict[str, object]) -> None:
    operation, approvals = approve("keys.destroy", SUBJECT)
    with pytest.raises(ApprovalInvalid):
        check(replace(operation, **change), approvals)  # type: ignore[arg-type]
    with pytest.raises(ApprovalInvalid):
        check(replace(operation, expires_at=operation.expires_at + timedelta(days=1)), approvals)


def test_strangers_and_broken_signatures_are_noticed_even_beside_enough_good_ones() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT)
    for bad in (
        Approval("mallory", "approve", approvals[1].signature),
        replace(approvals[1], signature=bytes(64)),
        replace(approvals[1], person="di"),
    ):
        with pytest.raises(ApprovalInvalid):
            check(operation, (*approvals, bad))


def test_operations_read_back_exactly() -> None:
    operation, approvals = approve("keys.destroy", SUBJECT)
    assert Operation.decode(operation.encode()) == operation
    assert [Approval.decode(approval.encode()) for approval in approvals] == list(approvals)
    with pytest.raises(StatementMalformed):
        Approval.decode(approvals[0].encode().replace(b"request", b"approvf"))
