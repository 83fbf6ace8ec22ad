"""Two sites whose stores are real databases and whose tokens are fakes that keep what a real one keeps; either may die anywhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy
from fakes import FakeHsm
from sync_world import NOW, PEOPLE, approve

from keyvault.approvals import Approval, Officer, Operation
from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.hsm import KeyName, RingMaster
from keyvault.records import RecordMac
from keyvault.sync.batches import Batches
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.durable import SiteParts
from keyvault.sync.errors import PeerUnavailable, SyncRefused
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import RemotePeer, serve
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.rows import Rows
from keyvault.sync.statement import DESTROY, Proposal, destruction_subject
from policies.store import PolicyStore
from service.authority_rows import AuthorityRows

MAIN = RingMaster("main", 1)


class Crashed(BaseException):
    """The process died here. No refusal, so that no code can take it for one."""


@dataclass
class Fuse:
    """How many more durable moments a process sees; each write has one before it and one after. None for ever."""

    left: int | None = None

    def burn(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            raise Crashed
        self.left -= 1


class FusedHsm(FakeHsm):
    """A fake token whose durable writes may be the last thing a process does."""

    def __init__(self, masters: Sequence[RingMaster], fuse: Fuse) -> None:
        super().__init__(masters)
        self.fuse = fuse

    def replace_anchors(self, anchor: bytes) -> None:
        self.fuse.burn()
        super().replace_anchors(anchor)
        self.fuse.burn()

    def destroy_master(self, master: RingMaster) -> None:
        self.fuse.burn()
        super().destroy_master(master)
        self.fuse.burn()


class FusedDatabase:
    """A database whose commits may be the last thing a process does: not reached, or reached and never heard of."""

    def __init__(self, engine: sqlalchemy.Engine, fuse: Fuse) -> None:
        self.engine, self.fuse = engine, fuse

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        with self.engine.begin() as transaction:
            yield transaction
            written = self.fuse.left is not None and transaction.scalar(
                sqlalchemy.text("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
            )
            if written:
                self.fuse.burn()
        if written:
            self.fuse.burn()


@dataclass
class Journal:
    """A recorder that keeps what it was told, of transactions that committed and of those that did not."""

    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        assert transaction.in_transaction()
        self.events.append(event)

    def of(self, action: str) -> list[dict[str, str | int]]:
        return [event.facts for event in self.events if event.action == action]


_OF_BATCHES = ("take", "close", "page", "summary")
_OF_ROWS = ("take_rows", "send_differing")


@dataclass
class FunctionLink:
    """A link that is a function call; `down` cuts it, `lose` loses the reply of one method once, after it was acted on."""

    node: Callable[[], SiteNode]
    batches: Callable[[], Any]
    died: Callable[[], None]
    down: bool = False
    lose: str = ""
    calls: list[str] = field(default_factory=list)
    rows: Callable[[], Rows] | None = None

    def call(self, method: str, message: bytes) -> bytes:
        if self.down:
            raise PeerUnavailable
        self.calls.append(method)
        try:
            rows = self.rows() if self.rows and method in _OF_ROWS else None
            reply = serve(self.node(), self.batches() if method in _OF_BATCHES else None, method, message, rows=rows)
        except Crashed:
            self.died()
            raise PeerUnavailable from None
        if self.lose == method:
            self.lose = ""
            raise PeerUnavailable
        return reply


@dataclass
class VoiceRows:
    """Rows of higher packages, which a process keeps as it likes: here beside the database, so that tests can look."""

    kept: dict[UUID, bytes] = field(default_factory=dict)
    refuse: set[UUID] = field(default_factory=set)

    def rows_of(self, transaction: Transaction, voice: UUID) -> bytes:
        return self.kept.get(voice, b"")

    def take(self, transaction: Transaction, voice: UUID, rows: bytes) -> None:
        if voice in self.refuse:
            raise SyncRefused("this voice is another tenant's here")
        self.kept[voice] = rows

    def drop(self, transaction: Transaction, voice: UUID) -> None:
        self.kept.pop(voice, None)


class OneSite:
    """A site's durable parts, and the process over them while it lives."""

    def __init__(self, name: str, database: sqlalchemy.Engine, masters: Sequence[RingMaster] = ()) -> None:
        self.name, self.fuse, self.journal, self.now = name, Fuse(), Journal(), NOW
        self.hsm, self.database = FusedHsm(masters, self.fuse), database
        self.serial = f"serial-{name}"
        self.rows = VoiceRows()
        self.node: SiteNode | None = None
        self.in_rotation_token: set[RingMaster] = set()

    @property
    def parts(self) -> SiteParts:
        database: Any = FusedDatabase(self.database, self.fuse)
        held = self.in_rotation_token.__contains__
        return SiteParts(self.name, self.serial, self.hsm, database, self.journal, lambda: self.now, held)

    @property
    def key(self) -> SiteKey:
        return SiteKey(self.name, self.serial, self.hsm.public_key(KeyName.SITE_IDENTITY))

    def alive(self) -> SiteNode:
        if self.node is None:
            raise PeerUnavailable(f"site {self.name} is down")
        return self.node

    def die(self) -> None:
        """The process ends: what is durable stays."""
        self.node = None

    def start(self) -> SiteNode:
        self.node = None
        self.node = SiteNode.open(self.parts)
        return self.node

    def dump(self) -> dict[str, list[Any]]:
        """Every row of the database, as an operator's backup has it."""
        with self.database.begin() as transaction:
            return {
                table: transaction.execute(sqlalchemy.text(f"SELECT * FROM {table}")).mappings().all()
                for table in ("ring_version", "wrapped_key", "tombstone", "sync_state", "sync_certificate", "sync_batch")
            }

    def restore(self, dump: Mapping[str, list[Any]]) -> None:
        with self.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("SET LOCAL session_replication_role = replica"))
            for table, rows in dump.items():
                transaction.execute(sqlalchemy.text(f"TRUNCATE {table} CASCADE"))
                for row in rows:
                    names = ", ".join(row)
                    values = ", ".join(f":{name}" for name in row)
                    transaction.execute(sqlalchemy.text(f"INSERT INTO {table} ({names}) VALUES ({values})"), dict(row))

    def token(self) -> dict[str, Any]:
        """What the token holds, as a backup of its files has it."""
        return copy.copy(
            {name: getattr(self.hsm, name) for name in ("_token", "_serving", "_anchors")} | {"_token": dict(self.hsm._token)}
        )

    def restore_token(self, held: dict[str, Any]) -> None:
        for name, value in held.items():
            setattr(self.hsm, name, dict(value) if name == "_token" else value)

    def states(self) -> dict[str, str]:
        """The mirror as a worker reads it."""
        with self.database.begin() as transaction:
            rows = transaction.execute(sqlalchemy.text("SELECT ring, version, state FROM ring_version ORDER BY ring, version"))
            return {f"ring/{row.ring}/{row.version}": row.state for row in rows}


