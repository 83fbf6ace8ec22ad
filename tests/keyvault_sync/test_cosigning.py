"""The other site co-signs a log that goes on, refuses one that shows two histories, and an auditor checks it with one file."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from audit_parts import Log, filled, joined, lines
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fresh_databases import FreshDatabases
from real_sites import Sites
from sync_world import approve

from keyvault.approval_kinds import Kind, Request, described, explained
from keyvault.errors import RecordTampered
from keyvault.records import RecordMac
from keyvault.sync.errors import (
    ApprovalInvalid,
    ApprovalMissing,
    CheckpointRefused,
    LogForked,
    LogShortened,
    PeerUnavailable,
    StatementMalformed,
)
from keyvault.sync.peer import RemotePeer, serve
from policies.audit.checkpoint import sign_checkpoint
from policies.audit.store import AuditStore
from policies.audit.tree import Tree
from policies.audit.verify import VerificationFailed, leaf_hash, parse_cosigner, subtrees
from policies.witness import cosigning
from policies.witness.cosigning import Cosigning, Offer, Witness, cosigner_of
from policies.witness.store import Witnessed, WitnessStore
from service.witnessing import WitnessCommands


class Pair:
    """Site a's log, and site b as its witness, behind the wire that both sites use."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self.sites, self.asked = sites, []
        self.witness = Witness(sites.b.alive())
        self.peer = RemotePeer("b", self)
        self.log = Log(sites.a.database, AuditStore(sites.a.database, sites.a.hsm), folder / "checkpoint")
        self.cosigner = cosigner_of(sites.roster, "b")
        self.lose = ""

    def call(self, method: str, message: bytes) -> bytes:
        nothing: Any = None
        reply = serve(self.sites.b.alive(), nothing, method, message, witness=self.witness)
        self.asked.append(method)
        if self.lose == method:
            self.lose = ""
            raise PeerUnavailable
        return reply

    def turn(self) -> int:
        return Cosigning(self.sites.a.alive(), self.peer, self.log.key).turn()

    def offer(self, leaves: list[bytes], start: int = 0, key: Ed25519PrivateKey | None = None) -> str:
        """What whoever holds the log's key could show the witness."""
        tree = Tree(leaf_hash(leaf) for leaf in leaves)
        note = sign_checkpoint(len(leaves), tree.root(), self.log.key, self.log.private.sign)
        return self.peer.cosign(Offer(self.log.key.text, note, start, tuple(tree.cover(start, len(leaves)))).encode())

    def leaves(self) -> list[bytes]:
        return [bytes(row[0]) for row in self.log.sql("SELECT entry FROM leaf ORDER BY seq")]

    def rows(self, name: str) -> list[Witnessed]:
        site = self.sites.all[name]
        store = WitnessStore(RecordMac(site.hsm))
        with site.database.begin() as transaction:
            newest = store.newest(transaction, self.log.key.fingerprint)
            return [*([newest] if newest else []), *store.refused(transaction)]


@pytest.fixture(scope="module")
def founded(databases: FreshDatabases) -> Iterator[Sites]:
    with databases.one(pool_size=4) as one, databases.one(pool_size=4) as other:
        yield Sites({"a": one, "b": other})


@pytest.fixture
def pair(founded: Sites, tmp_path: Path) -> Pair:
    """A log of its own key each time; the tables are emptied by hand, as no program may."""
    for site in founded.all.values():
        site.journal.events.clear()
        with site.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("SET LOCAL session_replication_role = replica"))
            transaction.execute(sqlalchemy.text("TRUNCATE intent, completion, detail, leaf, checkpoint, cosignature CASCADE"))
    return Pair(founded, tmp_path)


