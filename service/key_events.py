"""Where the key vault's events go: into the audit log, in the transaction that they happen in."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from keyvault.database import Transaction
from keyvault.events import KeyEvent
from policies.intents import Intent, Intents


@dataclass(frozen=True)
class KeyEventRecorder:
    """Key events become intents of the audit log, in the transaction that they happen in."""

    intents: Intents

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        facts: dict[str, str | int | None] = {name: value for name, value in event.facts.items() if name not in ("tenant", "voice")}
        tenant, voice = str(event.facts.get("tenant", "glottis")), event.facts.get("voice")
        found = UUID(str(voice)) if voice is not None else None
        self.intents.append(transaction, Intent(event.action, "allowed", tenant, "glottis", found, "keys", facts))
