"""Grants: the proof, in hand, that one request may do one thing with one voice.

A grant is made by the gate after its transaction committed. It carries the verified token and proof. It guards against
accident; the guard against attack is the check itself, which the vault repeats at the moment of unwrapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from keyvault.records import KeyRef
from policies.errors import GrantExpired, GrantMismatch


class Purpose(StrEnum):
    """What a token may be asked for. The value stands in the token's `purpose` claim."""

    SPEAK = "speak"
    COMPARE = "compare"
    ENROL = "enrol"
    CONSENT = "consent"
    READ = "read"


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
    x5t_s256: str
    jkt: str
    issued_at: int
    expires_at: int


@dataclass(frozen=True)
class VerifiedProof:
    """A DPoP proof (RFC 9449) that holds for this request and this token."""

    jkt: str
    jti: str
    issued_at: int


@dataclass(frozen=True)
class Grant:
    """One admitted request. `intent_id` is its durable audit intent; the transaction that wrote it has committed."""

    token: VerifiedToken
    proof: VerifiedProof
    intent_id: UUID
    decided_by: tuple[str, ...]

    def require(self, purpose: Purpose, *, voice: UUID | None = None) -> None:
        """Raise GrantMismatch unless the grant is for this purpose and voice."""
        if self.token.purpose is not purpose or self.token.voice != voice:
            raise GrantMismatch(f"granted {self.token.purpose} of {self.token.voice}, asked {purpose} of {voice}")

    def recheck(self, now: float, *, key: KeyRef) -> None:
        """The check at the moment of C_UnwrapKey: window, key version and both bindings. Raises GrantExpired, GrantMismatch."""
        if not self.token.issued_at - CLOCK_TOLERANCE_S <= now < self.token.expires_at:
            raise GrantExpired()
        if self.token.key != key:
            raise GrantMismatch("the token names another key version")
        if self.proof.jkt != self.token.jkt or not self.token.x5t_s256:
            raise GrantMismatch("the token is not bound to this device")


CLOCK_TOLERANCE_S = 1
"""Tokens are minted and checked on the same clock or on two that agree to a second."""
