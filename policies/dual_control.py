"""Dual control: a second client's word for one text, in one voice, for one client that is to speak it.

An approval is stored nowhere: it is a short text under the record MAC, so every worker of a site knows it and another site's is
refused. It names who gave it; what that client is at the moment of use, the policies ask then. The gate uses it up in the
transaction that admits the speech, in the list that only grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from keyvault.errors import RecordTampered
from keyvault.records import RecordMac
from policies import jws
from policies.approval_errors import ApprovalExpired, ApprovalInvalid, ApproverRefused
from policies.authority import Client
from policies.grants import CLOCK_TOLERANCE_S, Agreed

if TYPE_CHECKING:
    from keyvault.database import Transaction
    from policies.store import PolicyStore

LIFETIME_S = 600
"""How long a token may be asked for with an approval."""
_DOMAIN = "dual-control.approval"
_ID, _TIME, _MAC = 16, 8, 16
_MOST = 1024


@dataclass(frozen=True)
class Utterance:
    """What is approved: this client may have this text (its SHA-256 in hex) spoken in this voice, once."""

    tenant: str
    client_id: str
    voice: UUID
    text_sha256: str


@dataclass(frozen=True, repr=False)
class IssuedApproval:
    """An approval. `text` is what the client names in its request for a token, until `expires_at`, in seconds since 1970."""

    id: UUID
    expires_at: int
    text: str


class DualControl:
    """Gives approvals out and reads them. Any thread."""

    def __init__(self, mac: RecordMac, random: Callable[[int], bytes], clock: Callable[[], float]) -> None:
        """`random`: so many bytes from the HSM."""
        self._mac, self._random, self._clock = mac, random, clock

    def approve(self, utterance: Utterance, approver: str) -> IssuedApproval:
        """The word of the client `approver`, whose request the gate has admitted."""
        approval, now = Agreed(UUID(bytes=self._random(_ID)), approver), int(self._clock())
        mac = self._mac.make(_DOMAIN, *_fields(utterance, approval, now))
        data = approval.id.bytes + now.to_bytes(_TIME) + mac + approver.encode()
        return IssuedApproval(approval.id, now + LIFETIME_S, jws.encode(data))

    def presented(self, text: str, utterance: Utterance) -> Agreed:
        """The approval of exactly this, while it lasts. Raises ApprovalInvalid, ApprovalExpired."""
        try:
            data = jws.decode(text) if len(text) <= _MOST else b""
            head, approver = data[: _ID + _TIME + _MAC], data[_ID + _TIME + _MAC :].decode()
            approval, given_at = Agreed(UUID(bytes=head[:_ID]), approver), int.from_bytes(head[_ID : _ID + _TIME])
            self._mac.check(head[_ID + _TIME :], _DOMAIN, *_fields(utterance, approval, given_at))
        except (ValueError, RecordTampered):
            raise ApprovalInvalid() from None
        if not given_at - CLOCK_TOLERANCE_S <= self._clock() < given_at + LIFETIME_S:
            raise ApprovalExpired()
        return approval


def approver_of(store: PolicyStore, transaction: Transaction, agreed: Agreed) -> Client:
    """The client that gave its word, by its row of now. Raises ApproverRefused where the transaction does not see it."""
    found = store.client(transaction, agreed.approver)
    if found is None:
        raise ApproverRefused(("dual-control.approver",))
    return found


def _fields(utterance: Utterance, approval: Agreed, given_at: int) -> tuple[str | int | UUID, ...]:
    said = (utterance.tenant, utterance.client_id, utterance.voice, utterance.text_sha256)
    return *said, approval.id, approval.approver, given_at
