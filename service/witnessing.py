"""What officers tell a site as the witness of the other one's audit log: that it goes on from another end (`log.reanchor`).

The site that co-signs remembers how far it signed, and refuses a log that was put back to an older end. Officers who let the log
go on (`service.log_anchor`) let the witness begin anew by the same signatures; what it saw before stays as it is.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keyvault.approval_kinds import Kind, Request, quorum_for
from keyvault.records import RecordMac
from keyvault.sync.errors import ApprovalInvalid
from keyvault.sync.node import SiteNode
from keyvault.sync.signatures import verify_p256
from keyvault.sync.store import reading
from policies.witness.cosigning import Witness
from policies.witness.store import WitnessStore
from service.inboxes import joined
from service.sync.arguments import Call


@dataclass(frozen=True)
class WitnessCommands:
    """The commands about the other site's log."""

    node: SiteNode
    witness: Witness

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        return {"cosign_anew": self.cosign_anew}

    def cosign_anew(self, requests: Sequence[str]) -> Mapping[str, object]:
        """Co-sign the other site's log from its next checkpoint on, whatever came before: by officers' signatures, in one or more
        copies of their request (base64). Raises what the approvals lack, ApprovalInvalid."""
        given = [Request.decode(base64.b64decode(one, validate=True)) for one in requests]
        asked = joined(given)
        asked.meaning()
        roster, operation = self.node.ledger.roster, asked.operation
        if (operation.kind, operation.cluster) != (Kind.REANCHOR, roster.cluster):
            raise ApprovalInvalid("the request is about something else")
        if asked.facts["site"] not in roster.peers(self.node.name):
            raise ApprovalInvalid("the request is about another log than the other site's")
        quorum_for(operation.kind, roster).check(operation, asked.approvals, verify_p256, self.node.parts.clock())
        origin = (str(asked.facts["kept"]) or str(asked.facts["database"])).partition("\n")[0]
        begun = [log for log in self._logs() if self._origin(log) == origin]
        for log in begun:
            self.witness.begin_anew(log, operation.digest, str(asked.facts["reason"]))
        return {"origin": origin, "logs": begun}

    def _logs(self) -> list[str]:
        with reading(self.node.parts.database) as transaction:
            return WitnessStore(RecordMac(self.node.parts.hsm)).logs(transaction)

    def _origin(self, log: str) -> str:
        """The name in the newest checkpoint of this log that was co-signed; empty right after it began anew."""
        with reading(self.node.parts.database) as transaction:
            newest = WitnessStore(RecordMac(self.node.parts.hsm)).newest(transaction, log)
        return newest.note.partition("\n")[0] if newest else ""
