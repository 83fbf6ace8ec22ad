"""Intents and completions: what the gate writes down before anything happens, and what came of it.

The tables are those of `policies.audit.store`; the gate knows them by this Protocol alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import UUID

from keyvault.database import Rows, Statement, Transaction

Outcome = Literal["allowed", "denied"]
Facts = dict[str, str | int | None]


@dataclass(frozen=True)
class Intent:
    """One decision about one request: who wanted what, and whether it was allowed.

    `details` hold plain facts (thumbprints, identifiers, key version, policy ids, text hash), never a text, a key or a score.
    """

    action: str
    outcome: Outcome
    tenant: str
    client_id: str
    voice: UUID | None
    purpose: str
    details: Facts = field(default_factory=dict)


class Intents(Protocol):
    """Where intents become durable."""

    def place(self) -> Sequence[Statement]:
        """Statements whose answers `append` needs: a caller may send them with its own, to save a round trip."""

    def append(
        self, transaction: Transaction, intent: Intent, place: Sequence[Rows] | None = None, *, commit: bool = False
    ) -> UUID:
        """Write the intent so that it commits with `transaction` or not at all; returns its id.

        `place`: the answers to `place`, where they were asked. With `commit` the transaction is committed in the same trip.
        """

    def complete(self, intent_id: UUID, outcome: str, facts: dict[str, str | int], *beside: Statement) -> None:
        """Record, in a transaction of its own, what came of an allowed intent: `outcome` is a stable word or code.

        `beside`: statements that are to commit with it.
        """
