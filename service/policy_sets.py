"""Sets of policies at a site process: proposed, activated by officers' approval, listed; and where a worker finds the active one.

A request holds the set's exact bytes and those of the set that it follows, so that an officer's console can show, offline, what
changes. Each site activates for itself: the same signed request can be carried to the other site as a file, and holds there too,
because it names no site but the version and the set that it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from keyvault.approval_kinds import Kind, Request, explained, quorum_for
from keyvault.database import Database, Transaction
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import Hsm
from keyvault.inbox import Inbox
from keyvault.lifecycle import APPROVALS_LAST, Approved
from keyvault.records import RecordMac
from keyvault.sync.errors import ApprovalMissing, SyncRefused
from keyvault.sync.node import SiteNode
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import SiteState
from keyvault.sync.store import SyncStore, lasting
from keyvault.sync.verify import rosters
from policies.errors import PolicyError, PolicySetInvalid
from policies.sets.active import ActivePolicies, Checked, checked
from policies.sets.policy_set import PolicySet
from policies.sets.store import Activation, ActivationStore
from service.base64_text import decoded, encoded
from service.errors import PolicySetRefused
from service.officers import read_roster
from service.sync.arguments import Call

Facts = dict[str, Any]
REQUEST_HOURS = int(APPROVALS_LAST.total_seconds()) // 3600


def active_policies(hsm: Hsm, site: str, roster_file: Path) -> ActivePolicies:
    """What every process that decides asks for its engine."""
    store = SyncStore(RecordMac(hsm))
    return ActivePolicies(ActivationStore(RecordMac(hsm)), lambda tx: _rosters(store, tx, site, roster_file), verify_p256)


def _rosters(store: SyncStore, transaction: Transaction, site: str, roster_file: Path) -> Iterator[Roster]:
    first, state = read_roster(roster_file), store.state(transaction, site)
    yield SiteState.decode(state).ledger.roster if state else first
    yield from rosters(store.certificates(transaction), first)


@dataclass(frozen=True)
class Standing:
    """The set that decides at this site. `activation` is None while none was ever activated: the set that ships."""

    version: int
    policies: PolicySet
    activation: Checked | None = None


class ActiveSet:
    """The active set as it stands in this site's database, read and checked anew each time."""

    def __init__(self, hsm: Hsm, site: str, roster_file: Path) -> None:
        self.store = ActivationStore(RecordMac(hsm))
        self._sync, self._site, self._roster_file = SyncStore(RecordMac(hsm)), site, roster_file

    def standing(self, transaction: Transaction) -> Standing:
        """Raises PolicySetTampered, PolicySetInvalid."""
        version = self.store.newest(transaction)
        if version == 0:
            return Standing(0, PolicySet())
        found = self.checked(transaction, self.store.activation(transaction, version))
        return Standing(version, found.policies, found)

    def checked(self, transaction: Transaction, activation: Activation) -> Checked:
        """Raises PolicySetTampered, PolicySetInvalid."""
        return checked(activation, _rosters(self._sync, transaction, self._site, self._roster_file), verify_p256)


