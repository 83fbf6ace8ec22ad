"""What a request would reach at this site, counted, for officers to read before they sign: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import func, select

from keyvault.approval_kinds import Kind, Request
from keyvault.database import Transaction
from policies.audit.tables import details, leaves
from policies.authority import ClientState
from policies.tables import client, voice


def reached(transaction: Transaction, request: Request) -> list[str]:
    """The lines of this kind; none for kinds that touch keys, voices and sites alone."""
    counted = _COUNTED.get(request.operation.kind)
    return [] if counted is None else counted(transaction, request.facts)


def _decisions(transaction: Transaction, _: Mapping[str, Any]) -> list[str]:
    clients = transaction.scalar(select(func.count()).select_from(client).where(client.c.state == ClientState.ACTIVE.value))
    voices = transaction.scalar(select(func.count()).select_from(voice))
    return [f"every decision about {clients} clients and {voices} voices here"]


def _client(transaction: Transaction, facts: Mapping[str, Any]) -> list[str]:
    row = transaction.execute(select(client.c.roles, client.c.tenant).where(client.c.client_id == facts["client"])).one_or_none()
    voices = transaction.scalar(select(func.count()).select_from(voice).where(voice.c.tenant == facts["tenant"]))
    now = "a client that is not there yet" if row is None else f"a client with the roles {', '.join(sorted(row.roles)) or 'none'}"
    return [now, f"{voices} voices of its tenant"]


def _details(transaction: Transaction, facts: Mapping[str, Any]) -> list[str]:
    among = leaves.c.seq.between(int(facts["start"]), int(facts["end"]) - 1) & (leaves.c.kind == "intent")
    held = select(func.count()).select_from(leaves.join(details, details.c.intent_id == leaves.c.ref)).where(among)
    return [f"details of at most {transaction.scalar(held)} entries"]


_COUNTED: Mapping[str, Callable[[Transaction, Mapping[str, Any]], list[str]]] = {
    Kind.POLICY: _decisions,
    Kind.CLIENT: _client,
    Kind.DETAILS: _details,
}
