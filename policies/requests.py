"""A request as the database sees it: the rows that its decision needs, and what it uses up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from keyvault.database import Statement
from policies.grants import VerifiedProof, VerifiedToken
from policies.proofs import PROOF_AGE_S
from policies.tables import CONSUME


@dataclass(frozen=True)
class Request:
    """Who asks for what: the rows that a decision needs, and what it uses up.

    The token endpoint has no token yet; who presents a certificate alone has no proof.
    """

    caller: str
    """What the client's row is found by (`Client.cert_sha256`)."""
    proof: VerifiedProof | None
    now: float
    token: VerifiedToken | None = None
    voice: UUID | None = None
    consent: UUID | None = None
    characters: int = 0


def uses_up(request: Request) -> Statement:
    """What uses up the token and the proof, as far as there are any; it answers for each whether it was fresh."""
    token = {} if request.token is None else _token_guard(request.token)
    proof = {} if request.proof is None else proof_guard(request.proof)
    return CONSUME[bool(token), bool(proof)], token | proof


def _token_guard(token: VerifiedToken) -> dict[str, Any]:
    return {"iss": token.issuer, "token_jti": token.jti, "token_expires_at": moment(token.expires_at)}


def proof_guard(proof: VerifiedProof) -> dict[str, Any]:
    return {"jkt": proof.jkt, "proof_jti": proof.jti, "proof_expires_at": moment(proof.issued_at + PROOF_AGE_S)}


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
