"""A site's log checkpoints, co-signed by the other site's HSM: a log that shows two histories is noticed while it is small.

The log's site sends its newest checkpoint with the hashes of the complete subtrees since the last one that the other co-signed
(RFC 9162, section 2.1): appended to the tree that the other remembers, they must give the signed root. Then that site signs,
and remembers. What does not continue is refused and kept. Nothing here is recorded in the logs but forks and beginnings: an
entry for each co-signature would make both logs grow for ever.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.hsm import KeyName
from keyvault.records import RecordMac
from keyvault.sync.errors import ApprovalInvalid, CheckpointRefused, LogForked, LogShortened, StatementMalformed
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import WitnessPeer
from keyvault.sync.roster import Roster
from keyvault.sync.store import lasting, reading, snapshot
from keyvault.sync.wire import DIGEST, Statement, require
from policies.audit import store as log_store
from policies.audit.verify import (
    Checkpoint,
    Cosigner,
    Frontier,
    VerifierKey,
    check_checkpoint,
    check_cosignature,
    cosigned_text,
    leaf_hash,
    parse_checkpoint,
    parse_key,
    subtrees,
)
from policies.witness.store import Witnessed, WitnessStore

MOST_LOGS, MOST_NOTE = 64, 1 << 15
"""Logs of one site, each by a key of its own, and characters of a note: a site that was taken over fills no disk of the other."""
MOST_REFUSED = 16
"""Forks of one log that are kept: two signed ends prove it, and more prove nothing more."""


@dataclass(frozen=True)
class Offer(Statement):
    """A checkpoint to be co-signed: the log's first key, the signed note, and the subtrees from `start` to its size."""

    DOMAIN = "audit-cosigning/1/offer"
    key: str
    note: str
    start: int
    hashes: tuple[bytes, ...]

    def __post_init__(self) -> None:
        require(all(len(one) == DIGEST for one in self.hashes), "a hash has 32 bytes")


def cosigner_of(roster: Roster, site: str) -> Cosigner:
    """A site's identity key as auditors pin it."""
    return Cosigner(f"site-{site}.{roster.cluster}", roster.public_key(site)[-65:])  # the point at the end of the DER


class Witness:
    """One site as the other's witness. Methods may be called from any thread."""

    def __init__(self, node: SiteNode) -> None:
        self._node, self._parts = node, node.parts
        self._store = WitnessStore(RecordMac(node.parts.hsm))

    @property
    def name(self) -> str:
        """The site that co-signs."""
        return self._node.name

    def witnessed(self, log: str) -> int:
        """The size up to which this site co-signed the log of this fingerprint; 0 for a log that is new here."""
        with reading(self._parts.database) as transaction:
            last = self._store.newest(transaction, log)
        return 0 if last is None else last.size

    def cosign(self, offer: bytes) -> str:
        """This site's signature over the checkpoint, as a line of its note, once it is remembered. Idempotent.

        Raises CheckpointRefused, LogShortened, and LogForked where it does not continue what was co-signed before: then both
        ends are kept. Raises RecordTampered, HsmUnavailable, SyncStoreUnavailable: nothing was signed.
        """
        given = Offer.decode(offer)
        key, head = _checked(given)
        with lasting(self._parts.database) as transaction:
            self._store.hold(transaction)
            last = self._store.newest(transaction, key.fingerprint)
            if last is None and len(self._store.logs(transaction)) >= MOST_LOGS:
                raise CheckpointRefused(f"{MOST_LOGS} logs of other keys were co-signed here, and this would be one more")
            tree = _continued(given, head, last)
            if tree is not None:
                return self._signed(transaction, given.note, key, tree, last)
            self._keep(transaction, given, key, head, last)
        assert last is not None
        raise LogForked(f"{head.size} entries of {key.name} do not continue the {last.size} that site {self._node.name} co-signed")

    def begin_anew(self, log: str, operation: bytes, reason: str) -> None:
        """Forget how far this log was co-signed: officers let it go on from another end. What was seen stays; recorded.

        Raises ApprovalInvalid for an `operation` (its digest) that did this before.
        """
        with lasting(self._parts.database) as transaction:
            self._store.hold(transaction)
            if self._store.is_marked(transaction, log, operation):
                raise ApprovalInvalid("this request was carried out here before")
            self._store.add(transaction, Witnessed(log, 0, "", "", operation, self._parts.clock()))
            facts: dict[str, str | int] = {"log": log, "operation": operation.hex(), "reason": reason}
            self._parts.recorder.record(transaction, KeyEvent("log.witnessed_anew", facts))

    def _signed(self, transaction: Transaction, note: str, key: VerifierKey, tree: Frontier, last: Witnessed | None) -> str:
        if last is not None and last.note == note:
            return last.line
        moment, own = self._parts.clock(), cosigner_of(self._node.ledger.roster, self._node.name)
        at = int(moment.timestamp())
        signature = self._parts.hsm.sign(KeyName.SITE_IDENTITY, cosigned_text(at, parse_checkpoint(note)[1]))
        line = f"— {own.name} {base64.b64encode(own.id + at.to_bytes(8, 'big') + signature).decode()}"
        row = Witnessed(key.fingerprint, tree.size, note, line, b"".join(tree.edge), moment)
        if last is None:
            facts: dict[str, str | int] = {"log": key.fingerprint, "origin": key.name, "size": tree.size}
            self._parts.recorder.record(transaction, KeyEvent("log.witnessed", facts))
        self._store.add(transaction, row)
        return line

    def _keep(self, transaction: Transaction, given: Offer, key: VerifierKey, head: Checkpoint, last: Witnessed | None) -> None:
        """Both ends as evidence, once, and on record."""
        known = [row for row in self._store.refused(transaction) if row.log == key.fingerprint]
        if len(known) >= MOST_REFUSED or any(row.note == given.note for row in known):
            return
        row = Witnessed(key.fingerprint, head.size, given.note, "", b"".join(given.hashes), self._parts.clock())
        self._store.add(transaction, row)
        facts: dict[str, str | int] = {"log": key.fingerprint, "origin": key.name, "size": head.size}
        facts |= {"cosigned": 0 if last is None else last.size, "site": self._node.name}
        self._parts.recorder.record(transaction, KeyEvent("log.fork_refused", facts))


