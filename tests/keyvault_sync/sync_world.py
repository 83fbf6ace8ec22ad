"""Two sites in memory: tokens with real AES key wrap, CMAC and P-256, stores whose every write can be the last one.

Nothing here decides anything: what to make durable and what to answer comes from `keyvault.sync` alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import uuid4

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.cmac import CMAC
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from keyvault.approvals import Approval, Officer, Operation, signed_by
from keyvault.states import KeyState
from keyvault.sync import steps
from keyvault.sync.ledger import Ledger
from keyvault.sync.protocol import Proof, Site, Step
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import (
    NO_ANCHOR,
    AdvanceAnchor,
    Anchor,
    ChangeState,
    Discard,
    Effect,
    FileCertificate,
    InstallPreActive,
    RecordEvidence,
    SaveState,
    SiteState,
)
from keyvault.sync.statement import (
    DESTROY,
    Answer,
    Canary,
    Certificate,
    Endorsement,
    Manifest,
    Op,
    Phase,
    Proposal,
    Signed,
    destruction_subject,
)
from keyvault.sync.table import Record, Records, table_root

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
ATTRIBUTES = ("EXTRACTABLE=0", "TRUSTED=1")
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Signer:
    """A P-256 key pair that signs as the HSM door promises: raw r | s, low s."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.public = self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def __call__(self, data: bytes) -> bytes:
        r, s = decode_dss_signature(self._key.sign(data, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + min(s, _ORDER - s).to_bytes(32, "big")


PEOPLE = {name: Signer() for name in ("ada", "bo", "cy", "di")}
SITES = {name: Signer() for name in ("a", "b", "c")}


def make_roster(names: str = "ab", epoch: int = 1, threshold: int = 2) -> Roster:
    officers = tuple(Officer(name, (signer.public,)) for name, signer in sorted(PEOPLE.items()))
    sites = tuple(SiteKey(name, f"serial-{name}", SITES[name].public) for name in names)
    return Roster("cluster-1", epoch, sites, officers, threshold)


def approve(
    kind: str, subject: bytes, people: Iterable[str] = ("bo", "cy"), requester: str = "ada", hours: int = 1
) -> tuple[Operation, tuple[Approval, ...]]:
    operation = Operation("cluster-1", kind, subject, requester, os.urandom(16), NOW + timedelta(hours=hours))
    signed = [signed_by(operation, requester, "request", PEOPLE[requester])]
    signed += [signed_by(operation, person, "approve", PEOPLE[person]) for person in people]
    return operation, tuple(signed)


def record(version: int, state: KeyState = KeyState.ACTIVE, holders: str = "ab", key_id: str = "ring/main") -> Record:
    return Record(key_id, version, state, "AES-256", ATTRIBUTES, tuple(holders))


def propose(
    ledger: Ledger,
    op: Op,
    records: Records | None = None,
    new_roster: Roster | None = None,
    *,
    approved: bool | None = None,
    **fields: object,
) -> Proposal:
    """A proposal that follows `ledger`; approved by two officers where that is usual, or as told."""
    rows = ledger.records if records is None else tuple(sorted(records, key=lambda row: (row.key_id, row.version)))
    values: dict[str, object] = {
        "cluster": ledger.roster.cluster,
        "epoch": ledger.epoch + 1,
        "previous": ledger.head,
        "transaction": uuid4(),
        "op": op,
        "roster": (new_roster or ledger.roster).digest,
        "root": table_root(rows),
        "count": len(rows),
    }
    manifest = Manifest(**{**values, **fields})  # type: ignore[arg-type]
    gone = {row.name for row in ledger.records if row.state is KeyState.DESTROYED}
    destroyed = {row.name for row in rows if row.state is KeyState.DESTROYED} - gone
    if approved is None:
        approved = op is Op.ROSTER or op.by_officers or bool(destroyed)
    about = (f"sync.{op}", manifest.digest)
    if destroyed and not op.by_officers:
        about = (DESTROY, destruction_subject(ledger.roster.cluster, destroyed))
    operation, approvals = approve(*about) if approved else (None, ())
    return Proposal(manifest, rows, new_roster, operation, approvals)


def rotation(ledger: Ledger, version: int, key_id: str = "ring/main") -> Proposal:
    """Install `version` as the active one of its ring; the active one before it goes on opening."""
    rows = []
    for row in ledger.records:
        ends = row.key_id == key_id and row.state is KeyState.ACTIVE
        rows.append(record(row.version, KeyState.DEACTIVATED, "".join(row.holders), key_id) if ends else row)
    return propose(ledger, Op.INSTALL, (*rows, record(version, key_id=key_id, holders="".join(ledger.roster.names))))


class Crashed(Exception):
    """The process died here."""


@dataclass
class Token:
    """What lies in one HSM: masters by name, and anchor objects."""

    keys: dict[str, bytes] = field(default_factory=dict)
    anchors: list[Anchor] = field(default_factory=list)

    @property
    def anchor(self) -> Anchor:
        return max(self.anchors, key=lambda anchor: anchor.rank, default=NO_ANCHOR)

    def held(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(self.keys, ATTRIBUTES)

    def wrap_canary(self, name: str) -> tuple[bytes, bytes]:
        secret = os.urandom(32)
        return secret, aes_key_wrap(self.keys[name], secret)

    def unwrap_canary(self, name: str, blob: bytes) -> bytes:
        """The session key, or a key nobody else has where the token refuses: its MAC then equals no other."""
        try:
            return aes_key_unwrap(self.keys[name], blob)
        except InvalidUnwrap:
            return os.urandom(32)


def mac(secret: bytes, canary: Canary) -> bytes:
    cmac = CMAC(AES(secret))
    cmac.update(canary.encode())
    return cmac.finalize()


@dataclass
class Store:
    """What lies in one site's database."""

    state: bytes = b""
    certificates: dict[int, bytes] = field(default_factory=dict)
    versions: dict[str, KeyState] = field(default_factory=dict)
    evidence: list[bytes] = field(default_factory=list)


class Node:
    """One site: its token and store survive a crash, its `site` does not."""

    def __init__(self, name: str, roster: Roster, join: list[bytes] | None = None) -> None:
        self.name, self.roster = name, roster
        self.token, self.store = Token(), Store()
        self.site: Site | None = None
        self.fuse: int | None = None
        """How many more durable writes happen before the process dies; None for ever."""
        if join is None:
            change = steps.found(roster, name, self.token.anchor)
        else:
            change = steps.join(roster, name, join, self.token.anchor, verify_p256)
        self._begin(change)

    @property
    def state(self) -> SiteState:
        assert self.site is not None, "the process is down"
        return self.site.state

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    def start(self) -> None:
        self.site = None
        self._begin(steps.load(self.store.state, self.token.anchor))
        self.do(lambda site: site.inspect(self.token.held()))

    def adopt(self, approved: tuple[Operation, tuple[Approval, ...]] | None = None) -> None:
        self.site = None
        data, anchor = self.store.state, self.token.anchor
        operation, approvals = approved or approve(steps.ADOPT, steps.adoption_subject(data, anchor))
        self._begin(steps.adopt(data, anchor, operation, approvals, verify_p256, NOW))
        self.do(lambda site: site.inspect(self.token.held()))

    def do(self, method: Callable[[Site], Step]) -> bytes:
        """Take one step: effects, then the new site, then the reply. Dies between two writes when the fuse burns down."""
        assert self.site is not None, "the process is down"
        step = method(self.site)
        self._apply(step.effects)
        self.site = step.site
        return step.reply

    def challenge(self) -> bytes:
        assert self.site is not None, "the process is down"
        self.site = self.site.challenge(os.urandom(32))
        return self.site.nonce

    def snapshot(self) -> tuple[Store, Token]:
        return copy.deepcopy(self.store), copy.deepcopy(self.token)

    def _begin(self, change: steps.Change) -> None:
        state, effects = change
        self._apply(effects)
        self.site = Site(state, SITES[self.name], verify_p256)

    def _apply(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if self.fuse is not None:
                if self.fuse == 0:
                    self.site, self.fuse = None, None
                    raise Crashed
                self.fuse -= 1
            self._write(effect)
        if self.fuse == 0 and effects:  # after the last write, before the reply
            self.site, self.fuse = None, None
            raise Crashed

    def _write(self, effect: Effect) -> None:
        match effect:
            case InstallPreActive(name):
                assert name in self.token.keys
                self.store.versions[name] = KeyState.PRE_ACTIVATION
            case SaveState(state, replaces):
                assert replaces == (sha256(self.store.state).digest() if self.store.state else b"")
                self.store.state = state
            case FileCertificate(epoch, certificate):
                self.store.certificates[epoch] = certificate
            case RecordEvidence(_, evidence):
                self.store.evidence.append(evidence)
            case AdvanceAnchor(anchor):
                self.token.anchors = [*self.token.anchors, anchor][-2:]
            case ChangeState(name, state):
                self.store.versions[name] = state
                if state is KeyState.DESTROYED:
                    self.token.keys.pop(name, None)
            case Discard(name):
                self.store.versions.pop(name, None)
                self.token.keys.pop(name, None)


def ceremony(nodes: Iterable[Node], name: str = "ring/main/1") -> None:
    """The officers bring one master into every token."""
    key = os.urandom(32)
    for node in nodes:
        node.token.keys.setdefault(name, key)


def meet(one: Node, other: Node) -> None:
    """Each hears the other's fresh status."""
    for listener, speaker in ((one, other), (other, one)):
        challenge = listener.challenge()
        assert speaker.site is not None
        status = speaker.site.status(challenge, speaker.token.held())
        listener.do(lambda site, status=status: site.hear(status))


def prove(proposal: Proposal, phase: Phase, nodes: list[Node]) -> dict[str, list[Proof]]:
    """Run the canaries that this phase needs; both sites' proofs, by site name."""
    names = nodes[0].ledger.proved(proposal)
    proofs: dict[str, list[Proof]] = {node.name: [] for node in nodes}
    if not names:
        return proofs
    by_name = {node.name: node for node in nodes}
    nonces = {node.name: node.challenge() for node in nodes}
    initiator, responder = (by_name[name] for name in nodes[0].ledger.direction(phase))
    for name in names:
        secret, blob = initiator.token.wrap_canary(name)
        assert initiator.site is not None
        assert responder.site is not None
        canary = initiator.site.canary(phase, proposal.manifest, name, nonces[responder.name], sha256(blob).digest())
        answers = {
            initiator.name: Answer(canary, mac(secret, canary)),
            responder.name: Answer(canary, mac(responder.token.unwrap_canary(name, blob), canary)),
        }
        signed = {node.name: Signed.decode(node.site.answer(answers[node.name])) for node in nodes if node.site}
        for node, peer in ((initiator, responder), (responder, initiator)):
            proofs[node.name].append(Proof(answers[node.name], signed[peer.name]))
    return proofs


def certificate(proposal: Proposal, steps_by_phase: dict[Phase, dict[str, bytes]], names: Iterable[str]) -> bytes:
    ordered = tuple(
        Endorsement.decode(steps_by_phase[phase][name])
        for phase in (Phase.PREPARE, Phase.COMMIT, Phase.ACKNOWLEDGE)
        for name in names
    )
    return Certificate(proposal, ordered).encode()


def run(proposal: Proposal, nodes: list[Node]) -> bytes:
    """Drive one transaction to its end without faults; returns its certificate."""
    if len(nodes) == 2:
        meet(*nodes)
    data, taken = proposal.encode(), {}
    proofs = prove(proposal, Phase.PREPARE, nodes)
    taken[Phase.PREPARE] = {
        node.name: node.do(lambda site, node=node: site.prepare(data, proofs[node.name], node.token.held(), NOW)) for node in nodes
    }
    prepares = list(taken[Phase.PREPARE].values())
    taken[Phase.COMMIT] = {node.name: node.do(lambda site: site.commit(prepares)) for node in nodes}
    commits = list(taken[Phase.COMMIT].values())
    closing = prove(proposal, Phase.ACKNOWLEDGE, nodes)
    taken[Phase.ACKNOWLEDGE] = {
        node.name: node.do(lambda site, node=node: site.acknowledge(commits, closing[node.name], node.token.held()))
        for node in nodes
    }
    done = certificate(proposal, taken, [node.name for node in nodes])
    for node in nodes:
        node.do(lambda site: site.accept(done))
    return done


def found_pair() -> tuple[Node, Node]:
    """Two sites whose roster is endorsed, at epoch 1, with ring/main/1 active at epoch 2."""
    a, b = pair_without_masters()
    ceremony([a, b])
    run(rotation(a.ledger, 1), [a, b])
    return a, b


def pair_without_masters() -> tuple[Node, Node]:
    roster = make_roster()
    a, b = Node("a", roster), Node("b", roster)
    run(propose(a.ledger, Op.ROSTER, new_roster=roster), [a, b])
    return a, b


def history(node: Node) -> list[bytes]:
    return [node.store.certificates[epoch] for epoch in sorted(node.store.certificates)]
