"""What becomes of a refusal: counted where nobody knows the caller; else in the log, once for each proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from keyvault.database import Database, Statement, send
from policies.errors import Denied, PolicyError, QuotaExhausted, RateLimited
from policies.grants import VerifiedProof
from policies.intents import Facts, Intent, Intents
from policies.proofs import certificate_thumbprint
from policies.store import PolicyStore, durable
from policies.throttle import Throttle

NotCounted = (RateLimited, QuotaExhausted)
"""Refusals that are no failed attempts: who waits as told fails no more."""


class Refusals(Protocol):
    """Where refusals of callers unknown are counted."""

    def count(self, code: str) -> None:
        """One more refusal with this code. Must not block."""


@contextmanager
def counted(refusals: Refusals, throttle: Throttle, certificate_der: bytes | None) -> Iterator[None]:
    """What this block refuses proved nothing: it is counted, by code and by certificate, and neither recorded nor remembered.

    Raises RateLimited before anything is looked at, for a certificate that failed too often.
    """
    # Who shows no certificate is nobody in particular: to count them as one would let each of them shut out the others.
    certificate = certificate_thumbprint(certificate_der) if certificate_der else None
    try:
        if certificate is not None:
            throttle.require(certificate)
        yield
    except PolicyError as refusal:
        refusals.count(refusal.code)
        if certificate is not None and not isinstance(refusal, NotCounted):
            throttle.failed(certificate)
        raise


def record_refusal(
    database: Database,
    store: PolicyStore,
    intents: Intents,
    refusals: Refusals,
    once: VerifiedProof,
    refusal: PolicyError,
    intent: Intent,
    spend: Statement,
) -> None:
    """Record a refusal, and count it by `spend`, in a transaction of its own. Raises AuditUnavailable.

    It uses up `once`, the request's proof, so that each entry costs the client one signature: a request seen on the way and
    sent again a thousand times is recorded once and counted after that.
    """
    with durable(database, intent.tenant) as transaction:
        if store.consume_proof(transaction, once):
            send(transaction, spend)
            intents.append(transaction, intent)
        else:
            refusals.count(refusal.code)


def refusal_details(refusal: PolicyError) -> Facts:
    """What an intent says about a refusal."""
    policies = ",".join(refusal.decided_by) if isinstance(refusal, Denied) else None
    return {"code": refusal.code, "policies": policies}
