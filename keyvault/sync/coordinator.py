"""Drives both sites through what officers ask for, and goes on wherever anything stopped.

A coordinator decides nothing and keeps nothing: it carries signed messages between its own node and the other site, in the
order that the protocol wants, and finds out from both sites' states what is left to do. It may die anywhere, another one may
be alive at the other site, and the same call may be made again. With one site it is the same code without the other.

- exchange: both hear each other; a site that lacks certificates is handed them in order; then they compare at one epoch.
- transact: exchange, same-key proof, Prepare of both (in the roster's order, so that two coordinators meet at the first
  site), Commit, the proof the other way, Acknowledge, the certificate to both. A refusal after a vote makes the epoch void.
- resume: finish what any site voted for, or void it where no certificate can come to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from keyvault.approvals import Approval, Operation
from keyvault.errors import HsmUnavailable, KeyNotFound, KeyVaultError
from keyvault.hsm import RingMaster
from keyvault.states import KeyState
from keyvault.sync.errors import (
    Conflict,
    PeerUnavailable,
    PeerUnheard,
    ProofFailed,
    SiteBehind,
    SitesDiverged,
    SyncRefused,
    SyncStoreUnavailable,
)
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import Peer
from keyvault.sync.proposals import act_proposal, kept, proposal_after, retired
from keyvault.sync.roster import Roster
from keyvault.sync.state import SiteState, Vote, require_fresh
from keyvault.sync.statement import Certificate, Endorsement, Op, Phase, Proposal, Signed, Status
from keyvault.sync.table import Record

ALGORITHM = "AES-256"
_PASSING = (Conflict, HsmUnavailable, PeerUnavailable, PeerUnheard, ProofFailed, SiteBehind, SyncStoreUnavailable)
"""Refusals that the same message may not meet again: they make no epoch void."""


@dataclass(frozen=True)
class Exchange:
    """What an exchange found: both epochs, what this site holds in quarantine, and how many certificates went over.

    `peer` is None in a one-site roster.
    """

    epoch: int
    peer: Status | None
    quarantined: tuple[str, ...]
    handed: int = 0
    taken: int = 0


class Coordinator:
    """One site's driver. `peer` is None only for a one-site roster. Methods raise what either site refuses, by its own code,
    and PeerUnavailable; all of them may be called again."""

    def __init__(self, node: SiteNode, peer: Peer | None, clock: Callable[[], datetime]) -> None:
        self.node, self._peer, self._clock = node, peer, clock

    # --- what officers ask for

    def propose(
        self,
        op: Op,
        records: Iterable[Record] | None = None,
        new_roster: Roster | None = None,
        *,
        repairs: Iterable[str] = (),
        reason: str = "",
    ) -> Proposal:
        """A transaction that follows this site's table, for officers to approve (`sync.OP` over the manifest) and `transact`."""
        return proposal_after(self.node.ledger, op, records, new_roster, repairs=repairs, reason=reason)

    def endorse_roster(self, approve: Callable[[Proposal], Proposal]) -> bytes:
        """The first transaction: both HSMs sign what the cluster starts from. `approve` adds the officers' approvals.

        Does nothing where it was done. Returns the certificate.
        """
        self.resume()
        ledger = self.node.ledger
        if ledger.endorsed:
            return self.node.certificates(0)[0]
        return self.transact(approve(self.propose(Op.ROSTER, new_roster=ledger.roster)))

    def install(self, masters: Sequence[RingMaster]) -> bytes:
        """Let masters that a ceremony brought into both tokens become their rings' active versions; those before only open.

        Until both sites have proved them they stay PRE_ACTIVE here and the old ones serve. Raises KeyNotFound naming the site
        that lacks one, ProofFailed where the sites hold different keys.
        """
        held, ledger = self.node.held(), self.node.ledger
        new = []
        for master in masters:
            if master.label not in held:
                raise KeyNotFound(f"site {self.node.name}'s token does not hold {master.label}")
            self.node.expect(master)
            about = (f"ring/{master.ring}", master.version, KeyState.ACTIVE, ALGORITHM, held[master.label])
            new.append(Record(*about, ledger.roster.names))
        rings = {record.key_id for record in new}
        return self.transact(self.propose(Op.INSTALL, (*(retired(record, rings) for record in ledger.records), *new)))

    def change_states(
        self,
        states: Mapping[str, KeyState],
        reason: str,
        operation: Operation | None = None,
        approvals: Sequence[Approval] = (),
    ) -> bytes:
        """Bring versions, by label, into these states at both sites. Destroying takes approvals of `keys.destroy`.

        What is compromised is closed at this site at once, whatever the other says; `resume` brings the agreement later.
        Raises KeyNotFound, KeyStillReferenced, ApprovalMissing. Returns the certificate.
        """
        records = self.node.ledger.records
        if unknown := set(states) - {record.name for record in records}:
            raise KeyNotFound(f"{min(unknown)} is no agreed version")
        rows = tuple(replace(record, state=states.get(record.name, record.state)) for record in records)
        if compromised := [name for name, state in states.items() if state is KeyState.COMPROMISED]:
            self.node.report(compromised, reason)
        proposed = self.propose(Op.STATE, rows, reason=reason)
        return self.transact(replace(proposed, operation=operation, approvals=tuple(approvals)))

    def repair(self, names: Iterable[str]) -> bytes:
        """End the quarantine of versions: proved again where every site holds them, else kept by who does and for opening only.

        Raises KeyNotFound for a name that is no agreed version, ProofFailed where the sites hold different keys.
        """
        self.exchange()
        repaired, ledger = set(names), self.node.ledger
        if unknown := repaired - {record.name for record in ledger.records}:
            raise KeyNotFound(f"{min(unknown)} is no agreed version")
        lacking = {name: set(side.lacking()) for name, side in self._sides().items()}
        rows = [kept(record, lacking) if record.name in repaired else record for record in ledger.records]
        return self.transact(self.propose(Op.REPAIR, rows, repairs=repaired))

    def propose_act(self, op: Op, reason: str, new_roster: Roster | None = None) -> Proposal:
        """What officers approve to end a transaction in doubt (END), replace a dead site (REPLACE) or adopt a restored store for
        good (ADOPT), with this site as survivor. It stays marked for ever. Raises SyncRefused where there is nothing to end."""
        return act_proposal(self.node.current, op, reason, new_roster, self.node.held())

    def act(self, proposal: Proposal) -> bytes:
        """Carry an approved act out here; the other site gets its certificate at the next exchange. Returns the certificate."""
        return self.node.act(proposal.encode())

    # --- what runs by itself

    def exchange(self) -> Exchange:
        """Compare store, anchor and token; then both sites hear each other, level their epochs, and quarantine what differs.

        Raises what `SiteNode.open` raises for this site, SitesDiverged for another history (frozen where a signature proves
        who signed both), PeerUnavailable.
        """
        self.node.inspect()
        if self._peer is None and self.node.ledger.roster.development:
            return Exchange(self.node.ledger.epoch, None, self.node.current.quarantined)
        peer = self._other()
        theirs = self._meet(peer)
        handed = taken = 0
        mine = self.node.ledger.epoch
        if theirs.epoch < mine:
            for certificate in self.node.certificates(theirs.epoch):
                peer.accept(certificate)
                handed += 1
        elif theirs.epoch > mine:
            for certificate in peer.certificates(mine):
                self.node.accept(certificate)
                taken += 1
        if taken:
            self.node.inspect()
        if handed or taken:
            theirs = self._meet(peer)
        return Exchange(self.node.ledger.epoch, theirs, self.node.current.quarantined, handed, taken)

    def resume(self) -> Exchange:
        """Finish what a site voted for, or void it where it can't be finished; bring reported compromises to agreement.

        Idempotent; nothing is decided by time. Returns the exchange that it began with.
        """
        found = self.exchange()
        states = [SiteState.decode(side.state()) for side in self._sides().values()]
        votes = {state.vote.proposal.manifest.digest: state.vote.proposal for state in states if state.vote}
        if len(votes) == 1:
            self.transact(next(iter(votes.values())))
        elif votes or any(state.withdrawn or state.recovering for state in states):
            self.void()
        if reported := self.node.reported():
            self.change_states(dict.fromkeys(reported, KeyState.COMPROMISED), "; ".join(sorted(set(reported.values()))))
        return found

    def age(self) -> float | None:
        """Seconds since the other site's signed status was heard last, by any process of this site; None for never."""
        heard = self.node.heard_at()
        return None if heard is None else (self._clock() - heard).total_seconds()

    def require_fresh(self, limit_s: float, *, break_glass: bool = False) -> None:
        """Raises StaleEpoch where the other site was not heard for longer than `limit_s`. With one site nothing gets stale."""
        if not self.node.ledger.roster.development:
            require_fresh(self.age(), limit_s, break_glass=break_glass)

    # --- one transaction

    def transact(self, proposal: Proposal) -> bytes:
        """Carry a proposal through at both sites, from wherever each of them is. Returns the certificate.

        Raises the refusal of whichever site has one; where the other had voted already, the epoch is closed void first, so
        that the next transaction does not wait.
        """
        self.exchange()
        state = self.node.current
        if state.last and state.ledger.head == proposal.manifest.digest:
            return state.last.encode()
        sides = self._sides()
        prepares = self._prepare(proposal, sides)
        commits = [side.commit(prepares) for side in sides.values()]
        answers: Mapping[str, tuple[bytes, ...]] = {}
        if not all(vote.acknowledge for vote in self._votes(sides, proposal)):
            answers = self._prove(Phase.ACKNOWLEDGE, proposal, sides)
        acknowledged = [side.acknowledge(commits, answers.get(name, ())) for name, side in sides.items()]
        steps = (*prepares, *commits, *acknowledged)
        certificate = Certificate(proposal, tuple(Endorsement.decode(step) for step in steps)).encode()
        self._close(certificate)
        return certificate

    def void(self) -> bytes:
        """Close the next epoch void, by both sites' ballots. Raises CertificateInvalid where every site voted for one and the
        same transaction: that can only be finished, or ended by officers. Returns the certificate."""
        ballots = tuple(Signed.decode(side.withdraw()) for side in self._sides().values())
        certificate = Certificate(None, ballots=ballots).encode()
        self._close(certificate)
        return certificate

    def _prepare(self, proposal: Proposal, sides: Mapping[str, Peer]) -> list[bytes]:
        data = proposal.encode()
        answers: Mapping[str, tuple[bytes, ...]] = {}
        try:
            if len(self._votes(sides, proposal)) < len(sides):
                answers = self._prove(Phase.PREPARE, proposal, sides)
            return [side.prepare(data, answers.get(name, ())) for name, side in sides.items()]
        except _PASSING:
            raise
        except KeyVaultError as refusal:
            if self._votes(sides, proposal):
                self._give_up(refusal)
            raise

    def _give_up(self, refusal: KeyVaultError) -> None:
        """One site voted and the other never will: the officer hears why, and the epoch does not stay open."""
        try:
            self.void()
        except KeyVaultError as problem:
            raise refusal from problem

    def _prove(self, phase: Phase, proposal: Proposal, sides: Mapping[str, Peer]) -> Mapping[str, tuple[bytes, ...]]:
        """Run the canaries of this phase; what each site gets to see of the other's answers, by its name."""
        ledger = self.node.ledger
        if not ledger.proved(proposal):
            return {}
        data = proposal.encode()
        first, second = ledger.direction(phase)
        nonces = {name: side.challenge() for name, side in sides.items()}
        blobs = sides[first].offer(phase, data, nonces[second])
        theirs = sides[second].answer(phase, data, nonces[first], blobs)
        mine = sides[first].reveal(phase, data, theirs)
        return {first: theirs, second: mine}

    def _close(self, certificate: bytes) -> None:
        """Whoever does not hear of it now is handed the certificate at the next exchange."""
        self.node.accept(certificate)
        if self._peer is not None:
            try:
                self._peer.accept(certificate)
            except PeerUnavailable:
                return

    def _meet(self, peer: Peer) -> Status:
        """Each hears the other's fresh status."""
        theirs = peer.status(self.node.challenge())
        status = Status.decode(Signed.decode(theirs).statement)
        try:
            self.node.hear(theirs)
        except SitesDiverged:
            self._look_for_proof(peer)
            raise
        if status.frozen and not self.node.current.evidence:
            for evidence in SiteState.decode(peer.state()).evidence:
                self.node.accuse(evidence.encode())
        # After what was just heard, so that the other site learns of a quarantine in the same exchange.
        peer.hear(self.node.status(peer.challenge()))
        return status

    def _look_for_proof(self, peer: Peer) -> None:
        """Two histories: the other's certificate shows whether one HSM signed both, and then this site freezes."""
        for certificate in peer.certificates(self.node.ledger.epoch - 1)[:1]:
            try:
                self.node.accept(certificate)
            except Conflict:
                return

    def _sides(self) -> dict[str, Peer]:
        """Every site of the roster, in its order. Raises PeerUnavailable where one has no way to it."""
        near: dict[str, Peer] = {self.node.name: self.node}
        if self._peer is not None:
            near[self._peer.name] = self._peer
        names = self.node.ledger.roster.names
        if missing := set(names) - near.keys():
            raise PeerUnavailable(f"no way to site {min(missing)} is set up here")
        return {name: near[name] for name in names}

    def _other(self) -> Peer:
        sides = self._sides()
        others = [side for name, side in sides.items() if name != self.node.name]
        if not others:
            raise SyncRefused("the roster names no other site")
        return others[0]

    @staticmethod
    def _votes(sides: Mapping[str, Peer], proposal: Proposal) -> list[Vote]:
        """The votes for this proposal, of the sites that gave theirs."""
        votes = (SiteState.decode(side.state()).vote for side in sides.values())
        return [vote for vote in votes if vote and vote.proposal.manifest == proposal.manifest]
