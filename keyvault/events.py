"""What happens to keys, as events. The key vault only emits; who records them is joined above it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # who only opens a token need not load the database's library
    from keyvault.database import Transaction


@dataclass(frozen=True)
class KeyEvent:
    """One thing that happened to a key: `action` from a closed set (`key.created`, `master.created`, …), plain facts only."""

    action: str
    facts: dict[str, str | int] = field(default_factory=dict)


class Recorder(Protocol):
    """Where events become durable, in the caller's own transaction: what is not recorded does not happen."""

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        """Write the event so that it commits with `transaction` or not at all."""