def test_each_checkpoint_that_continues_is_cosigned_once_and_the_bundle_shows_it(pair: Pair) -> None:
    assert pair.turn() == 0, "there is nothing to sign"
    sizes = []
    for count in (1, 3, 2):
        filled(pair.log, count)
        sizes.append(pair.turn())
        assert pair.turn() == sizes[-1]
    assert sizes == [2, 8, 12]
    assert pair.asked == ["witnessed", "cosign"] * 3
    pair.log.append()
    assert pair.log.sequence() == 13
    report = pair.log.verify(cosigners=[pair.cosigner])
    assert (report.size, report.cosigned) == (13, {"site-b.cluster-1": 12})
    assert pair.log.verify().cosigned == {}
    assert [event["size"] for event in pair.sites.b.journal.of("log.witnessed")] == [2], "no entry for each: both logs would grow"
    assert pair.sites.a.journal.events == []
    assert pair.turn() == 13
    assert pair.log.verify(cosigners=[parse_cosigner(pair.cosigner.text)]).cosigned == {"site-b.cluster-1": 13}


def test_an_answer_that_was_lost_is_given_again(pair: Pair) -> None:
    filled(pair.log, 1)
    for lost in ("witnessed", "cosign"):
        pair.lose = lost
        with pytest.raises(PeerUnavailable):
            pair.turn()
    seen = pair.rows("b")
    assert pair.rows("a") == []
    assert pair.turn() == 2
    assert pair.rows("b") == seen
    assert pair.rows("a")[0].line == seen[0].line
    pair.lose = "cosign"
    filled(pair.log, 1)
    with pytest.raises(PeerUnavailable):
        pair.turn()
    filled(pair.log, 1)
    assert pair.turn() == 6, "it goes on from where the witness stands"


class TestSplitView:
    def test_a_second_history_is_refused_and_both_ends_are_kept(self, pair: Pair) -> None:
        filled(pair.log, 2)
        pair.turn()
        honest = pair.leaves()
        forged = [*honest[:-1], honest[-1] + b" "]
        for _ in range(2):
            with pytest.raises(LogForked, match="do not continue the 4 that site b co-signed"):
                pair.offer(forged)
        with pytest.raises(LogForked):
            pair.offer([*forged, b"more"], start=4)
        last, *refused = pair.rows("b")
        assert [(row.size, row.line) for row in refused] == [(4, ""), (5, "")]
        assert refused[0].note.split("\n")[:2] == last.note.split("\n")[:2]
        assert refused[0].note != last.note
        assert [event["cosigned"] for event in pair.sites.b.journal.of("log.fork_refused")] == [4, 4]
        filled(pair.log, 1)
        assert pair.turn() == 6, "the history that it saw first goes on"

    def test_the_evidence_is_bounded(self, pair: Pair) -> None:
        filled(pair.log, 1)
        pair.turn()
        for number in range(20):
            with pytest.raises(LogForked):
                pair.offer([b"other", str(number).encode()])
        assert len(pair.rows("b")) == 1 + 16

    def test_a_shorter_log_is_refused_by_either(self, pair: Pair) -> None:
        filled(pair.log, 2)
        pair.turn()
        with pytest.raises(LogShortened):
            pair.offer(pair.leaves()[:3])
        pair.log.sql("SET LOCAL session_replication_role = replica")
        with pair.sites.a.database.begin() as connection:
            connection.execute(sqlalchemy.text("SET LOCAL session_replication_role = replica"))
            connection.execute(sqlalchemy.text("DELETE FROM checkpoint WHERE size > 2"))
            connection.execute(sqlalchemy.text("DELETE FROM cosignature"))
        with pytest.raises(LogShortened, match="has 2 entries, and the other site co-signed 4"):
            pair.turn()

    def test_officers_word_lets_it_begin_anew(self, pair: Pair) -> None:
        filled(pair.log, 2)
        pair.turn()
        with pytest.raises(LogShortened):
            pair.offer(pair.leaves()[:3])
        pair.witness.begin_anew(pair.log.key.fingerprint, bytes(32), "officers")
        assert pair.witness.witnessed(pair.log.key.fingerprint) == 0
        assert pair.offer(pair.leaves()[:3])
        assert pair.witness.witnessed(pair.log.key.fingerprint) == 3
        assert [event["reason"] for event in pair.sites.b.journal.of("log.witnessed_anew")] == ["officers"]

    def test_officers_request_lets_it_begin_anew_at_the_witness_alone(self, pair: Pair) -> None:
        filled(pair.log, 2)
        older = pair.log.sql("SELECT note FROM checkpoint ORDER BY size LIMIT 1")[0][0]
        pair.turn()
        with pytest.raises(LogForked):
            pair.offer([b"another", b"history", b"of", b"four"])
        site = pair.sites.b
        commands = WitnessCommands(site.alive(), pair.witness)
        facts = {"site": "a", "kept": pair.log.note(), "database": older, "reason": "a backup"}
        about = explained(Kind.REANCHOR, "cluster-1", facts)
        operation, approvals = approve(Kind.REANCHOR, about.subject)
        asked = [Request(operation, described(facts), approvals[:count]) for count in range(len(approvals) + 1)]
        wrong = {"site": "b", **{name: facts[name] for name in ("kept", "database", "reason")}}
        other, given = approve(Kind.REANCHOR, explained(Kind.REANCHOR, "cluster-1", wrong).subject)
        mine = Request(other, described(wrong), given)
        for requests, error in (
            (asked[2:3], ApprovalMissing),
            ([mine], ApprovalInvalid),
            ([asked[-1], mine], ApprovalInvalid),
            ([replace(asked[-1], description=described(facts | {"reason": "x", "database": ""}))], ApprovalInvalid),
        ):
            with pytest.raises(error):
                commands.cosign_anew([base64.b64encode(one.encode()).decode() for one in requests])
        store = WitnessStore(RecordMac(site.hsm))
        with site.database.begin() as transaction:
            assert len(store.open_forks(transaction)) == 1
        done = commands.cosign_anew([base64.b64encode(one.encode()).decode() for one in asked[1:]])
        assert done == {"origin": pair.log.key.name, "logs": [pair.log.key.fingerprint]}
        assert pair.offer([b"another", b"history"])
        with pytest.raises(ApprovalInvalid, match="before"):
            commands.cosign_anew([base64.b64encode(asked[-1].encode()).decode()])
        with site.database.begin() as transaction:
            assert (len(store.open_forks(transaction)), len(store.refused(transaction))) == (0, 1), "the evidence stays"

    def test_logs_of_other_keys_are_other_logs(self, pair: Pair, tmp_path: Path) -> None:
        filled(pair.log, 1)
        pair.turn()
        first, pair.log.private = pair.log.private, Ed25519PrivateKey.generate()
        assert pair.offer([b"another"])
        pair.log.private = first
        assert pair.witness.witnessed(pair.log.key.fingerprint) == 2


