"""The details beside the log's entries, by what the entries are about: erased with a voice, or read for its certificate.

The entries themselves stay, and the tree with them: without its salt a commitment says nothing. Both calls read every entry
once, for what an entry is about stands only in its body.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from keyvault.database import Transaction
from keyvault.hsm import Hsm, KeyName
from policies.audit.record import Value, detail_context, disclosures, pseudonym_of
from policies.audit.tables import details, intents
from policies.audit.verify import canonical_json, strict_json

ERASED, SHREDDED = "voice.erased", "voice.shredded"
"""The actions of the entries that say so."""
_KEPT = (("action", ERASED), ("action", SHREDDED), ("purpose", "erase"))
"""The entries about a voice that keep their details: what shows that it was erased, and at whose request."""


class Details:
    """Sealed details, with the token that can open them."""

    def __init__(self, hsm: Hsm) -> None:
        self._hsm = hsm

    def erase(self, transaction: Transaction, voice: UUID) -> int:
        """Delete the sealed details of every entry about this voice, but for those of its erasure; returns how many."""
        pseudonym = pseudonym_of("voice", str(voice), lambda data: self._hsm.mac(KeyName.AUDIT_PSEUDONYM, data))
        kept = [_says(name, value) for name, value in _KEPT]
        found = intents.select().where(_says("voice", pseudonym), *(~entry for entry in kept))
        about = found.with_only_columns(intents.c.intent_id)
        transaction.exec_driver_sql("SET LOCAL statement_timeout = 0")  # a request's patience is not enough for a whole log
        return transaction.execute(details.delete().where(details.c.intent_id.in_(about))).rowcount

    def of(self, transaction: Transaction, action: str) -> list[tuple[datetime, dict[str, Value]]]:
        """When this action was recorded, and with which details (none once erased), oldest first. Raises SealBroken."""
        wanted = intents.outerjoin(details).select().where(_says("action", action))
        found = []
        for body, intent_id, sealed in transaction.execute(
            wanted.with_only_columns(intents.c.body, intents.c.intent_id, details.c.sealed)
        ):
            shown = disclosures(self._hsm.unseal(KeyName.AUDIT_DETAIL, sealed, detail_context(intent_id))) if sealed else {}
            at = datetime.fromisoformat(strict_json(body)["time"])
            found.append((at, {name: item["value"] for name, item in shown.items()}))
        return sorted(found, key=lambda moment: moment[0])

    def entries_of(self, transaction: Transaction, tenant: str) -> frozenset[UUID]:
        """The ids of every entry about this tenant."""
        pseudonym = pseudonym_of("tenant", tenant, lambda data: self._hsm.mac(KeyName.AUDIT_PSEUDONYM, data))
        about = intents.select().where(_says("tenant", pseudonym)).with_only_columns(intents.c.intent_id)
        return frozenset(transaction.scalars(about))


def _says(name: str, value: str) -> Any:
    """Whether an intent's body has this member. It is canonical JSON: a member has one spelling, and no other text has it."""
    return intents.c.body.op("LIKE", is_comparison=True)(b"%" + canonical_json({name: value})[1:-1] + b"%")
