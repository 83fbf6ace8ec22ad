"""The exact statements that the sites' HSMs sign, and the bundles that carry them. No rules beyond each one's own form.

A transaction closes exactly one epoch: completed (Prepare, Commit and Acknowledge of every site), void (the sites' ballots
differ, so no commit certificate can exist), or closed by officers with one site, which its manifest says for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from uuid import UUID

from keyvault.approvals import Approval, Operation
from keyvault.records import canonical
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.table import Records, merkle_root, table_root
from keyvault.sync.wire import Statement, is_digest, require

NONCE = 32


class Op(StrEnum):
    """What a transaction is for. The last three are acts of M of N officers with one surviving site."""

    ROSTER = "roster"
    INSTALL = "install"
    STATE = "state"
    REPAIR = "repair"
    END = "end"
    REPLACE = "replace"
    ADOPT = "adopt"

    @property
    def by_officers(self) -> bool:
        return self in (Op.END, Op.REPLACE, Op.ADOPT)


class Phase(StrEnum):
    """The steps that each site signs; OFFICERS is the one step of an act by officers."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ACKNOWLEDGE = "acknowledge"
    OFFICERS = "officers"


PROVING = (Phase.PREPARE, Phase.ACKNOWLEDGE)
"""Phases with a same-key proof: from the first site to the second, then the other way."""


@dataclass(frozen=True)
class Manifest(Statement):
    """One transaction. `previous` is the head of the epoch before; `root` and `count` describe the whole table after it.

    `repairs` names versions whose quarantine this transaction ends. A change of states may say its `reason`. An act of officers
    must, and names the surviving site, and in `ended` the digest of the transaction in doubt (or of the lost history's head)
    that it ends.
    """

    DOMAIN = "hsm-sync/1/manifest"
    cluster: str
    epoch: int
    previous: bytes
    transaction: UUID
    op: Op
    roster: bytes
    root: bytes
    count: int
    repairs: tuple[str, ...] = ()
    survivor: str = ""
    ended: bytes = b""
    reason: str = ""

    def __post_init__(self) -> None:
        require(self.epoch > 0, "epochs count from 1")
        require(all(is_digest(value) for value in (self.previous, self.roster, self.root)), "a digest has 32 bytes")
        require(is_digest(self.ended, empty=True), "a digest has 32 bytes")
        require(list(self.repairs) == sorted(set(self.repairs)), "repairs are sorted, each once")
        acts = self.op.by_officers
        require(acts == bool(self.survivor), "acts of officers name a survivor, others do not")
        require(bool(self.reason) or not acts, "an act of officers names a reason")
        require(not self.reason or acts or self.op is Op.STATE, "only acts of officers and changes of states name a reason")
        require(not (self.repairs and acts) and (acts or not self.ended), "an act ends and does not repair")


@dataclass(frozen=True)
class Proposal(Statement):
    """A manifest and all it stands for: the whole table, a new roster if it brings one, and the officers' approvals.

    `operation` approves this manifest (kind `sync.OP`, subject its digest); one that destroys versions approves them by their
    labels (`destruction_subject`).
    """

    DOMAIN = "hsm-sync/1/proposal"
    manifest: Manifest
    records: Records
    new_roster: Roster | None = None
    operation: Operation | None = None
    approvals: tuple[Approval, ...] = ()

    def __post_init__(self) -> None:
        require(self.manifest.count == len(self.records), "the count is the number of records")
        require(self.manifest.root == table_root(self.records), "the root is the root of the records")
        require(
            self.new_roster is None or self.new_roster.digest == self.manifest.roster, "the roster is the one the manifest names"
        )
        require(self.operation is not None or not self.approvals, "approvals approve an operation")


