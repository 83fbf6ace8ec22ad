"""Approvals: M of N officers sign one operation's digest, before a set time, and never their own request.

What counts is people. An officer may own several keys, and two signatures by one person count once; a key that two people
share is refused when the roster is made. The requester signs too, so that nobody can file a request in another's name and
then approve it. There is no clock here: the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from keyvault.sync.errors import ApprovalExpired, ApprovalInvalid, ApprovalMissing, RequesterApproved, SignatureInvalid
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.wire import Statement, is_digest, require


@dataclass(frozen=True)
class Officer(Statement):
    """One person (or for requests, one machine) and the public keys (SubjectPublicKeyInfo, DER) that are this person's."""

    DOMAIN = "officer/1"
    person: str
    keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        require(bool(self.person) and bool(self.keys), "an officer has a name and a key")


@dataclass(frozen=True)
class Operation(Statement):
    """What is to be done: `kind` from a closed set of the caller, `subject` the SHA-256 of its exact description.

    `nonce` (16 random bytes) keeps two requests for the same thing apart; `expires_at` ends the time of all approvals.
    """

    DOMAIN = "operation/1"
    cluster: str
    kind: str
    subject: bytes
    requester: str
    nonce: bytes
    expires_at: datetime

    def __post_init__(self) -> None:
        require(bool(self.kind) and bool(self.requester), "an operation has a kind and a requester")
        require(is_digest(self.subject) and len(self.nonce) == 16, "an operation has a subject and a nonce")
        require(self.expires_at.tzinfo is not None, "an operation's expiry names its time zone")


@dataclass(frozen=True)
class Approval(Statement):
    """One person's signature over `bytes_to_sign`. `role` is "request" or "approve", so neither passes as the other."""

    DOMAIN = "approval/1"
    person: str
    role: str
    signature: bytes

    def __post_init__(self) -> None:
        require(self.role in ("request", "approve"), "an approval has one of two roles")


def bytes_to_sign(operation: Operation, person: str, role: str) -> bytes:
    """The exact bytes under a request or an approval: the operation's digest, who signs, and as what."""
    return _Signature(operation.digest, person, role).encode()


def signed_by(operation: Operation, person: str, role: str, sign: Sign) -> Approval:
    """What the officer's console makes after showing the operation."""
    return Approval(person, role, sign(bytes_to_sign(operation, person, role)))


@dataclass(frozen=True)
class _Signature(Statement):
    DOMAIN = "approval-signature/1"
    operation: bytes
    person: str
    role: str


@dataclass(frozen=True)
class Quorum:
    """Who may approve and how many must. `machines` may request (a schedule does) and never approve."""

    officers: tuple[Officer, ...]
    threshold: int
    machines: tuple[Officer, ...] = ()

    def check(self, operation: Operation, approvals: Sequence[Approval], verify: Verify, now: datetime | None) -> None:
        """Return if the operation is requested by one known signer and approved by enough others; raise what is wrong.

        Every approval given must hold: one bad signature among good ones is refused, so that it is noticed. `now` None is
        for offline checks of what the sites let pass in time. Raises ApprovalExpired, ApprovalInvalid, RequesterApproved,
        ApprovalMissing.
        """
        if now is not None and now >= operation.expires_at:
            raise ApprovalExpired
        requests = [approval for approval in approvals if approval.role == "request"]
        if [request.person for request in requests] != [operation.requester]:
            raise ApprovalInvalid("the operation is not signed by its requester, once")
        people: set[str] = set()
        for approval in approvals:
            self.check_one(operation, approval, verify)
            if approval.role == "approve":
                people.add(approval.person)
        if len(people) < self.threshold:
            raise ApprovalMissing(f"{len(people)} of {self.threshold} needed officers approved {operation.kind}")

    def check_one(self, operation: Operation, approval: Approval, verify: Verify) -> None:
        """Return if this one signature holds, whatever the others do. Raises ApprovalInvalid, RequesterApproved."""
        if approval.role == "approve" and approval.person == operation.requester:
            raise RequesterApproved
        known = self.officers if approval.role == "approve" else (*self.officers, *self.machines)
        data = bytes_to_sign(operation, approval.person, approval.role)
        for key in (key for officer in known if officer.person == approval.person for key in officer.keys):
            try:
                return verify(key, data, approval.signature)
            except SignatureInvalid:
                continue
        raise ApprovalInvalid(f"no key of {approval.person!r} signed this {approval.role} of {operation.kind}")