@dataclass(frozen=True)
class PolicyCommands:
    """The commands about sets of policies of one site process, as functions from JSON to JSON. Bytes travel as base64."""

    inbox: Inbox
    node: SiteNode
    active: ActiveSet

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        named = (self.policy_propose, self.policy_activate, self.policy_active, self.policy_activations)
        return {call.__name__: call for call in named}

    def policy_propose(self, policies: str, hours: int = REQUEST_HOURS) -> Facts:
        """Check a set and file the request to activate it after the one that is active; `request` is None for that one itself.

        Raises PolicySetRefused: it is recorded.
        """
        proposed = self._accepted(decoded(policies))
        with lasting(self._database) as transaction:
            before = self.active.standing(transaction)
        if proposed == before.policies:
            return _facts(before) | {"request": None, "needed": self._needed}
        facts: dict[str, str | int] = {
            "version": before.version + 1,
            "before": encoded(before.policies.encode()),
            "policies": policies,
        }
        subject = explained(Kind.POLICY, self._roster.cluster, facts).subject
        request = self.inbox.request(Kind.POLICY, subject, facts, self.node.parts.clock() + timedelta(hours=hours))
        return {"request": request, "version": before.version + 1, "set": proposed.digest.hex(), "needed": self._needed}

    def policy_activate(self, name: str) -> Facts:
        """Make the set of an approved request the active one: every decision from the commit on is made by it.

        Raises ApprovalMissing, SyncRefused for a request that follows another set, PolicySetRefused, RowChanged.
        """
        request = self.inbox.one(name).request
        if request.meaning().kind is not Kind.POLICY:
            raise SyncRefused("this request is about no set of policies")
        found = self.inbox.approved(Kind.POLICY, request.operation.subject, self.node.parts.clock())
        if found is None or found.operation is None:
            raise ApprovalMissing
        proposed = self._accepted(decoded(str(request.facts["policies"])))
        with lasting(self._database) as transaction:
            before = self.active.standing(transaction)
            if (before.version + 1, encoded(before.policies.encode())) != (request.facts["version"], request.facts["before"]):
                raise SyncRefused("the request follows another set than the active one: propose it again")
            activation = self._activation(before, proposed, found)
            self.active.store.activate(transaction, activation)
            by = self.active.checked(transaction, activation).approved_by
            facts: dict[str, str | int] = {"version": activation.version, "set": proposed.digest.hex(), "by": " ".join(by)}
            self._recorder.record(transaction, KeyEvent("policy.activated", facts))
        self.inbox.done(found.operation)
        return self.policy_active()

    def policy_active(self) -> Facts:
        """The set that decides here. Raises PolicySetTampered, PolicySetInvalid."""
        with lasting(self._database) as transaction:
            found = self.active.standing(transaction)
        return _facts(found) | {"policies": encoded(found.policies.encode()), "needed": self._needed}

    def policy_activations(self) -> Facts:
        """Every activation, oldest first, each checked: `code` says what does not hold."""
        listed = []
        with lasting(self._database) as transaction:
            newest = self.active.store.newest(transaction)
            for version in range(1, newest + 1):
                try:
                    activation = self.active.store.activation(transaction, version)
                    found = self.active.checked(transaction, activation)
                except PolicyError as error:
                    listed.append({"version": version, "code": error.code, "said": error.detail})
                else:
                    at = activation.activated_at.isoformat(timespec="seconds")
                    listed.append(_facts(Standing(version, found.policies, found)) | {"code": None, "activated_at": at})
        return {"newest": newest, "activations": listed}

    def _activation(self, before: Standing, proposed: PolicySet, found: Approved) -> Activation:
        assert found.operation is not None
        return Activation(
            version=before.version + 1,
            policies=proposed.encode(),
            before_sha256=before.policies.digest,
            operation=found.operation.encode(),
            approvals=tuple(one.encode() for one in found.approvals),
            roster=self._roster.encode(),
            activated_at=self.node.parts.clock(),
        )

    def _accepted(self, data: bytes) -> PolicySet:
        """The set, checked whole; one that does not hold is recorded, and nothing changes."""
        try:
            found = PolicySet.decode(data)
            found.check()
        except PolicySetInvalid as error:
            with lasting(self._database) as transaction:
                said: dict[str, str | int] = {"code": error.code, "said": (error.detail or "")[:500]}
                self._recorder.record(transaction, KeyEvent("policy.refused", said))
            raise PolicySetRefused(error.detail) from error
        return found

    @property
    def _database(self) -> Database:
        return self.node.parts.database

    @property
    def _recorder(self) -> Recorder:
        return self.node.parts.recorder

    @property
    def _roster(self) -> Roster:
        return self.node.ledger.roster

    @property
    def _needed(self) -> int:
        return quorum_for(Kind.POLICY, self._roster).threshold


def proposed_of(request: Request) -> tuple[PolicySet, PolicySet]:
    """The set that a request would end, and the one that it would activate. Raises PolicySetInvalid."""
    facts = request.facts
    return PolicySet.decode(decoded(str(facts["before"]))), PolicySet.decode(decoded(str(facts["policies"])))


def _facts(found: Standing) -> Facts:
    approved = found.activation
    return {
        "version": found.version,
        "set": found.policies.digest.hex(),
        "shipped": found.policies.shipped,
        "approved_by": list(approved.approved_by) if approved else [],
        "current_roster": approved.current if approved else True,
        "approved_roles": sorted(found.policies.approved_roles),
    }
