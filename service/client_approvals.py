"""Which clients come in, get new keys or more roles only with officers' approval (`ca.issue`), and whether they have it.

The active set of policies marks roles (`officers.json`); the set that ships marks none. What officers sign is one client of one
site as it is to be: name, tenant, roles, and the thumbprints of its certificate and DPoP key. A certificate alone opens nothing:
whoever holds it is unknown until its row is written, and that is what waits for officers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keyvault.approval_kinds import Facts, Kind, explained, quorum_for
from keyvault.approvals import Operation
from keyvault.database import Database
from keyvault.inbox import Inbox
from keyvault.lifecycle import APPROVALS_LAST
from keyvault.sync.roster import Roster
from policies.authority import Client
from policies.store import durable
from service.inboxes import inbox_now
from service.policy_sets import ActiveSet


class OfficersAwaited(Exception):
    """Officers must approve this client first; `request` is what they are asked, `needed` how many."""

    def __init__(self, request: str, needed: int) -> None:
        super().__init__(f"request {request[:16]} waits for {needed} officers")
        self.request, self.needed = request, needed


@dataclass(frozen=True)
class ClientApprovals:
    """One site's officers, and which roles need them."""

    database: Database
    active: ActiveSet
    inbox: Inbox
    roster: Roster
    site: str

    @property
    def marked(self) -> frozenset[str]:
        """The roles that need officers now. Raises PolicySetTampered, PolicySetInvalid."""
        with durable(self.database) as transaction:
            return self.active.standing(transaction).policies.approved_roles

    def require(self, client: Client, act: str, new: Collection[str]) -> Operation | None:
        """The approved operation for exactly this client; None where none of its `new` roles needs one.

        Files the request where there is none, and raises OfficersAwaited. Raises PolicySetTampered, PolicySetInvalid.
        """
        if not self.marked & set(new):
            return None
        facts: Facts = {
            "site": self.site,
            "client": client.client_id,
            "tenant": client.tenant,
            "roles": " ".join(sorted(client.roles)),
            "certificate": f"x5t:{client.cert_sha256}",
            "jkt": client.jkt,
            "act": act,
        }
        subject, now = explained(Kind.CLIENT, self.roster.cluster, facts).subject, inbox_now()
        found = self.inbox.approved(Kind.CLIENT, subject, now)
        if found is not None:
            return found.operation
        request = self.inbox.request(Kind.CLIENT, subject, facts, now + APPROVALS_LAST)
        raise OfficersAwaited(request, quorum_for(Kind.CLIENT, self.roster).threshold)

    def done(self, operation: Operation | None) -> None:
        """The client is as it was approved: the approval is used for nothing more."""
        if operation is not None:
            self.inbox.done(operation)