def signed(proposal: Proposal) -> Proposal:
    """The proposal with two officers' approvals."""
    operation, approvals = approve(f"sync.{proposal.manifest.op}", proposal.manifest.digest)
    return replace(proposal, operation=operation, approvals=approvals)


class Sites:
    """Two sites and a coordinator at each."""

    def __init__(self, databases: Mapping[str, sqlalchemy.Engine], *, ready: bool = True) -> None:
        self.all = {name: OneSite(name, database) for name, database in databases.items()}
        self.links = {name: self._link(name) for name in self.all}
        self.roster = self.make_roster(self.all)
        if ready:
            for site in self.all.values():
                site.node = SiteNode.found(site.parts, self.roster)
            self.coordinator("a").endorse_roster(signed)
            self.ceremony(MAIN)
            self.coordinator("a").install([MAIN])

    @property
    def a(self) -> OneSite:
        return self.all["a"]

    @property
    def b(self) -> OneSite:
        return self.all["b"]

    def make_roster(self, names: Sequence[str] | Mapping[str, OneSite], epoch: int = 1, threshold: int = 2) -> Roster:
        officers = tuple(Officer(name, (signer.public,)) for name, signer in sorted(PEOPLE.items()))
        return Roster("cluster-1", epoch, tuple(self.all[name].key for name in sorted(names)), officers, threshold)

    def coordinator(self, name: str) -> Coordinator:
        site = self.all[name]
        others = [other for other in self.all if other != name and other in site.alive().ledger.roster.names]
        peer = RemotePeer(others[0], self.links[others[0]]) if others else None
        return Coordinator(site.alive(), peer, lambda: site.now)

    def batches(self, name: str, most: int = 100) -> Batches:
        """What a site sends and takes, with its rows of higher packages."""
        site = self.all[name]
        others = [other for other in self.all if other != name and other in site.alive().ledger.roster.names]
        peer = RemotePeer(others[0], self.links[others[0]]) if others else None
        return Batches(site.alive(), peer, site.rows, most=most)

    def authority_rows(self, name: str, most: int = 100) -> Rows:
        """What a site tells and hears of who may do what, from its own tables."""
        site = self.all[name]
        others = [other for other in self.all if other != name and other in site.alive().ledger.roster.names]
        peer = RemotePeer(others[0], self.links[others[0]]) if others else None
        return Rows(site.alive(), peer, AuthorityRows(PolicyStore(RecordMac(site.hsm))), most=most)

    def ceremony(self, master: RingMaster, names: str = "") -> None:
        """Officers announce one master to these sites, or to all, and bring it into their tokens."""
        key = os.urandom(32)
        for name in names or self.all:
            if node := self.all[name].node:
                node.expect(master)
            self.all[name].hsm.install(master, key)

    def _link(self, name: str) -> FunctionLink:
        link = FunctionLink(lambda: self.all[name].alive(), lambda: self.batches(name), self.all[name].die)
        link.rows = lambda: self.authority_rows(name)
        return link


def destruction(labels: Sequence[str], cluster: str = "cluster-1") -> tuple[Operation, tuple[Approval, ...]]:
    return approve(DESTROY, destruction_subject(cluster, labels), hours=48)


def later(site: OneSite, **time: float) -> datetime:
    site.now += timedelta(**time)
    return site.now