@dataclass(frozen=True)
class Signed(Statement):
    """A statement's bytes and one site's signature over them."""

    DOMAIN = "hsm-sync/1/signed"
    site: str
    statement: bytes
    signature: bytes

    @classmethod
    def make(cls, site: str, statement: Statement, sign: Sign) -> Signed:
        data = statement.encode()
        return cls(site, data, sign(data))

    def check(self, roster: Roster, verify: Verify) -> None:
        """Raises SignatureInvalid unless the site that this names signed exactly these bytes."""
        verify(roster.public_key(self.site), self.statement, self.signature)


@dataclass(frozen=True)
class PhaseStatement(Statement):
    """One site's step. `root` is the table's root; in Acknowledge, this site's word that it read every object again and found
    it so, but for those in quarantine that the transaction leaves there.

    `proofs` is the digest of the canary answers that this site compared with its own (empty where nothing was proved).
    """

    DOMAIN = "hsm-sync/1/phase"
    phase: Phase
    cluster: str
    epoch: int
    manifest: bytes
    site: str
    root: bytes
    proofs: bytes

    def __post_init__(self) -> None:
        require(is_digest(self.manifest) and is_digest(self.root), "a digest has 32 bytes")
        require(is_digest(self.proofs, empty=True), "a digest has 32 bytes")


@dataclass(frozen=True)
class Canary(Statement):
    """What the same-key proof's CMAC covers. The initiator wraps a random session key under its copy of the master; the
    responder unwraps it with its own; equal CMACs show the same master. Both nonces make it fresh for both."""

    DOMAIN = "hsm-sync/1/canary"
    phase: Phase
    cluster: str
    epoch: int
    manifest: bytes
    key: str
    initiator: str
    responder: str
    initiator_nonce: bytes
    responder_nonce: bytes
    blob_sha256: bytes

    def __post_init__(self) -> None:
        require(self.phase in PROVING and self.initiator != self.responder, "a proof runs from one site to the other")
        require(len(self.initiator_nonce) == len(self.responder_nonce) == NONCE, "a nonce has 32 bytes")
        require(is_digest(self.manifest) and is_digest(self.blob_sha256), "a digest has 32 bytes")


@dataclass(frozen=True)
class Answer(Statement):
    """The CMAC (16 bytes) that one site's HSM computed over a canary transcript; signed when sent to the other site."""

    DOMAIN = "hsm-sync/1/answer"
    canary: Canary
    tag: bytes

    def __post_init__(self) -> None:
        require(len(self.tag) == 16, "a CMAC has 16 bytes")


@dataclass(frozen=True)
class Endorsement(Statement):
    """A site's signed step with the other site's signed answers that it relied on: checkable by anybody."""

    DOMAIN = "hsm-sync/1/endorsement"
    step: Signed
    answers: tuple[Signed, ...] = ()


@dataclass(frozen=True)
class Ballot(Statement):
    """For which manifest this site voted at an epoch; empty promises that it never will."""

    DOMAIN = "hsm-sync/1/ballot"
    cluster: str
    epoch: int
    previous: bytes
    site: str
    manifest: bytes

    def __post_init__(self) -> None:
        require(self.epoch > 0 and is_digest(self.previous), "a ballot continues a history")
        require(is_digest(self.manifest, empty=True), "a digest has 32 bytes")


@dataclass(frozen=True)
class Pending(Statement):
    """A version, by its label, whose destruction a site has scheduled, and when it is due there."""

    DOMAIN = "hsm-sync/1/pending"
    name: str
    due: datetime


@dataclass(frozen=True)
class Status(Statement):
    """Where a site stands: closed epoch and head, open vote (digest or empty), table root, quarantine, and every destruction
    that it has scheduled. `challenge` is the asker's nonce, so an old status can't be played back."""

    DOMAIN = "hsm-sync/1/status"
    cluster: str
    site: str
    epoch: int
    head: bytes
    vote: bytes
    root: bytes
    count: int
    quarantined: tuple[str, ...]
    frozen: int
    challenge: bytes
    pending: tuple[Pending, ...] = ()

    def __post_init__(self) -> None:
        names = [one.name for one in self.pending]
        require(names == sorted(set(names)), "pending destructions are sorted by name, each once")
        require(is_digest(self.head) and is_digest(self.root), "a digest has 32 bytes")
        require(is_digest(self.vote, empty=True) and len(self.challenge) == NONCE, "a challenge has 32 bytes")


