"""What the operator may ask of a site process, as functions from JSON to JSON. `admin.ask` calls them by name.

Bytes travel as base64. One command drives the sites at a time; what a command was refused says its code, and every command may
be given again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from keyvault.approval_kinds import Kind, explained
from keyvault.errors import KeyVaultError
from keyvault.events import KeyEvent
from keyvault.hsm import KeyName, RingMaster
from keyvault.key_uses import Place, acting
from keyvault.sync.coordinator import Exchange
from keyvault.sync.errors import CertificateInvalid, SitesDiverged, SyncRefused
from keyvault.sync.statement import Certificate, Op, Proposal
from keyvault.sync.store import lasting
from keyvault.sync.verify import Summary, verify_certificates
from service.backups import signed_bytes
from service.sync.arguments import Call
from service.sync.assembly import SiteService
from service.sync.report import report
from service.witnessing import WitnessCommands

Facts = dict[str, Any]


@dataclass(frozen=True)
class Commands:
    """The commands of one site process."""

    site: SiteService

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        drive = (self.exchange, self.resume, self.repair, self.install, self.transact)
        read = (self.status, self.verify, self.history, self.propose_roster, self.expect)
        own: dict[str, Call] = {call.__name__: call for call in (*drive, *read, self.break_glass, self.seal_backup)}
        site = self.site
        placed: Sequence[tuple[Place, Mapping[str, Call]]] = (
            *(
                (Place.SITE_COMMAND, calls)
                for calls in (own, site.keys().calls(), site.approvals().calls(), site.policies().calls())
            ),
            (Place.SITE_SIGNERS, site.signers().calls()),
            (Place.SITE_COMMAND, WitnessCommands(site.node, site.witness).calls()),
            (Place.SITE_DETAILS, site.details().calls()),
            (Place.CLIENTS, site.clients().calls()),
        )
        return {name: acting(place)(call) for place, calls in placed for name, call in calls.items()}

    def ready(self) -> bool:
        """Whether this site's token and state answer."""
        try:
            self.site.hsm.public_key(KeyName.SITE_IDENTITY)
            self.site.node.current.require_whole()
        except KeyVaultError:
            return False
        return True

    # --- what is read

    def status(self) -> Facts:
        """Where this site stands and what it heard of the other last."""
        return report(self.site)

    def verify(self) -> Facts:
        """Compare both sites now, and check both histories with public keys alone, from the roster in this site's folder.

        Raises PeerUnavailable, CertificateInvalid, SitesDiverged.
        """
        node, peer, anchor = self.site.node, self.site.peer, self.site.settings.roster_file.read_bytes()
        with self.site.driving:
            found = self.site.coordinator.exchange()
        histories = {node.name: node.certificates(0)}
        if peer is not None:
            histories[peer.name] = peer.certificates(0)
        summaries = {name: verify_certificates(history, anchor) for name, history in histories.items()}
        heads = {summary.head for summary in summaries.values()}
        if len(heads) != 1:
            raise SitesDiverged("both histories hold by themselves, and they end in different heads")
        if (own := summaries[node.name]).head != node.ledger.head:
            raise CertificateInvalid(f"the certificates of site {node.name} lead to another head than its state")
        return {
            "sites": {name: _summary(summary) for name, summary in summaries.items()},
            "certificates": {str(_epoch(one)): _text(one) for one in histories[node.name]},
            "roster": _text(anchor),
            "marks": list(own.marks),
            **_exchanged(found),
        }

    def history(self) -> Facts:
        """Every certificate of this site's history, in order, for a site that joins."""
        return {"certificates": [_text(one) for one in self.site.node.certificates(0)]}

    def propose_roster(self) -> Facts:
        """The cluster's first transaction for its officers to approve; `proposal` is None once it was carried out."""
        ledger = self.site.node.ledger
        if ledger.endorsed:
            return {"proposal": None}
        return {"proposal": _text(self.site.coordinator.propose(Op.ROSTER, new_roster=ledger.roster).encode())}

    def expect(self, master: str) -> Facts:
        """Let this site's token hold a master that officers are about to bring into it, PRE_ACTIVE."""
        self.site.node.expect(RingMaster.named(master))
        return {"expected": master}

    # --- what changes something

    def exchange(self) -> Facts:
        """Compare both sites now. Raises PeerUnavailable, SitesDiverged."""
        with self.site.driving:
            return _exchanged(self.site.coordinator.exchange())

    def resume(self) -> Facts:
        """Finish or void what is open."""
        with self.site.driving:
            found = self.site.coordinator.resume()
        return {**_exchanged(found), "open": self.site.node.current.awaiting()}

    def repair(self, names: Sequence[str]) -> Facts:
        """End the quarantine of these versions by a transaction."""
        with self.site.driving:
            return _closed(self.site.coordinator.repair(names))

    def install(self, masters: Sequence[str]) -> Facts:
        """Prove masters that both tokens hold, and make them active."""
        with self.site.driving:
            return _closed(self.site.coordinator.install([RingMaster.named(name) for name in masters]))

    def transact(self, proposal: str) -> Facts:
        """Carry a roster's approved proposal through at both sites. Raises SyncRefused for a proposal of another kind: each of
        those has a command of its own, with its own conditions (a destruction waits its delay)."""
        given = Proposal.decode(_bytes(proposal))
        if given.manifest.op is not Op.ROSTER:
            raise SyncRefused("only a roster comes in as a whole proposal")
        with self.site.driving:
            return _closed(self.site.coordinator.transact(given))

    def break_glass(self, hours: float, reason: str, version: str | None = None) -> Facts:
        """File the request that lets this site serve by an old word of the other or, with `version`, open under that compromised
        master version; it holds once officers approved it."""
        cluster, name = self.site.node.ledger.roster.cluster, self.site.node.name
        ends = datetime.now(UTC) + timedelta(hours=hours)
        facts = {"site": name, "reason": reason} | ({} if version is None else {"version": RingMaster.named(version).label})
        kind = Kind.BREAK_GLASS if version is None else Kind.OPEN_COMPROMISED
        request = self.site.inbox.request(kind, explained(kind, cluster, facts).subject, facts, ends)
        return {"request": request, "ends_at": ends.isoformat(timespec="seconds")}

    def seal_backup(self, manifest: str) -> Facts:
        """Sign a backup's manifest in the HSM, with the log's entry that it was made."""
        data, node = _bytes(manifest), self.site.node
        with lasting(self.site.database) as transaction:
            facts: dict[str, str | int] = {"manifest": sha256(data).hexdigest(), "epoch": node.ledger.epoch}
            node.parts.recorder.record(transaction, KeyEvent("backup.made", facts))
        signed = signed_bytes(node.ledger.roster.cluster, node.name, data)
        return {"signature": _text(self.site.hsm.sign(KeyName.SITE_IDENTITY, signed))}


def _closed(certificate: bytes) -> Facts:
    closed = Certificate.decode(certificate)
    return {"epoch": closed.epoch, "head": closed.head.hex()}


def _epoch(certificate: bytes) -> int:
    return Certificate.decode(certificate).epoch


def _exchanged(found: Exchange) -> Facts:
    facts: Facts = {"epoch": found.epoch, "quarantined": list(found.quarantined), "handed": found.handed, "taken": found.taken}
    if found.peer is not None:
        facts["peer"] = {"site": found.peer.site, "epoch": found.peer.epoch, "quarantined": list(found.peer.quarantined)}
    return facts


def _summary(found: Summary) -> Facts:
    return {"epoch": found.epoch, "head": found.head.hex(), "completed": found.completed, "void": found.void}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
