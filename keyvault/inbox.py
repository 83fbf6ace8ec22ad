"""The inbox of requests for officers' approval at one site: filing, signatures, and what was approved.

A signature is checked against the roster in force when it comes in, and again when the operation is used; the sites check it
once more when they vote. Rows carry no MAC: to write the database gives nobody a signature. What is over is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from keyvault.approval_kinds import Facts, Request, described, quorum_for
from keyvault.approvals import Approval, Operation, Quorum, signed_by
from keyvault.database import Database, Transaction
from keyvault.events import KeyEvent, Recorder
from keyvault.lifecycle import Approved
from keyvault.requests.store import ApprovalStore, StoredRequest
from keyvault.sync.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalMissing,
    RequestUnknown,
    StatementMalformed,
)
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.store import lasting, reading

_log = logging.getLogger(__name__)
DONE, CANCELLED = "done", "cancelled"


@dataclass(frozen=True)
class Standing:
    """A request and where it stands. `approved_by` are the people whose signatures hold now; `needed` is how many must."""

    request: Request
    filed_at: datetime
    outcome: str
    approved_by: tuple[str, ...]
    needed: int
    expired: bool

    @property
    def id(self) -> str:
        return self.request.operation.digest.hex()

    @property
    def open(self) -> bool:
        return not self.outcome and not self.expired


@dataclass(frozen=True)
class InboxParts:
    """What an inbox works with. `requester` is this site's name among the roster's machines, and `sign` its identity key.

    `roster` answers the roster in force.
    """

    database: Database
    recorder: Recorder
    roster: Callable[[], Roster]
    requester: str
    sign: Sign
    verify: Verify
    clock: Callable[[], datetime]


class Inbox:
    """One site's requests. Every method that changes something is durable on return, with its event in the log."""

    def __init__(self, parts: InboxParts) -> None:
        self._parts = parts
        self._store = ApprovalStore()

    # --- what the site asks and uses

    def request(self, kind: str, subject: bytes, description: Facts, expires_at: datetime) -> str:
        """File a request in this site's name, unless one for the same subject is open; its digest in hex.

        Raises ApprovalInvalid where the facts do not describe the subject, or nothing executes this kind.
        """
        for known in self.all():
            operation = known.request.operation
            if known.open and (operation.kind, operation.subject) == (kind, subject):
                return known.id
        roster = self._parts.roster()
        operation = Operation(roster.cluster, kind, subject, self._parts.requester, os.urandom(16), expires_at)
        asked = signed_by(operation, self._parts.requester, "request", self._parts.sign)
        return self.file(Request(operation, described(description), (asked,))).id

    def approved(self, kind: str, subject: bytes, now: datetime) -> Approved | None:
        """Enough officers' signatures for exactly this, which hold now; None while there are too few. Empty at threshold 0."""
        roster = self._parts.roster()
        quorum = quorum_for(kind, roster)
        for known in self.all():
            operation = known.request.operation
            if known.outcome or (operation.cluster, operation.kind, operation.subject) != (roster.cluster, kind, subject):
                continue
            held = self._holding(known.request, quorum)
            try:
                quorum.check(operation, held, self._parts.verify, now)
            except (ApprovalExpired, ApprovalInvalid, ApprovalMissing):
                continue
            return Approved(operation, held)
        return None if quorum.threshold else Approved()

    def done(self, operation: Operation) -> None:
        """The operation was carried out: it is asked for no more. Does nothing where it has ended before."""
        self._end(operation, DONE)

    def withdraw(self, kind: str, subject: bytes, reason: str) -> tuple[str, ...]:
        """End every open request for exactly this, approved or not; the log says why. Their digests in hex."""
        wanted = (kind, subject)
        open_ = [one for one in self.all() if one.open and (one.request.operation.kind, one.request.operation.subject) == wanted]
        return tuple(one.id for one in open_ if self._end(one.request.operation, CANCELLED, reason=reason))

    # --- what people do

    def all(self) -> list[Standing]:
        """Every request, oldest first, each with its signatures checked against the roster in force; one that is none is logged."""
        with reading(self._parts.database) as transaction:
            stored = self._store.requests(transaction)
        roster, now = self._parts.roster(), self._parts.clock()
        known = []
        for found in stored:
            try:
                known.append(self._standing(found, roster, now))
            except ApprovalInvalid:  # it can be signed and used for nothing, and hinders no other
                _log.warning("a stored request was changed outside Glottis and is passed over")
        return known

    def one(self, name: str) -> Standing:
        """The request whose digest begins so. Raises RequestUnknown where that is none or several."""
        found = [known for known in self.all() if known.id.startswith(name.lower())] if name else []
        if len(found) != 1:
            raise RequestUnknown(f"{len(found)} requests begin with {name!r}")
        return found[0]

    def file(self, request: Request) -> Standing:
        """Enter a request of whoever signed for it: an officer, or a site. A nonce is used once.

        Raises ApprovalInvalid, ApprovalExpired.
        """
        operation, roster, now = request.operation, self._parts.roster(), self._parts.clock()
        request.meaning()
        if operation.cluster != roster.cluster:
            raise ApprovalInvalid("the request is for another cluster")
        if now >= operation.expires_at:
            raise ApprovalExpired
        asked = [approval for approval in request.approvals if approval.role == "request"]
        unsigned = replace(roster.quorum, threshold=0)
        unsigned.check(operation, asked, self._parts.verify, now)
        for approval in request.approvals:  # before anything is written: a refusal leaves no request behind
            roster.quorum.check_one(operation, approval, self._parts.verify)
        for known in self.all():
            if known.request.operation.nonce == operation.nonce and known.request.operation != operation:
                raise ApprovalInvalid("the request's nonce was used before")
        stored = StoredRequest(operation.encode(), request.description, now)
        with lasting(self._parts.database) as transaction:
            if self._store.file(transaction, operation.digest, stored):
                self._record(transaction, "approval.requested", operation, requester=operation.requester)
            for approval in asked:
                self._store.add(transaction, operation.digest, approval.person, approval.role, approval.encode(), now)
        return self.add(request)

    def add(self, request: Request) -> Standing:
        """Enter the signatures that a request brought back. Those that are there already are no fault.

        Raises RequestUnknown, ApprovalInvalid, RequesterApproved, ApprovalExpired: then none is entered.
        """
        operation, roster, now = request.operation, self._parts.roster(), self._parts.clock()
        known = self.one(operation.digest.hex())
        if known.outcome:
            raise ApprovalInvalid(f"the request is {known.outcome}: it takes no more signatures")
        if now >= operation.expires_at:
            raise ApprovalExpired
        for approval in request.approvals:
            roster.quorum.check_one(operation, approval, self._parts.verify)
        with lasting(self._parts.database) as transaction:
            for approval in request.approvals:
                signed = approval.encode()
                if self._store.add(transaction, operation.digest, approval.person, approval.role, signed, now):
                    self._record(transaction, "approval.signed", operation, person=approval.person)
        return self.one(operation.digest.hex())

    def cancel(self, name: str) -> Standing:
        """End an open request: its signatures are used for nothing from now on. Raises RequestUnknown, ApprovalInvalid."""
        known = self.one(name)
        if not self._end(known.request.operation, CANCELLED):
            raise ApprovalInvalid(f"the request is {known.outcome} already")
        return self.one(known.id)

    def _end(self, operation: Operation, outcome: str, **facts: str) -> bool:
        with lasting(self._parts.database) as transaction:
            ended = self._store.end(transaction, operation.digest, outcome, self._parts.clock())
            if ended:
                self._record(transaction, f"approval.{outcome}", operation, **facts)
        return ended

    def _standing(self, stored: StoredRequest, roster: Roster, now: datetime) -> Standing:
        try:
            signed = tuple(Approval.decode(one) for one in stored.approvals)
            request = Request(Operation.decode(stored.operation), stored.description, signed)
        except StatementMalformed as error:
            raise ApprovalInvalid("a stored request was changed outside Glottis") from error
        people = {one.person for one in self._holding(request, roster.quorum) if one.role == "approve"}
        expired = now >= request.operation.expires_at
        needed = quorum_for(request.operation.kind, roster).threshold
        return Standing(request, stored.filed_at, stored.outcome, tuple(sorted(people)), needed, expired)

    def _holding(self, request: Request, quorum: Quorum) -> tuple[Approval, ...]:
        """The signatures that hold by the roster in force: an officer who left it counts no more, and hinders nobody."""
        held = []
        for approval in request.approvals:
            try:
                quorum.check_one(request.operation, approval, self._parts.verify)
            except ApprovalInvalid:
                continue
            held.append(approval)
        return tuple(held)

    def _record(self, transaction: Transaction, action: str, operation: Operation, **facts: str) -> None:
        about = {"operation": operation.digest.hex(), "kind": operation.kind}
        self._parts.recorder.record(transaction, KeyEvent(action, {**about, **facts}))
