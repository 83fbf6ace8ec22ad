"""What certificates establish: the agreed roster and table, epoch by epoch. Pure, and the same code for sites and auditors.

Rules that a proposal must keep to follow a ledger:
- its epoch is the next one and its `previous` the ledger's head; only officers' acts skip an epoch that was left in doubt,
  and an adopted restore skips what was lost;
- the first transaction carries the roster itself, so that both HSMs and the officers sign what the cluster starts from;
- the table follows by `table.check_successor`; a new roster, and an officers' act, leave it as their rule says;
- what changes the roster or stands for an absent site carries M of N officers' approvals of this manifest, and what destroys
  versions their approval of exactly these.
A certificate also carries every site's signature on every phase, and each site's proof that the other holds the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from keyvault.states import KeyState
from keyvault.sync.errors import ApprovalMissing, CertificateInvalid, Conflict, ProofFailed, SyncRefused
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify
from keyvault.sync.statement import (
    DESTROY,
    PROVING,
    Answer,
    Ballot,
    Certificate,
    Endorsement,
    Manifest,
    Op,
    Phase,
    PhaseStatement,
    Proposal,
    Signed,
    answers_digest,
    destruction_subject,
    void_head,
)
from keyvault.sync.table import Record, Records, check_successor, check_table, new_records, with_sites
from keyvault.sync.wire import Statement

_TOGETHER = (Phase.PREPARE, Phase.COMMIT, Phase.ACKNOWLEDGE)


@dataclass(frozen=True)
class Ledger(Statement):
    """The agreed state after an epoch closed. `endorsed` is 1 once the roster itself went through a transaction.

    `marks` lists for ever what officers did without one of the sites.
    """

    DOMAIN = "hsm-sync/1/ledger"
    roster: Roster
    epoch: int
    head: bytes
    records: Records
    endorsed: int
    marks: tuple[str, ...]

    @classmethod
    def start(cls, roster: Roster) -> Ledger:
        """Before the first transaction: the roster, pinned by whoever starts here."""
        return cls(roster, 0, roster.digest, (), 0, ())

    def accept(self, certificate: Certificate, verify: Verify) -> Ledger:
        """The ledger after this certificate. Raises Conflict, SignatureInvalid, or the rule that does not hold."""
        proposal = certificate.proposal
        if proposal is None:
            return self._void(certificate.ballots, verify)
        self.check(proposal, verify)
        manifest = proposal.manifest
        phases = (Phase.OFFICERS,) if manifest.op.by_officers else _TOGETHER
        sites = (manifest.survivor,) if manifest.op.by_officers else self.roster.names
        wanted = [(phase, site) for phase in phases for site in sites]
        if len(certificate.endorsements) != len(wanted):
            raise CertificateInvalid(f"epoch {manifest.epoch} needs {len(wanted)} signed steps")
        for (phase, site), endorsement in zip(wanted, certificate.endorsements, strict=True):
            if endorsement.step.site != site:
                raise CertificateInvalid(f"epoch {manifest.epoch} lacks {site}'s {phase} in its place")
            self.check_endorsement(proposal, endorsement, phase, verify)
        marks = (*self.marks, f"{manifest.epoch} {manifest.op} by {site}: {manifest.reason}") if manifest.survivor else self.marks
        roster = proposal.new_roster or self.roster
        return Ledger(roster, manifest.epoch, manifest.digest, proposal.records, 1, marks)

    def check(self, proposal: Proposal, verify: Verify, now: datetime | None = None) -> None:
        """Whether this proposal may follow. `now` None leaves the approvals' expiry to those who saw them in time."""
        manifest = proposal.manifest
        if manifest.cluster != self.roster.cluster:
            raise SyncRefused("the manifest is another cluster's")
        if manifest.epoch not in self._next_epochs(manifest):
            raise Conflict(f"epoch {manifest.epoch} does not come next", self.epoch)
        if manifest.previous != self.head:
            raise Conflict("the manifest continues another history", self.epoch)
        roster = self._check_roster(proposal)
        self._check_records(proposal, roster)
        check_table(proposal.records, roster.names)
        self._check_approvals(proposal, verify, now)

    def proved(self, proposal: Proposal) -> tuple[str, ...]:
        """Versions that this proposal proves in both directions: new ones, and repaired ones that every site holds."""
        if self.roster.development or proposal.manifest.op.by_officers:
            return ()
        return tuple(record.name for record in proposal.records if record.name in self._to_prove(proposal))

    def check_endorsement(self, proposal: Proposal, endorsement: Endorsement, phase: Phase, verify: Verify) -> PhaseStatement:
        """One site's signed step for this proposal, with the other's answers.

        Raises SignatureInvalid, CertificateInvalid, ProofFailed.
        """
        step, manifest = endorsement.step, proposal.manifest
        step.check(self.roster, verify)
        said = PhaseStatement.decode(step.statement)
        about = (manifest.cluster, manifest.epoch, manifest.digest, step.site, manifest.root)
        if said != PhaseStatement(phase, *about, said.proofs):
            raise CertificateInvalid(f"{step.site} signed something else than {phase} of epoch {manifest.epoch}")
        answers = self.check_answers(proposal, phase, step.site, endorsement.answers, verify)
        if answers_digest(answers) != said.proofs:
            raise ProofFailed(f"{step.site}'s {phase} relies on other answers than those beside it")
        return said

    def check_answers(
        self, proposal: Proposal, phase: Phase, site: str, signed: tuple[Signed, ...], verify: Verify
    ) -> tuple[Answer, ...]:
        """The other site's answers on which `site` relies in this phase, one for each proved version, in order."""
        names = self.proved(proposal) if phase in PROVING else ()
        if len(signed) != len(names):
            raise ProofFailed(f"{site}'s {phase} needs {len(names)} answers")
        return tuple(self._answer(proposal, phase, site, name, one, verify) for name, one in zip(names, signed, strict=True))

    def direction(self, phase: Phase) -> tuple[str, str]:
        """(initiator, responder): from the first site to the second when preparing, the other way when acknowledging."""
        first, second = self.roster.names
        return (first, second) if phase is Phase.PREPARE else (second, first)

    def _answer(self, proposal: Proposal, phase: Phase, site: str, name: str, signed: Signed, verify: Verify) -> Answer:
        signed.check(self.roster, verify)
        answer = Answer.decode(signed.statement)
        canary, manifest = answer.canary, proposal.manifest
        about = (canary.phase, canary.cluster, canary.epoch, canary.manifest, canary.key)
        if (signed.site,) != self.roster.peers(site) or (canary.initiator, canary.responder) != self.direction(phase):
            raise ProofFailed(f"the proof of {name} does not run between the two sites as {phase} needs it")
        if about != (phase, manifest.cluster, manifest.epoch, manifest.digest, name):
            raise ProofFailed(f"the proof of {name} belongs to another key, phase or transaction")
        return answer

    def _next_epochs(self, manifest: Manifest) -> Iterable[int]:
        match manifest.op:
            case Op.END:
                return (self.epoch + 2,)
            case Op.REPLACE:
                return (self.epoch + (2 if manifest.ended else 1),)
            case Op.ADOPT:
                return range(self.epoch + 1, manifest.epoch + 1)
            case _:
                return (self.epoch + 1,)

    def _check_roster(self, proposal: Proposal) -> Roster:
        """The roster after the proposal."""
        manifest, new = proposal.manifest, proposal.new_roster
        if not self.endorsed:
            if manifest.op is not Op.ROSTER or new != self.roster:
                raise SyncRefused("the first transaction endorses the roster that the cluster starts from")
            return self.roster
        if manifest.op.by_officers:
            self.roster.public_key(manifest.survivor)
        if (new is not None) != (manifest.op in (Op.ROSTER, Op.REPLACE)):
            raise SyncRefused(f"a {manifest.op} transaction brings a new roster exactly if its purpose is that")
        if new is None:
            if manifest.roster != self.roster.digest:
                raise SyncRefused("the manifest names another roster")
            return self.roster
        if (new.cluster, new.epoch) != (self.roster.cluster, self.roster.epoch + 1):
            raise SyncRefused("a new roster continues the cluster and counts its epoch up by one")
        if manifest.survivor and manifest.survivor not in self._kept(new):
            raise SyncRefused("the surviving site must stay, with its key")
        return new

    def _kept(self, roster: Roster) -> tuple[str, ...]:
        return tuple(site.name for site in roster.sites if site in self.roster.sites)

    def _check_records(self, proposal: Proposal, roster: Roster) -> None:
        manifest, records = proposal.manifest, proposal.records
        if manifest.op in (Op.ROSTER, Op.REPLACE, Op.END):
            expected = with_sites(self.records, self._kept(roster), roster.names)
            if records != expected:
                raise SyncRefused(f"a {manifest.op} transaction changes no key beyond who holds it")
        check_successor(self.records, records, self._to_prove(proposal))
        new = new_records(self.records, records)
        if bool(new) != (manifest.op is Op.INSTALL):
            raise SyncRefused("new versions come by an install transaction, and only by one")
        if manifest.repairs and (manifest.op not in (Op.INSTALL, Op.REPAIR) or not set(manifest.repairs) <= _names(records)):
            raise SyncRefused("a repair names known versions, in a transaction for it")
        active = any(record.state in (KeyState.ACTIVE, KeyState.SUSPENDED) for record in records)
        if manifest.op is Op.ADOPT and active and not roster.development:
            raise SyncRefused("after an adopted restore no old version wraps: neither site has proved it since")

    def _to_prove(self, proposal: Proposal) -> frozenset[str]:
        manifest, sites = proposal.manifest, set(self.roster.names)
        repaired = {
            record.name
            for record in proposal.records
            if record.name in manifest.repairs and set(record.holders) == sites and record.state is not KeyState.DESTROYED
        }
        return frozenset(repaired | _names(new_records(self.records, proposal.records)))

    def _check_approvals(self, proposal: Proposal, verify: Verify, now: datetime | None) -> None:
        manifest, operation = proposal.manifest, proposal.operation
        before = {record.name for record in self.records if record.state is KeyState.DESTROYED}
        destroyed = _names(record for record in proposal.records if record.state is KeyState.DESTROYED) - before
        needed = bool(destroyed) or manifest.op is Op.ROSTER or manifest.op.by_officers
        if operation is None:
            if needed and self.roster.threshold:
                raise ApprovalMissing(f"a {manifest.op} transaction that does this needs the officers' approval")
            return
        wanted = (f"sync.{manifest.op}", manifest.digest)
        if destroyed and not manifest.op.by_officers:
            wanted = (DESTROY, destruction_subject(manifest.cluster, destroyed))
        if (operation.cluster, operation.kind, operation.subject) != (manifest.cluster, *wanted):
            raise SyncRefused("the officers approved another operation")
        self.roster.quorum.check(operation, proposal.approvals, verify, now)

    def _void(self, signed: tuple[Signed, ...], verify: Verify) -> Ledger:
        if tuple(ballot.site for ballot in signed) != self.roster.names:
            raise CertificateInvalid("an epoch is void by the ballot of every site")
        for one in signed:
            one.check(self.roster, verify)
        ballots = tuple(Ballot.decode(one.statement) for one in signed)
        epoch = self.epoch + 1
        for name, ballot in zip(self.roster.names, ballots, strict=True):
            if (ballot.cluster, ballot.site) != (self.roster.cluster, name):
                raise CertificateInvalid(f"{name} signed another site's ballot")
            if (ballot.epoch, ballot.previous) != (epoch, self.head):
                raise Conflict(f"the ballots of epoch {ballot.epoch} do not come next", self.epoch)
        votes = {ballot.manifest for ballot in ballots}
        if len(votes) == 1 and votes != {b""}:
            raise CertificateInvalid("every site voted for this transaction: it can only be finished")
        return Ledger(self.roster, epoch, void_head(self.head, epoch, ballots), self.records, self.endorsed, self.marks)


def _names(records: Iterable[Record]) -> set[str]:
    return {record.name for record in records}
