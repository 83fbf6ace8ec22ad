"""Grants: the proof, in hand, that one request may do one thing with one voice.

A grant is made by the gate after its transaction committed. It carries the verified token and proof. It guards against
accident; the guard against attack is the check itself, which the vault repeats at the moment of unwrapping.

A maintenance grant is of another kind: officers approved one job on the voices that it names, no client asked, and it opens
a voice only to seal it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Never, Self
from uuid import UUID

from keyvault.approvals import Approval, Operation
from keyvault.records import KeyRef, canonical
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify
from policies.authority import key_alone
from policies.errors import GrantExpired, GrantMismatch


class Purpose(StrEnum):
    """What a token may be asked for. The value stands in the token's `purpose` claim."""

    SPEAK = "speak"
    COMPARE = "compare"
    ENROL = "enrol"
    CONSENT = "consent"
    READ = "read"
    ERASE = "erase"
    LIVENESS = "liveness"
    APPROVE = "approve"


class Binding(StrEnum):
    """What a token is bound to: exactly these members stand in its `cnf` (RFC 7800)."""

    BOTH = "certificate and key"
    CERTIFICATE = "certificate"
    KEY = "key"

    @property
    def members(self) -> frozenset[str]:
        """RFC 8705 §3.1 and RFC 9449 §6.1."""
        return _BINDINGS[self][0]

    @property
    def scheme(self) -> str:
        """The one scheme in which such a token is taken: RFC 6750 §2.1, RFC 9449 §7.1."""
        return _BINDINGS[self][1]


_BINDINGS: Mapping[Binding, tuple[frozenset[str], str]] = {
    Binding.BOTH: (frozenset({"x5t#S256", "jkt"}), "dpop"),
    Binding.CERTIFICATE: (frozenset({"x5t#S256"}), "bearer"),
    Binding.KEY: (frozenset({"jkt"}), "dpop"),
}


OPENING = (Purpose.SPEAK, Purpose.COMPARE, Purpose.LIVENESS)
"""The purposes that open a voice: they need its consent, and their token names its key."""
ON_A_VOICE = (*OPENING, Purpose.ERASE, Purpose.APPROVE)
"""The purposes that are about one voice."""
UNDER_CONSENT = (*OPENING, Purpose.ENROL, Purpose.APPROVE)
"""The purposes that need a speaker's consent."""


@dataclass(frozen=True)
class Agreed:
    """A second client's word for one use of a voice (`policies.dual_control`): which, and the client's name."""

    id: UUID
    approver: str


@dataclass(frozen=True)
class VerifiedToken:
    """An access token that passed every check up to its binding to the request."""

    issuer: str
    jti: str
    tenant: str
    client_id: str
    purpose: Purpose
    voice: UUID | None
    key: KeyRef | None
    consent: UUID | None
    text_sha256: str | None
    max_chars: int | None
    x5t_s256: str | None
    """The certificate that the connection must have; None for the token of a browser, which has none."""
    jkt: str | None
    """The DPoP key that must sign for each use; None for a token that is bound to its certificate alone."""
    issued_at: int
    expires_at: int
    liveness: UUID | None = None
    """The nonce that the voice's speaker answered, where the token was asked for with a pass."""
    agreed: Agreed | None = None
    """The second client's word, where the token was asked for with one."""
    beneficiary: str | None = None
    """The client that is to speak what this token approves."""

    @property
    def bound(self) -> Binding:
        """What the token is bound to."""
        if self.jkt is None:
            return Binding.CERTIFICATE
        return Binding.KEY if self.x5t_s256 is None else Binding.BOTH

    @property
    def caller(self) -> str:
        """What the client's row is found by (`Client.cert_sha256`)."""
        return self.x5t_s256 or key_alone(self.jkt or "")


@dataclass(frozen=True)
class VerifiedProof:
    """A DPoP proof (RFC 9449) that holds for this request and this token."""

    jkt: str
    jti: str
    issued_at: int