class TestBounds:
    """A site that was taken over has a key for as many logs as it likes."""

    def test_logs_are_bounded(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cosigning, "MOST_LOGS", 2)
        kept = pair.log.private
        assert pair.offer([b"first"])
        pair.log.private = Ed25519PrivateKey.generate()
        assert pair.offer([b"second"])
        pair.log.private = Ed25519PrivateKey.generate()
        with pytest.raises(CheckpointRefused, match="one more"):
            pair.offer([b"third"])
        pair.log.private = kept
        assert pair.offer([b"first", b"goes on"], start=1)

    def test_notes_are_bounded(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cosigning, "MOST_NOTE", 100)
        with pytest.raises(CheckpointRefused, match="longer than 100"):
            pair.offer([b"first"])


class TestForgery:
    def test_what_the_log_did_not_sign_is_refused(self, pair: Pair) -> None:
        filled(pair.log, 2)
        note, leaves = pair.log.note(), pair.leaves()
        hashes = tuple(Tree(leaf_hash(leaf) for leaf in leaves).cover(0, 4))
        good = Offer(pair.log.key.text, note, 0, hashes)
        other = Log(pair.sites.a.database, pair.log.store, pair.log.file)
        wrong = {
            "another key": replace(good, key=other.key.text),
            "no key": replace(good, key="x"),
            "an edited note": replace(good, note=note.replace("\n4\n", "\n5\n")),
            "no note": replace(good, note="voice"),
            "other hashes": replace(good, hashes=(bytes(32),)),
            "from elsewhere": replace(good, start=2, hashes=tuple(Tree(map(leaf_hash, leaves)).cover(2, 4))),
            "signed twice": replace(good, note=note + note.rpartition("\n\n")[2]),
        }
        for what, offer in wrong.items():
            with pytest.raises(CheckpointRefused):
                assert pair.peer.cosign(offer.encode()) is None, what
        with pytest.raises(StatementMalformed, match="are not stood for"):
            pair.peer.cosign(replace(good, hashes=(*hashes, bytes(32))).encode())
        with pytest.raises(ValueError, match="32 bytes"):
            replace(good, hashes=(b"short",))
        assert pair.rows("b") == []
        assert pair.peer.cosign(good.encode())

    def test_an_answer_that_is_not_the_witness_signature_is_not_kept(self, pair: Pair) -> None:
        filled(pair.log, 1)
        signed = pair.witness.cosign
        for change in (lambda line: "", lambda line: line.replace("site-b", "site-a"), lambda line: line[:-8] + "AAAAAAA="):
            pair.witness.cosign = lambda offer, change=change: change(signed(offer))  # type: ignore[method-assign]
            with pytest.raises(CheckpointRefused, match="no cosignature"):
                pair.turn()
        assert pair.rows("a") == []

    def test_rows_carry_their_macs(self, pair: Pair) -> None:
        filled(pair.log, 1)
        pair.turn()
        with pair.sites.b.database.begin() as connection:
            connection.execute(sqlalchemy.text("SET LOCAL session_replication_role = replica"))
            connection.execute(sqlalchemy.text("UPDATE cosignature SET size = 1"))
        with pytest.raises(RecordTampered):
            pair.offer([b"a", b"b", b"c"])