class Cosigning:
    """One site's log, shown to the other site. `key` is the log's first."""

    def __init__(self, node: SiteNode, peer: WitnessPeer, key: VerifierKey) -> None:
        self._node, self._peer, self._key = node, peer, key
        self._database, self._store = node.parts.database, WitnessStore(RecordMac(node.parts.hsm))

    def turn(self) -> int:
        """Have the newest checkpoint co-signed, unless it is; up to which size the log is co-signed then.

        Raises what the other site refuses, CheckpointRefused for an answer that is no signature of its, PeerUnavailable.
        """
        log = self._key.fingerprint
        with reading(self._database) as transaction:
            row, last = log_store.last_checkpoint(transaction), self._store.newest(transaction, log)
        done = 0 if last is None else last.size
        if row is None or not row.size or (last is not None and last.note == row.note):
            return done
        start = self._peer.witnessed(log)
        if start > row.size:
            raise LogShortened(f"this log has {row.size} entries, and the other site co-signed {start}")
        hashes = self._hashes(start, row.size)
        line = self._peer.cosign(Offer(self._key.text, row.note, start, hashes).encode())
        self._require_signed(row.note, line)
        with lasting(self._database) as transaction:
            self._store.hold(transaction)
            self._store.add(transaction, Witnessed(log, row.size, row.note, line, b"", self._node.parts.clock()))
        return int(row.size)

    def _hashes(self, start: int, end: int) -> tuple[bytes, ...]:
        """The roots of the complete subtrees from `start` to `end`."""
        with snapshot(self._database) as transaction, closing(log_store.entries(transaction, start, end)) as rows:
            found = []
            for _, level in subtrees(start, end):
                tree = Frontier()
                for row in rows:
                    tree.push(leaf_hash(row.entry))
                    if tree.size == 1 << level:
                        break
                found.append(tree.root())
        return tuple(found)

    def _require_signed(self, note: str, line: str) -> None:
        peer = cosigner_of(self._node.ledger.roster, self._peer.name)
        try:
            check_cosignature(f"{note}{line}\n", peer)
        except ValueError as error:
            raise CheckpointRefused(f"the other site's answer is no cosignature: {error}") from error


def _checked(given: Offer) -> tuple[VerifierKey, Checkpoint]:
    if len(given.note) > MOST_NOTE:
        raise CheckpointRefused(f"a note is longer than {MOST_NOTE} characters")
    try:
        key = parse_key(given.key)
        head = check_checkpoint(given.note, key)
    except ValueError as error:
        raise CheckpointRefused(f"no checkpoint of the log that it names: {error}") from error
    if not head.size or parse_checkpoint(given.note)[2][1:]:
        raise CheckpointRefused("a checkpoint to be co-signed covers entries, and is signed by its log alone")
    return key, head


def _continued(given: Offer, head: Checkpoint, last: Witnessed | None) -> Frontier | None:
    """The tree that this checkpoint signs, if the offered subtrees lead there from the last one; None for a fork."""
    known = 0 if last is None else last.size
    if head.size < known:
        raise LogShortened(f"the log has {head.size} entries, and {known} were co-signed")
    tree = Frontier()
    if last is not None and known:
        _push(tree, 0, known, [last.edge[at : at + DIGEST] for at in range(0, len(last.edge), DIGEST)])
    if head.size > known:
        if given.start != known:
            raise CheckpointRefused(f"the hashes begin at {given.start}, and {known} entries were co-signed")
        _push(tree, known, head.size, given.hashes)
    if tree.root() == head.root:
        return tree
    if last is None or not known:
        raise CheckpointRefused("the hashes do not give the signed root")
    return None


def _push(tree: Frontier, start: int, end: int, hashes: Sequence[bytes]) -> None:
    places = list(subtrees(start, end))
    if len(places) != len(hashes):
        raise StatementMalformed(f"the entries from {start} to {end} are not stood for by {len(hashes)} hashes")
    for (_, level), digest in zip(places, hashes, strict=True):
        tree.push(digest, level)