@dataclass(frozen=True)
class Evidence(Statement):
    """Two statements that one honest HSM cannot both have signed."""

    DOMAIN = "hsm-sync/1/evidence"
    first: Signed
    second: Signed


@dataclass(frozen=True)
class Certificate(Statement):
    """What closes an epoch, whole: a completed or officers' transaction, or the ballots that show it void."""

    DOMAIN = "hsm-sync/1/certificate"
    proposal: Proposal | None
    endorsements: tuple[Endorsement, ...] = ()
    ballots: tuple[Signed, ...] = ()

    def __post_init__(self) -> None:
        require((self.proposal is None) == (not self.endorsements) == bool(self.ballots), "an epoch is closed or void")

    @property
    def epoch(self) -> int:
        """The epoch that it closes. Raises StatementMalformed if a ballot is none."""
        return self.proposal.manifest.epoch if self.proposal else Ballot.decode(self.ballots[0].statement).epoch

    @property
    def head(self) -> bytes:
        """The head that the epoch gets. Raises StatementMalformed if a ballot is none."""
        if self.proposal:
            return self.proposal.manifest.digest
        ballots = tuple(Ballot.decode(signed.statement) for signed in self.ballots)
        return void_head(ballots[0].previous, ballots[0].epoch, ballots)


@dataclass(frozen=True)
class DekRecord(Statement):
    """One voice's wrapped key in a batch: which key, under which master, and the SHA-256 of its blob."""

    DOMAIN = "hsm-sync/1/dek"
    dek_id: UUID
    version: int
    ring: str
    ring_version: int
    blob_sha256: bytes

    def __post_init__(self) -> None:
        require(is_digest(self.blob_sha256) and self.version > 0 and self.ring_version > 0, "a blob has a digest and versions")


@dataclass(frozen=True)
class Receipt(Statement):
    """A site's word that a batch is durable in its own store and that it opened every blob with a canary check."""

    DOMAIN = "hsm-sync/1/receipt"
    cluster: str
    site: str
    batch: UUID
    epoch: int
    root: bytes
    count: int

    def __post_init__(self) -> None:
        require(is_digest(self.root) and self.count > 0, "a batch has a root and at least one key")


def void_head(previous: bytes, epoch: int, ballots: tuple[Ballot, ...]) -> bytes:
    """The head of an epoch that was closed void: the same whoever assembles it, for signatures are not part of it."""
    return _Void(epoch, previous, ballots).digest


@dataclass(frozen=True)
class _Void(Statement):
    DOMAIN = "hsm-sync/1/void"
    epoch: int
    previous: bytes
    ballots: tuple[Ballot, ...]


DESTROY = "keys.destroy"
"""The kind of operation that officers approve before a master version is destroyed."""


def destruction_subject(cluster: str, labels: Iterable[str]) -> bytes:
    """What the approval of a destruction is about: the cluster and the versions by their labels, whatever the epoch then is.

    Destroyed is the end and a number is never used again, so an old approval can destroy nothing else, and a delay voids none.
    """
    return sha256(canonical(DESTROY, cluster, *sorted(set(labels)))).digest()


def answers_digest(answers: tuple[Answer, ...]) -> bytes:
    """What a step says about its proofs: SHA-256 over the answers in the table's order; empty if there are none."""
    return sha256(b"".join(answer.encode() for answer in answers)).digest() if answers else b""


def batch_root(records: tuple[DekRecord, ...]) -> bytes:
    """RFC 6962 root over a batch, sorted by (key id, version), each once. Raises ValueError for another order."""
    order = [(record.dek_id, record.version) for record in records]
    require(bool(order) and order == sorted(set(order)), "a batch is sorted by key id and version, each once")
    return merkle_root([record.encode() for record in records])