class TestAuditor:
    def test_a_bundle_without_the_cosigner_asked_for_fails(
        self, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from policies.audit.verify import main

        filled(pair.log, 2)
        path, own = tmp_path / "bundle", cosigner_of(pair.sites.roster, "a")
        asked = [str(path), "--fingerprint", pair.log.key.fingerprint, "--cosigner", pair.cosigner.text]
        path.write_bytes(pair.log.bundle())
        assert main(asked) == 3
        assert "site-b.cluster-1 cosigned no checkpoint" in capsys.readouterr().out
        pair.turn()
        path.write_bytes(pair.log.bundle())
        assert main(asked) == 0
        assert "cosigned up to 4 by site-b.cluster-1" in capsys.readouterr().out
        assert main([*asked[:-1], own.text]) == 3
        assert main([*asked[:-1], own.text[:-4]]) == 1

    def test_a_cosignature_that_does_not_hold_is_named(self, pair: Pair) -> None:
        filled(pair.log, 2)
        pair.turn()
        rows = lines(pair.log.bundle())
        good = rows[-1]["checkpoint"]
        log, _, line = good[:-1].rpartition("\n")
        name, _, encoded = line.rpartition(" ")
        raw = bytearray(base64.b64decode(encoded))
        for place in (5, 11, 20, -1):  # of its time, and of both halves of the signature
            changed = bytes(raw[:place]) + bytes([raw[place] ^ 1]) + bytes(raw[place:][1:])
            rows[-1]["checkpoint"] = f"{log}\n{name} {base64.b64encode(changed).decode()}\n"
            with pytest.raises(VerificationFailed, match=r"SIG: cosignature of site-b\.cluster-1"):
                pair.log.verify(joined(rows), cosigners=[pair.cosigner])

    def test_an_older_cosignature_says_nothing_of_what_came_after(self, pair: Pair) -> None:
        filled(pair.log, 1)
        pair.turn()
        line = lines(pair.log.bundle())[-1]["checkpoint"][:-1].rpartition("\n")[2]
        filled(pair.log, 1)
        rows = lines(pair.log.bundle())
        rows[-1]["checkpoint"] += line + "\n"
        with pytest.raises(VerificationFailed, match="SIG: cosignature"):
            pair.log.verify(joined(rows), cosigners=[pair.cosigner])


def test_the_edge_and_the_subtrees_of_a_tree_are_the_same_places(pair: Pair) -> None:
    from policies.audit.verify import Frontier

    for size in range(40):
        tree = Frontier()
        for number in range(size):
            tree.push(leaf_hash(bytes([number])))
        assert len(tree.edge) == len(list(subtrees(0, size)))
        again = Frontier()
        for (_, level), digest in zip(subtrees(0, size), tree.edge, strict=True):
            again.push(digest, level)
        assert (again.size, again.root()) == (size, tree.root())
