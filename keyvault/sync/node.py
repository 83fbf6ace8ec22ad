"""One site as others meet it: messages in, messages out, each step durable before its answer leaves.

The rules are `keyvault.sync.protocol`'s; here they get a token, a store and a clock. A node never calls another: a coordinator
carries the messages, and may be anybody's. Its own HSM's canary answers stay inside the node until the step that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Self

from keyvault.approvals import Approval, Operation
from keyvault.errors import KeyNotFound, RowChanged, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.states import KeyState
from keyvault.sync.durable import DurableSite, SiteParts
from keyvault.sync.errors import Conflict, KeyStillReferenced, ProofFailed, RotationTokenHolds, StatementMalformed
from keyvault.sync.ledger import Ledger
from keyvault.sync.protocol import Proof, Site, Step
from keyvault.sync.roster import Roster
from keyvault.sync.state import SiteState, missing
from keyvault.sync.statement import Answer, Manifest, Pending, Phase, Proposal, Signed, Status
from keyvault.sync.store import lasting, reading


class SiteNode:
    """One site. Made by `found`, `join`, `open` or `adopt`. Methods may be called from any thread.

    Every method that steps raises Conflict where another process of this site stepped first, SyncStoreUnavailable and
    HsmUnavailable where a step could not be made durable: it may be asked for again, and is done once.
    """

    def __init__(self, durable: DurableSite) -> None:
        self._durable = durable
        self._answers: dict[tuple[Phase, bytes], tuple[Answer, ...]] = {}

    @classmethod
    def found(cls, parts: SiteParts, roster: Roster) -> Self:
        """Begin a new cluster at this site. Raises TokenForeign, TokenRolledBack, Conflict where a state is there already."""
        durable = DurableSite(parts)
        durable.found(roster)
        return cls(durable)

    @classmethod
    def join(cls, parts: SiteParts, roster: Roster, certificates: Sequence[bytes]) -> Self:
        """Begin as a replacement, from the pinned first roster and every certificate since. Raises CertificateInvalid."""
        durable = DurableSite(parts)
        durable.join(roster, certificates)
        return cls(durable)

    @classmethod
    def open(cls, parts: SiteParts) -> Self:
        """Go on where this site stopped, at whatever step it died.

        Raises SiteUnfounded, TokenForeign, RecordTampered, StoreRolledBack, TokenRolledBack.
        """
        durable = DurableSite(parts)
        durable.load()
        return cls(durable)

    @classmethod
    def adopt(cls, parts: SiteParts, operation: Operation, approvals: Sequence[Approval]) -> Self:
        """Use a restored store or token that do not belong together, by M of N officers. Raises what `steps.adopt` raises."""
        durable = DurableSite(parts)
        durable.adopt(operation, approvals)
        return cls(durable)

    # --- what it is

    @property
    def name(self) -> str:
        return self._durable.parts.name

    @property
    def parts(self) -> SiteParts:
        return self._durable.parts

    @property
    def durable(self) -> DurableSite:
        """The store and rows of this site, for what is kept beside the protocol."""
        return self._durable

    @property
    def current(self) -> SiteState:
        """The state as it is durable now."""
        return self._durable.current().state

    @property
    def ledger(self) -> Ledger:
        """The agreed roster and table."""
        return self.current.ledger

    def held(self) -> dict[str, tuple[str, ...]]:
        """Every ring master in this site's token now, with the attributes that records describe."""
        return dict(self.parts.hsm.held())

    def lacking(self) -> tuple[str, ...]:
        """Agreed versions that this site should hold and whose object is not in its token, or has other attributes."""
        return missing(self.ledger.records, self.name, self.parts.hsm.held())

    def reported(self) -> dict[str, str]:
        """Versions that are closed here as compromised and have not been agreed so, with the reason."""
        with reading(self.parts.database) as transaction:
            return self._durable.reported(transaction)

    def heard_at(self) -> datetime | None:
        """When the other site's signed status was heard last."""
        with reading(self.parts.database) as transaction:
            heard = self._durable.store.heard(transaction)
        return heard[1] if heard else None

    def expect(self, master: RingMaster) -> None:
        """Enter a version as PRE_ACTIVE before officers bring it into the token, so that no start refuses it. Idempotent."""
        self._durable.expect(master)

    def discard(self, master: RingMaster) -> None:
        """Destroy a version that was announced here and came to nothing: no site agreed on it and no vote is open for it.

        Idempotent; the number stays used. Raises SyncRefused for an agreed version or one that is voted for.
        """
        self._durable.discard(master)

    def inspect(self) -> None:
        """Load again, compare store with anchor and table with token. Raises what `open` raises; quarantines what is missing."""
        self._durable.check()

    def distrust(self, names: Iterable[str]) -> None:
        """Quarantine versions at once: they open what they wrapped, and wrap nothing new."""
        self._durable.do(lambda site: site.distrust(names))

    def report(self, names: Sequence[str], reason: str) -> None:
        """Close compromised versions at this site at once, before the sites have agreed on it: quarantined, opening nothing."""
        self.distrust(names)
        self._durable.close_now(names, reason)

    # --- what the sites tell each other

    def state(self) -> bytes:
        """Everything this site knows, for a coordinator that goes on where another stopped. Nothing in it is secret."""
        return self.current.encode()

    def challenge(self) -> bytes:
        """A fresh nonce from the HSM."""
        return self._durable.challenge()

    def status(self, challenge: bytes) -> bytes:
        """This site's signed status, over what is in the token and its rows now."""
        with reading(self.parts.database) as transaction:
            scheduled = self._durable.rings.pending(transaction)
        pending = tuple(sorted((Pending(master.label, due) for master, due in scheduled.items()), key=lambda one: one.name))
        return self._durable.current().status(challenge, self.parts.hsm.held(), pending)

    def hear(self, status: bytes) -> None:
        """Take the other site's answer to our challenge, remember when it came, and what it means to destroy.

        Raises SitesDiverged, SyncRefused.
        """
        said = Status.decode(Signed.decode(status).statement)
        try:
            theirs = {RingMaster.named(one.name): one.due for one in said.pending}
        except ValueError as error:
            raise StatementMalformed(f"a status names what is no version: {error}") from error
        self._durable.do(lambda site: site.hear(status))
        try:
            with lasting(self.parts.database) as transaction:
                self._durable.store.keep_heard(transaction, status, self.parts.clock())
                self._durable.rings.hear_pending(transaction, said.site, theirs)
        except RowChanged as error:
            raise Conflict("another process of this site changed a version meanwhile", self.ledger.epoch) from error

    def certificates(self, after: int) -> tuple[bytes, ...]:
        """The certificates of the epochs above `after`, in order."""
        with reading(self.parts.database) as transaction:
            return tuple(self._durable.store.certificates(transaction, after))

    def accuse(self, evidence: bytes) -> None:
        """Freeze on proof that one HSM signed two histories."""
        self._durable.do(lambda site: site.accuse(evidence))

    # --- the same-key proof: the responder shows its answers first, so that nobody can repeat what he was shown

    def offer(self, phase: Phase, proposal: bytes, peer_nonce: bytes) -> tuple[bytes, ...]:
        """As initiator: a canary under each version to prove, wrapped. Raises KeyNotFound naming this site and the version."""
        proposed, blobs, answers = Proposal.decode(proposal), [], []
        site = self._proving(proposed)
        for name in site.state.ledger.proved(proposed):
            with self.parts.hsm.new_canary(RingMaster.named(name)) as canary:
                transcript = site.canary(phase, proposed.manifest, name, peer_nonce, sha256(canary.blob).digest())
                answers.append(Answer(transcript, canary.mac(transcript.encode())))
                blobs.append(canary.blob)
        self._keep(phase, proposed.manifest, answers)
        return tuple(blobs)

    def answer(self, phase: Phase, proposal: bytes, peer_nonce: bytes, blobs: Sequence[bytes]) -> tuple[bytes, ...]:
        """As responder: this HSM's signed answers to the other's canaries. Raises ProofFailed where it holds another key."""
        proposed, answers = Proposal.decode(proposal), []
        site = self._proving(proposed)
        names = site.state.ledger.proved(proposed)
        if len(names) != len(blobs):
            raise ProofFailed(f"{len(names)} versions are to be proved, and {len(blobs)} canaries came")
        for name, blob in zip(names, blobs, strict=True):
            transcript = site.canary(phase, proposed.manifest, name, peer_nonce, sha256(blob).digest())
            try:
                with self.parts.hsm.open_canary(RingMaster.named(name), blob) as canary:
                    answers.append(Answer(transcript, canary.mac(transcript.encode())))
            except UnwrapRejected as error:
                raise ProofFailed(f"the sites hold different keys as {name}: site {self.name} can't open the other's") from error
        self._keep(phase, proposed.manifest, answers)
        return tuple(site.answer(answer) for answer in answers)

    def reveal(self, phase: Phase, proposal: bytes, theirs: Sequence[bytes]) -> tuple[bytes, ...]:
        """As initiator, once the responder has answered the same: this HSM's signed answers. Raises ProofFailed."""
        manifest = Proposal.decode(proposal).manifest
        mine = self._answers.get((phase, manifest.digest), ())
        if [Answer.decode(Signed.decode(one).statement) for one in theirs] != list(mine):
            raise ProofFailed("the sites hold different keys, or the proof was begun again meanwhile")
        site = self._durable.current()
        return tuple(site.answer(answer) for answer in mine)

    # --- the three phases

    def prepare(self, proposal: bytes, answers: Sequence[bytes]) -> bytes:
        """This site's vote. `answers` are the other site's, one for each version to prove.

        Raises KeyStillReferenced where a key of this site still lies under a version that would be destroyed,
        RotationTokenHolds where only one of its tokens would lose it, and what `Site.prepare` raises.
        """
        proposed = Proposal.decode(proposal)
        held, now = self.parts.hsm.held(), self.parts.clock()
        proofs = self._proofs(Phase.PREPARE, proposed.manifest, answers)

        def vote(site: Site) -> Step:
            if site.state.vote is None:
                self._require_unreferenced(site.state, proposed)
            return site.prepare(proposal, proofs, held, now)

        return self._durable.do(vote)

    def commit(self, prepares: Sequence[bytes]) -> bytes:
        """Take the commit certificate. Raises what `Site.commit` raises."""
        return self._durable.do(lambda site: site.commit(prepares))

    def acknowledge(self, commits: Sequence[bytes], answers: Sequence[bytes]) -> bytes:
        """The token read again, the proof the other way, the anchor closed. Raises what `Site.acknowledge` raises."""
        held, vote = self.parts.hsm.held(), self.current.vote
        proofs = self._proofs(Phase.ACKNOWLEDGE, vote.proposal.manifest, answers) if vote else []
        return self._durable.do(lambda site: site.acknowledge(commits, proofs, held))

    def accept(self, certificate: bytes) -> None:
        """Close an epoch by its certificate. Raises Conflict if it does not come next."""
        self._durable.do(lambda site: site.accept(certificate))

    def withdraw(self) -> bytes:
        """This site's ballot for the next epoch."""
        return self._durable.do(lambda site: site.withdraw())

    def act(self, proposal: bytes) -> bytes:
        """An act of officers with this site as survivor; the certificate, closed here already."""
        held, now = self.parts.hsm.held(), self.parts.clock()
        return self._durable.do(lambda site: site.act(proposal, held, now))

    # --- what they share

    def _proving(self, proposal: Proposal) -> Site:
        """The site, its token serving every version that is to be proved. Raises KeyNotFound."""
        site = self._durable.current()
        wanted = {name: RingMaster.named(name) for name in site.state.ledger.proved(proposal)}
        held = self.parts.hsm.held()
        for name in wanted:
            if name not in held:
                raise KeyNotFound(f"site {self.name}'s token does not hold {name}")
        if set(wanted.values()) - set(self.parts.hsm.masters()):
            self._durable.serve(wanted.values())
        return site

    def _keep(self, phase: Phase, manifest: Manifest, answers: Iterable[Answer]) -> None:
        self._answers = {(phase, manifest.digest): tuple(answers)}

    def _proofs(self, phase: Phase, manifest: Manifest, answers: Sequence[bytes]) -> list[Proof]:
        """This site's own answers beside the other's; where they do not pair up, the protocol finds that one is missing."""
        mine = self._answers.get((phase, manifest.digest), ())
        return [Proof(own, Signed.decode(peer)) for own, peer in zip(mine, answers, strict=False)]

    def _require_unreferenced(self, state: SiteState, proposal: Proposal) -> None:
        destroyed = {record.name for record in state.ledger.records if record.state is KeyState.DESTROYED}
        with reading(self.parts.database) as transaction:
            for record in proposal.records:
                if record.state is KeyState.DESTROYED and record.name not in destroyed:
                    master = RingMaster.named(record.name)
                    count = self._durable.keys.references(transaction, master.ring).get(master.version, 0)
                    if count:
                        raise KeyStillReferenced(f"{count} keys at site {self.name} are still wrapped under {record.name}")
                    if self.parts.rotation_holds(master):
                        raise RotationTokenHolds(f"the rotation token of site {self.name} still holds {record.name}")