@dataclass(frozen=True)
class Grant:
    """One admitted request. `intent_id` is its durable audit intent; the transaction that wrote it has committed.

    `proof` is None exactly where the token is bound to its certificate alone, and where an upload ticket stands for a token
    (`policies.tickets`): that one names a key, so without a proof it opens nothing.
    """

    token: VerifiedToken
    proof: VerifiedProof | None
    intent_id: UUID
    decided_by: tuple[str, ...]
    liveness: UUID | None = None
    """The liveness nonce that was used up for this grant: the token's."""
    agreed: Agreed | None = None
    """The second client's word that was used up for this grant: the token's."""

    def require(self, purpose: Purpose, *, voice: UUID | None = None) -> None:
        """Raise GrantMismatch unless the grant is for this purpose and voice."""
        if self.token.purpose is not purpose or self.token.voice != voice:
            raise GrantMismatch(f"granted {self.token.purpose} of {self.token.voice}, asked {purpose} of {voice}")

    def recheck(self, now: float, *, key: KeyRef) -> None:
        """The check at the moment of C_UnwrapKey: window, key, bindings, what was used up. Raises GrantExpired, GrantMismatch."""
        if not self.token.issued_at - CLOCK_TOLERANCE_S <= now < self.token.expires_at:
            raise GrantExpired()
        if self.token.key != key:
            raise GrantMismatch("the token names another key version")
        if (self.proof and self.proof.jkt) != self.token.jkt or not (self.token.x5t_s256 or self.token.jkt):
            raise GrantMismatch("the token is not bound to this device")
        if self.liveness != self.token.liveness:
            raise GrantMismatch("the token's liveness nonce was not used up for this grant")
        if self.agreed != self.token.agreed:
            raise GrantMismatch("the second client's word was not used up for this grant")


CLOCK_TOLERANCE_S = 1
"""Tokens are minted and checked on the same clock or on two that agree to a second."""


REKEY = "voices.rekey"
"""The kind of the operation that officers approve for a new key of one batch of voices."""
_DEVELOPMENT_JOB = timedelta(hours=1)


def rekey_description(cluster: str, voices: Iterable[UUID]) -> bytes:
    """What the officers approve: exactly these voices of this cluster. The operation's subject is its SHA-256."""
    return canonical(REKEY, cluster, *sorted(set(voices)))


@dataclass(frozen=True)
class MaintenanceGrant:
    """One approved job on one batch of voices: it opens each to seal it again, and nothing else.

    Made by `approved` or `development` and by nobody else. `approved_by` names the people; it is empty in development.
    """

    job: str
    voices: frozenset[UUID]
    approved_by: tuple[str, ...]
    expires_at: datetime

    @classmethod
    def approved(
        cls,
        roster: Roster,
        operation: Operation,
        approvals: Sequence[Approval],
        voices: Iterable[UUID],
        *,
        now: datetime,
        verify: Verify,
    ) -> Self:
        """The grant for an operation that M of N officers signed, for exactly `voices`.

        Raises GrantMismatch for an operation about anything else, and what `Quorum.check` raises.
        """
        named = frozenset(voices)
        wanted = sha256(rekey_description(roster.cluster, named)).digest()
        if (operation.cluster, operation.kind, operation.subject) != (roster.cluster, REKEY, wanted):
            raise GrantMismatch("the officers approved another operation than a new key for exactly these voices")
        roster.quorum.check(operation, approvals, verify, now)
        people = {approval.person for approval in approvals if approval.role == "approve"}
        return cls(operation.digest.hex(), named, tuple(sorted(people)), operation.expires_at)

    @classmethod
    def development(cls, roster: Roster, job: str, voices: Iterable[UUID], *, now: datetime) -> Self:
        """The grant of whoever runs a one-site development installation. Raises GrantMismatch where there are two sites."""
        if not roster.development:
            raise GrantMismatch("in a cluster of two sites the officers approve a new key for voices")
        return cls(job, frozenset(voices), (), now + _DEVELOPMENT_JOB)

    @property
    def token(self) -> Never:
        """There is none: whatever takes a request's grant refuses this one. Raises GrantMismatch."""
        raise GrantMismatch("a maintenance grant speaks and compares for nobody")

    def require(self, *_: object, **__: object) -> Never:
        """It is for no request's purpose. Raises GrantMismatch."""
        raise GrantMismatch("a maintenance grant speaks and compares for nobody")

    def recheck(self, now: datetime, *, voice: UUID) -> None:
        """The check at the moment of C_UnwrapKey. Raises GrantExpired, GrantMismatch."""
        if now >= self.expires_at:
            raise GrantExpired()
        if voice not in self.voices:
            raise GrantMismatch("the approved batch does not name this voice")
