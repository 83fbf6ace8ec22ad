"""One site's side of hsm-sync/1: Prepare, Commit, Acknowledge. Pure: no I/O, no clock, no randomness of its own.

A method checks a message and returns a `Step`: the effects that must be durable, in their order, before the reply leaves,
and the site after them. A step that is not carried through leaves the site as it was; the same message may come again at
any time and gets the same answer. Whoever drives two sites may crash anywhere, and two drivers may be alive at once.

- Prepare is a promise: for one manifest an epoch, after fresh proof that the other site stands at the same epoch and holds
  the same key. A site that voted can't abort alone. Timeouts decide nothing: in doubt, new versions stay PRE_ACTIVE and
  the old ones serve.
- Both Prepares are the commit certificate: anyone who holds it can finish.
- Acknowledge comes after both Commits, the table read again from the token, and the proof in the other direction.
- Only a certificate with every site's signature on every phase changes the ledger, so only then is a version ACTIVE.
- An epoch is void only by both sites' ballots, if they show that no commit certificate can exist.
- A site that meets two histories signed by one HSM freezes. Officers, M of N with one site, may end what is in doubt,
  replace a dead site, or adopt a restored store; it stays marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from keyvault.sync import checks, steps
from keyvault.sync import evidence as contradictions
from keyvault.sync.errors import (
    Conflict,
    KeyQuarantined,
    ProofFailed,
    SitesDiverged,
    StoreRolledBack,
    SyncRefused,
)
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.state import (
    CLOSED,
    VOTED,
    Anchor,
    Effect,
    Held,
    InstallPreActive,
    SiteState,
    Vote,
    held_root,
    missing,
)
from keyvault.sync.statement import (
    NONCE,
    Answer,
    Ballot,
    Canary,
    Certificate,
    Endorsement,
    Evidence,
    Manifest,
    Op,
    Pending,
    Phase,
    PhaseStatement,
    Proposal,
    Signed,
    Status,
    answers_digest,
)
from keyvault.sync.table import new_records


@dataclass(frozen=True)
class Proof:
    """A canary's outcome at this site: the answer that its own HSM computed, and the other site's signed one."""

    own: Answer
    peer: Signed


@dataclass(frozen=True)
class Step:
    """Make `effects` durable in order, then go on with `site`, then send `reply`."""

    site: Site
    effects: tuple[Effect, ...] = ()
    reply: bytes = b""


@dataclass(frozen=True)
class Site:
    """A site in one process. `nonce` and `heard` live only as long as the process; everything else is in `state`."""

    state: SiteState
    sign: Sign = field(repr=False)
    verify: Verify = field(repr=False)
    nonce: bytes = b""
    heard: Status | None = None

    # --- what the sites tell each other

    def challenge(self, nonce: bytes) -> Site:
        """Take 32 fresh random bytes from the HSM. The next status heard, and the next proof, must contain them."""
        if len(nonce) != NONCE:
            raise ValueError("a challenge has 32 bytes")
        return replace(self, nonce=nonce)

    def status(self, challenge: bytes, held: Held, pending: tuple[Pending, ...] = ()) -> bytes:
        """This site's signed status, for whoever sent `challenge`, over what was just read from the token and the rows."""
        state = self.state
        absent = tuple(sorted({*state.quarantined, *missing(state.ledger.records, state.site, held)}))
        root, count = held_root(state.ledger.records, state.site, absent)
        vote = state.vote.proposal.manifest.digest if state.vote else b""
        ledger = state.ledger
        at = (ledger.roster.cluster, state.site, ledger.epoch, ledger.head, vote)
        return self._signed(Status(*at, root, count, absent, int(bool(state.evidence)), challenge, pending)).encode()

    def hear(self, message: bytes) -> Step:
        """The other site's status, in answer to our challenge. Quarantines what it lacks or describes otherwise.

        Raises SignatureInvalid, SyncRefused for an old status, SitesDiverged for another history that proves nothing.
        """
        signed = self._from_peer(message)
        status = Status.decode(signed.statement)
        ledger = self.state.ledger
        if (
            status.site != signed.site
            or status.cluster != ledger.roster.cluster
            or status.challenge != self.nonce
            or not self.nonce
        ):
            raise SyncRefused("the status does not answer our challenge")
        if accusation := contradictions.find([*contradictions.statements(self.state.last), signed]):
            return self._step(steps.frozen(self.state, accusation, self.verify))
        site = replace(self, nonce=b"", heard=status)
        if status.epoch != ledger.epoch:
            return Step(site)
        if status.head != ledger.head:
            raise SitesDiverged(f"both sites closed epoch {ledger.epoch}, each in its own way")
        lacking = set(status.quarantined)
        if (status.root, status.count) != held_root(ledger.records, status.site, status.quarantined):
            lacking = {record.name for record in ledger.records if status.site in record.holders}
        return site._step(steps.quarantined(self.state, lacking))

    def inspect(self, held: Held) -> Step:
        """Compare the table with what was just read from the token; quarantine what is missing or has changed."""
        return self._step(steps.quarantined(self.state, missing(self.state.ledger.records, self.state.site, held)))

    def distrust(self, names: Iterable[str]) -> Step:
        """Quarantine versions whose same-key proof failed outside a transaction."""
        return self._step(steps.quarantined(self.state, names))

    # --- the same-key proof

    def canary(self, phase: Phase, manifest: Manifest, key: str, peer_nonce: bytes, blob_sha256: bytes) -> Canary:
        """The transcript for both HSMs to MAC, with this site's nonce and the other's."""
        initiator, responder = self.state.ledger.direction(phase)
        mine, theirs = self.nonce, peer_nonce
        first, second = (mine, theirs) if initiator == self.state.site else (theirs, mine)
        about = (phase, manifest.cluster, manifest.epoch, manifest.digest, key)
        return Canary(*about, initiator, responder, first, second, blob_sha256)

    def answer(self, answer: Answer) -> bytes:
        """This site's signed answer: only to a transcript that carries our present nonce. Raises ProofFailed."""
        self._require_own_nonce(answer.canary)
        return self._signed(answer).encode()

    # --- the three phases

    def prepare(self, proposal: bytes, proofs: Sequence[Proof], held: Held, now: datetime) -> Step:
        """Vote for a transaction. Raises Conflict if another came first, and whatever rule does not hold.

        Durable before the reply: the versions PRE_ACTIVE, the vote, the anchor.
        """
        checks.require_able(self.state)
        proposed = Proposal.decode(proposal)
        manifest, state = proposed.manifest, self.state
        if state.vote:
            if state.vote.proposal.manifest != manifest:
                raise Conflict("this site voted for another transaction", state.ledger.epoch)
            return Step(self, reply=state.vote.prepare.encode())
        checks.require_votable(state, self.heard, manifest)
        if manifest.op.by_officers:
            raise SyncRefused("an act of officers is not voted on")
        state.ledger.check(proposed, self.verify, now)
        new = new_records(state.ledger.records, proposed.records)
        checks.require_unburned(state, new)
        checks.require_held(state, proposed, held)
        endorsement = self._endorse(proposed, Phase.PREPARE, proofs)
        saved = replace(state, vote=Vote(proposed, endorsement), recovering=None)
        anchor = Anchor(manifest.epoch, VOTED, manifest.digest)
        step = self._step(steps.saved(state, saved, anchor), endorsement.encode())
        return replace(step, effects=(*(InstallPreActive(record.name) for record in new), *step.effects))

    def commit(self, prepares: Sequence[bytes]) -> Step:
        """Take the commit certificate, every site's Prepare: from here on the transaction can only be finished.

        Raises Conflict if it is not what this site voted for. Durable before the reply: the certificate.
        """
        checks.require_able(self.state)
        endorsements = tuple(Endorsement.decode(message) for message in prepares)
        if frozen := self._contradiction(endorsement.step for endorsement in endorsements):
            return self._step(steps.frozen(self.state, frozen, self.verify))
        vote = self._vote(endorsements)
        checked = self._phase_of_all(vote.proposal, Phase.PREPARE, endorsements)
        if vote.commit:
            return Step(self, reply=vote.commit.encode())
        endorsement = self._endorse(vote.proposal, Phase.COMMIT, ())
        saved = replace(self.state, vote=replace(vote, prepares=checked, commit=endorsement))
        return self._step(steps.saved(self.state, saved), endorsement.encode())

    def acknowledge(self, commits: Sequence[bytes], proofs: Sequence[Proof], held: Held) -> Step:
        """After every site's Commit: the objects read again, the proof the other way, the anchor closed at this epoch.

        Durable before the reply: the acknowledgement, the anchor. Raises KeyQuarantined naming what is not there.
        """
        checks.require_able(self.state)
        endorsements = tuple(Endorsement.decode(message) for message in commits)
        vote = self._vote(endorsements)
        if vote.commit is None:
            raise SyncRefused("this site has not seen the commit certificate yet")
        checked = self._phase_of_all(vote.proposal, Phase.COMMIT, endorsements)
        if vote.acknowledge:
            return Step(self, reply=vote.acknowledge.encode())
        checks.require_held(self.state, vote.proposal, held)
        endorsement = self._endorse(vote.proposal, Phase.ACKNOWLEDGE, proofs)
        manifest = vote.proposal.manifest
        saved = replace(self.state, vote=replace(vote, commits=checked, acknowledge=endorsement))
        anchor = Anchor(manifest.epoch, CLOSED, manifest.digest)
        return self._step(steps.saved(self.state, saved, anchor), endorsement.encode())

    def accept(self, certificate: bytes) -> Step:
        """Close an epoch by its whole certificate, from whoever hands it over; also how a site catches up, in order.

        Durable: the certificate, the ledger after it, the anchor; then the states of versions follow. Freezes on a
        certificate that contradicts what is held. Raises Conflict if it does not come next.
        """
        given = Certificate.decode(certificate)
        if given.head == self.state.ledger.head:
            return Step(self)
        if frozen := self._contradiction(contradictions.statements(given)):
            return self._step(steps.frozen(self.state, frozen, self.verify))
        return self._step(steps.closed(self.state, given, self.verify))

    # --- ways out of doubt

    def withdraw(self) -> Step:
        """This site's ballot for the next epoch: what it voted for, or the promise never to vote at it."""
        checks.require_able(self.state)
        state, ledger = self.state, self.state.ledger
        epoch = ledger.epoch + 1
        voted = state.vote.proposal.manifest.digest if state.vote else b""
        if state.recovering:
            if state.recovering.rank != (epoch, VOTED):
                raise StoreRolledBack("this site must catch up with its anchor first")
            voted = state.recovering.head
        ballot = self._signed(Ballot(ledger.roster.cluster, epoch, ledger.head, state.site, voted)).encode()
        if voted or state.withdrawn == epoch:
            return Step(self, reply=ballot)
        return self._step(steps.saved(state, replace(state, withdrawn=epoch), Anchor(epoch, VOTED, b"")), ballot)

    def accuse(self, evidence: bytes) -> Step:
        """Freeze on proof that one HSM signed two histories. Raises CertificateInvalid if it proves nothing."""
        return self._step(steps.frozen(self.state, Evidence.decode(evidence), self.verify))

    def act(self, proposal: bytes, held: Held, now: datetime) -> Step:
        """With this site as survivor, officers end a transaction in doubt, replace the other site, or adopt a store.

        The reply is the certificate, closed here already. Raises SyncRefused, ApprovalMissing, ApprovalExpired.
        """
        proposed = Proposal.decode(proposal)
        manifest, state = proposed.manifest, self.state
        if not manifest.op.by_officers or manifest.survivor != state.site:
            raise SyncRefused("this is no act of officers with this site")
        if state.last and state.ledger.head == manifest.digest:
            return Step(self, reply=state.last.encode())
        state.ledger.check(proposed, self.verify, now)
        checks.check_ended(state, manifest)
        if manifest.op is Op.ADOPT and (gone := missing(proposed.records, state.site, held)):
            raise KeyQuarantined(f"{gone[0]} is not in the token; adopt it as destroyed or held elsewhere")
        step = self._signed(self._phase(proposed, Phase.OFFICERS, ()))
        certificate = Certificate(proposed, (Endorsement(step),))
        return self._step(steps.closed(state, certificate, self.verify), certificate.encode())

    # --- what the steps share

    def _step(self, change: steps.Change, reply: bytes = b"") -> Step:
        state, effects = change
        return Step(replace(self, state=state), effects, reply)

    def _contradiction(self, given: Iterable[Signed]) -> Evidence | None:
        """Whether `given` contradicts what this site itself signed, or what it holds of the other."""
        state = self.state
        held = [*contradictions.statements(state.last)]
        if vote := state.vote:
            steps_taken = (vote.prepare, vote.commit, vote.acknowledge, *vote.prepares, *vote.commits)
            held += [endorsement.step for endorsement in steps_taken if endorsement]
        if state.withdrawn:
            ledger = state.ledger
            held.append(self._signed(Ballot(ledger.roster.cluster, state.withdrawn, ledger.head, state.site, b"")))
        return contradictions.find([*held, *given])

    def _signed(self, statement: Status | Answer | Ballot | PhaseStatement) -> Signed:
        return Signed.make(self.state.site, statement, self.sign)

    def _from_peer(self, message: bytes) -> Signed:
        signed = Signed.decode(message)
        if signed.site not in self.state.ledger.roster.peers(self.state.site):
            raise SyncRefused(f"{signed.site!r} is not the other site")
        signed.check(self.state.ledger.roster, self.verify)
        return signed

    def _phase(self, proposal: Proposal, phase: Phase, answers: tuple[Answer, ...]) -> PhaseStatement:
        manifest = proposal.manifest
        about = (manifest.cluster, manifest.epoch, manifest.digest, self.state.site, manifest.root)
        return PhaseStatement(phase, *about, answers_digest(answers))

    def _endorse(self, proposal: Proposal, phase: Phase, proofs: Sequence[Proof]) -> Endorsement:
        signed = tuple(proof.peer for proof in proofs)
        answers = self.state.ledger.check_answers(proposal, phase, self.state.site, signed, self.verify)
        for proof, answer in zip(proofs, answers, strict=True):
            self._require_own_nonce(proof.own.canary)
            if proof.own != answer:
                raise ProofFailed(f"the sites hold different keys as {answer.canary.key}")
        return Endorsement(self._signed(self._phase(proposal, phase, answers)), signed)

    def _require_own_nonce(self, canary: Canary) -> None:
        nonces = {canary.initiator: canary.initiator_nonce, canary.responder: canary.responder_nonce}
        if not self.nonce or nonces.get(self.state.site) != self.nonce:
            raise ProofFailed("the proof does not carry this site's fresh nonce")

    def _phase_of_all(self, proposal: Proposal, phase: Phase, given: tuple[Endorsement, ...]) -> tuple[Endorsement, ...]:
        by_site = {endorsement.step.site: endorsement for endorsement in given}
        names = self.state.ledger.roster.names
        if set(by_site) != set(names):
            raise SyncRefused(f"{phase} of every site is needed: {', '.join(names)}")
        for endorsement in by_site.values():
            self.state.ledger.check_endorsement(proposal, endorsement, phase, self.verify)
        return tuple(by_site[name] for name in names)

    def _vote(self, given: tuple[Endorsement, ...]) -> Vote:
        wanted = {PhaseStatement.decode(endorsement.step.statement).manifest for endorsement in given}
        vote = self.state.vote
        if vote is None or wanted != {vote.proposal.manifest.digest}:
            raise Conflict("this site did not vote for that transaction", self.state.ledger.epoch)
        return vote
