"""Officers' approvals at a site process: its commands, and the acts that a request carries with it, once it is approved.

A request travels as the exact bytes that people sign; the officer's console reads what it shows from those, not from what
this process says of them. Only the numbers of what would be touched come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keyvault.approval_kinds import Kind, Request, statement_fact
from keyvault.approvals import Officer
from keyvault.hsm import KeyName, RingMaster
from keyvault.inbox import Inbox, InboxParts, Standing
from keyvault.lifecycle import APPROVALS_LAST
from keyvault.store import KeyStore
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.errors import ApprovalMissing, SyncRefused
from keyvault.sync.node import SiteNode
from keyvault.sync.roster import Roster, SiteKey, machine
from keyvault.sync.signatures import verify_p256
from keyvault.sync.statement import Op, Proposal
from keyvault.sync.store import reading
from service.base64_text import decoded, encoded
from service.blast_radius import reached
from service.sync.arguments import Call

Facts = dict[str, Any]
_CARRIED = frozenset({Kind.ROSTER, Kind.REPLACE, Kind.END, Kind.ADOPT_FOR_GOOD})
"""Kinds whose request holds the whole transaction; the others are carried out by giving their command again."""
_OF_ONE_SITE = frozenset({Kind.BREAK_GLASS, Kind.OPEN_COMPROMISED, Kind.REANCHOR})


def site_inbox(node: SiteNode) -> Inbox:
    """The inbox of a site: its HSM signs the requests that the site files itself."""
    parts = node.parts
    sign = partial(parts.hsm.sign, KeyName.SITE_IDENTITY)
    signer = machine(node.name)
    return Inbox(InboxParts(parts.database, parts.recorder, lambda: node.ledger.roster, signer, sign, verify_p256, parts.clock))


@dataclass(frozen=True)
class ApprovalCommands:
    """The commands about approvals of one site process, as functions from JSON to JSON. Bytes travel as base64."""

    inbox: Inbox
    node: SiteNode
    coordinator: Coordinator
    driving: AbstractContextManager[object]
    """Held while both sites are driven from here."""

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        read = (self.approvals, self.approval, self.roster)
        change = (
            self.approval_file,
            self.approval_add,
            self.approval_cancel,
            self.approval_carry,
            self.approval_roster,
            self.approval_act,
        )
        return {call.__name__: call for call in (*read, *change)}

    def approvals(self) -> Facts:
        """Every request, oldest first."""
        return {"requests": [_facts(standing) for standing in self.inbox.all()]}

    def approval(self, name: str) -> Facts:
        """One request, and what it would touch here. Raises RequestUnknown, ApprovalInvalid."""
        standing = self.inbox.one(name)
        return _facts(standing) | {"roster": encoded(self.node.ledger.roster.encode()), **self._touched(standing.request)}

    def roster(self) -> Facts:
        """The roster in force."""
        return {"roster": encoded(self.node.ledger.roster.encode())}

    def approval_file(self, request: str) -> Facts:
        """Enter a request that an officer signed. Raises ApprovalInvalid, ApprovalExpired."""
        return _facts(self.inbox.file(Request.decode(decoded(request))))

    def approval_add(self, request: str) -> Facts:
        """Enter the signatures that a request brought back. Raises ApprovalInvalid, RequesterApproved, ApprovalExpired."""
        return _facts(self.inbox.add(Request.decode(decoded(request))))

    def approval_cancel(self, name: str) -> Facts:
        """End an open request."""
        return _facts(self.inbox.cancel(name))

    def approval_roster(self, add: Mapping[str, Sequence[str]], remove: Sequence[str], threshold: int | None) -> Facts:
        """File the request for a roster with other officers, keys or quorum. Raises SyncRefused for what cannot be a roster."""
        old = self.node.ledger.roster
        keys = {person: tuple(decoded(key) for key in given) for person, given in add.items()}
        kept = {one.person: one for one in old.officers if one.person not in remove}
        if unknown := set(remove) - {one.person for one in old.officers}:
            raise SyncRefused(f"the roster names no officer {min(unknown)!r}")
        people = kept | {person: Officer(person, given) for person, given in keys.items()}
        officers = tuple(people[person] for person in sorted(people))
        try:
            new = replace(old, epoch=old.epoch + 1, officers=officers, threshold=old.threshold if threshold is None else threshold)
        except ValueError as error:
            raise SyncRefused(f"this cannot be a roster: {error}") from error
        proposal = self.coordinator.propose(Op.ROSTER, new_roster=new)
        return self._filed(proposal, old)

    def approval_carry(self, name: str) -> Facts:
        """Carry out an approved request that holds its whole transaction. Raises ApprovalMissing, and what the sites refuse."""
        request = self.inbox.one(name).request
        kind = request.meaning().kind
        if kind not in _CARRIED:
            raise SyncRefused(f"a {kind} request is carried out by the command that filed it: give that again")
        found = self.inbox.approved(kind, request.operation.subject, self.node.parts.clock())
        if found is None:
            raise ApprovalMissing
        proposal = Proposal.decode(decoded(str(request.facts["proposal"])))
        approved = replace(proposal, operation=found.operation, approvals=found.approvals)
        with self.driving:
            if kind is Kind.ROSTER:
                self.coordinator.transact(approved)
            else:
                self.coordinator.act(approved)
        self.inbox.done(request.operation)
        return _facts(self.inbox.one(name)) | {"epoch": self.node.ledger.epoch}

    def approval_act(self, op: str, reason: str, replacement: Mapping[str, str] | None = None) -> Facts:
        """File the request for an act of officers with this site as survivor: `end` what is in doubt, or `replace` the other site.

        `replacement` is the new site's name, token serial and identity key. Raises SyncRefused where there is nothing to end.
        """
        roster = self.node.ledger.roster
        new = None if replacement is None else self._replaced(roster, replacement)
        return self._filed(self.coordinator.propose_act(Op(op), reason, new), roster)

    def _replaced(self, old: Roster, replacement: Mapping[str, str]) -> Roster:
        own = next(site for site in old.sites if site.name == self.node.name)
        try:
            key = SiteKey(replacement["site"], replacement["serial"], decoded(replacement["identity"]))
            return replace(old, epoch=old.epoch + 1, sites=tuple(sorted((own, key), key=lambda site: site.name)))
        except (KeyError, ValueError) as error:
            raise SyncRefused(f"this cannot be a roster: {error}") from error

    def _filed(self, proposal: Proposal, old: Roster) -> Facts:
        manifest = proposal.manifest
        facts = {"proposal": statement_fact(proposal)}
        if proposal.new_roster is not None:
            facts["old_roster"] = statement_fact(old)
        ends = self.node.parts.clock() + APPROVALS_LAST
        return _facts(self.inbox.one(self.inbox.request(f"sync.{manifest.op}", manifest.digest, facts, ends)))

    def _touched(self, request: Request) -> Facts:
        """The blast radius, counted at this site."""
        meaning = request.meaning()
        keys: dict[str, int] = {}
        store = KeyStore()
        with reading(self.node.parts.database) as transaction:
            for label in meaning.versions:
                try:
                    master = RingMaster.named(label)
                except ValueError:  # a record of another kind than a ring's
                    continue
                keys[label] = store.references(transaction, master.ring).get(master.version, 0)
            more = reached(transaction, request)
        sites = [self.node.name] if more or meaning.kind in _OF_ONE_SITE else list(self.node.ledger.roster.names)
        return {"touches": {"keys": keys, "voices": len(meaning.voices), "sites": sites, "reaches": more}}


def _facts(standing: Standing) -> Facts:
    operation = standing.request.operation
    return {
        "id": standing.id,
        "kind": operation.kind,
        "requester": operation.requester,
        "filed_at": standing.filed_at.isoformat(),
        "expires_at": operation.expires_at.isoformat(),
        "approved_by": list(standing.approved_by),
        "needed": standing.needed,
        "outcome": standing.outcome or ("expired" if standing.expired else "open"),
        "request": encoded(standing.request.encode()),
    }
