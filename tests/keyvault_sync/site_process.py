"""A site in a process of its own over a real SoftHSM token and a real database: started, asked, and killed by tests.

Each answers on a Unix socket: the other site's calls, and the test's. What it keeps is on disk; `kill` ends it with SIGKILL, and
`fuse` does so by itself before or after one of its next durable writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import sqlalchemy
from hsm_fixtures import SO_PIN, USER_PIN, fresh_processes, in_own_process
from real_sites import Fuse, FusedDatabase, Journal, VoiceRows

from keyvault import ceremony, master_ceremony, softhsm
from keyvault.errors import KeyVaultError
from keyvault.hsm import KeyName, RingMaster
from keyvault.master_ceremony import Pins
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from keyvault.states import KeyState
from keyvault.sync.batches import Batches
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.durable import SiteParts
from keyvault.sync.errors import PeerUnavailable, SiteUnfounded
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import RemotePeer, serve
from keyvault.sync.roster import Roster
from keyvault.sync.statement import Op, Proposal

PINS = Pins(SO_PIN, USER_PIN)
_FRESH = fresh_processes()
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a site lies: what its process needs to start."""

    name: str
    config: TokenConfig
    url: str
    folder: Path

    @property
    def address(self) -> str:
        return str(self.folder / f"{self.name}.sock")


@dataclass
class SocketLink:
    """The way to the other site's process: one connection a call."""

    address: str

    def call(self, method: str, message: bytes) -> bytes:
        return ask(self.address, "peer", method, message)


def ask(address: str, *question: Any) -> Any:
    """What the process at this address answers. Raises PeerUnavailable where it is down or dies meanwhile."""
    try:
        with Client(address, "AF_UNIX") as connection:
            connection.send(question)
            answer = connection.recv()
    except (OSError, EOFError) as error:
        raise PeerUnavailable from error
    if isinstance(answer, Exception):
        raise answer
    return answer


class LastWrite(Fuse):
    """Ends the process, by the signal that none can catch."""

    def burn(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().burn()


class SiteProcess:
    """Inside the process: the node, and a coordinator over the link to the other site."""

    def __init__(self, place: Place, expected: Sequence[RingMaster], other: Place) -> None:
        self.fuse, self.rows = LastWrite(), VoiceRows()
        self.hsm = Pkcs11Hsm.open(place.config, USER_PIN, expected_masters=expected, required_masters=())
        write = self.hsm.replace_anchors

        def replace_anchors(anchor: bytes) -> None:
            self.fuse.burn()
            write(anchor)
            self.fuse.burn()

        self.hsm.replace_anchors = replace_anchors  # type: ignore[method-assign]
        database: Any = FusedDatabase(sqlalchemy.create_engine(place.url), self.fuse)
        self.parts = SiteParts(place.name, place.config.serial, self.hsm, database, Journal(), lambda: datetime.now(UTC))
        self.peer = RemotePeer(other.name, SocketLink(other.address))
        self.node: SiteNode | None = None
        with contextlib.suppress(SiteUnfounded):
            self.node = SiteNode.open(self.parts)

    def coordinator(self) -> Coordinator:
        assert self.node is not None
        return Coordinator(self.node, self.peer, self.parts.clock)

    def peer_call(self, method: str, message: bytes) -> bytes:
        assert self.node is not None
        return serve(self.node, Batches(self.node, self.peer, self.rows), method, message)

    def identity(self) -> bytes:
        return self.hsm.public_key(KeyName.SITE_IDENTITY)

    def found(self, roster: Roster) -> None:
        self.node = SiteNode.found(self.parts, roster)

    def propose_roster(self, roster: Roster) -> bytes:
        return self.coordinator().propose(Op.ROSTER, new_roster=roster).encode()

    def transact(self, proposal: bytes) -> bytes:
        return self.coordinator().transact(Proposal.decode(proposal))

    def expect(self, label: str) -> None:
        assert self.node is not None
        self.node.expect(RingMaster.named(label))

    def install(self, label: str) -> bytes:
        return self.coordinator().install([RingMaster.named(label)])

    def change(self, label: str, state: str, reason: str, operation: Any = None, approvals: Any = ()) -> bytes:
        return self.coordinator().change_states({label: KeyState(state)}, reason, operation, approvals)

    def resume(self) -> int:
        return self.coordinator().resume().epoch

    def light(self, fuse: int) -> None:
        self.fuse.left = fuse

    def history(self) -> tuple[bytes, ...]:
        assert self.node is not None
        return self.node.certificates(0)

    def view(self) -> dict[str, Any]:
        """What the site says of itself, and what its workers read."""
        assert self.node is not None
        with self.parts.database.begin() as transaction:
            rows = transaction.execute(sqlalchemy.text("SELECT ring, version, state FROM ring_version")).all()
        return {
            "states": {f"ring/{row.ring}/{row.version}": row.state for row in rows},
            "held": dict(self.hsm.held()),
            "masters": self.hsm.masters(),
            "head": self.node.ledger.head,
            "epoch": self.node.ledger.epoch,
            "anchors": len(self.hsm.anchors()),
        }


def run(place: Place, expected: Sequence[RingMaster], other: Place, ready: Connection) -> None:
    """The process: one question after another, for a site's steps run one after another anyway."""
    try:
        site = SiteProcess(place, expected, other)
    except KeyVaultError as error:
        ready.send(error)
        return
    Path(place.address).unlink(missing_ok=True)
    with Listener(place.address, "AF_UNIX") as listener:
        ready.send(None)
        while True:
            with listener.accept() as connection:
                _answer(site, connection)


def _answer(site: SiteProcess, connection: Connection) -> None:
    kind, *arguments = connection.recv()
    method = site.peer_call if kind == "peer" else getattr(site, kind)
    try:
        answer = method(*arguments)
    except KeyVaultError as error:
        answer = error
    connection.send(answer)


@dataclass
class Running:
    """One site as the test holds it."""

    place: Place
    other: Place
    expected: tuple[RingMaster, ...] = ()
    process: Any = field(default=None, repr=False)

    def start(self) -> None:
        here, there = _FRESH.Pipe()
        self.process = _FRESH.Process(target=run, args=(self.place, self.expected, self.other, there), daemon=True)
        self.process.start()
        there.close()
        assert here.poll(_PATIENCE_S), "the site does not start"
        if refusal := here.recv():
            raise refusal

    def __call__(self, *question: Any) -> Any:
        return ask(self.place.address, *question)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(_PATIENCE_S)

    def died(self) -> bool:
        """Whether its fuse burned down: then it is dead for certain when this returns."""
        for _ in range(20):
            if not self.process.is_alive():
                return True
            time.sleep(0.01)
        return False


# --- what officers do, each step in a process of its own


def made_token(folder: Path, label: str) -> TokenConfig:
    """A token with everything that a vault serves with, and no master."""
    module = softhsm.find_module()
    config = TokenConfig(module, label, softhsm.make_token(module, folder, label, SO_PIN, USER_PIN), folder)
    ceremony.serving_token(config, SO_PIN, USER_PIN, ring=None)
    return config


def carry(sender: TokenConfig, receiver: TokenConfig, master: RingMaster) -> None:
    """One new master into both tokens."""
    here, there = _FRESH.Pipe()
    process = _FRESH.Process(target=_receive, args=(there, receiver, master))
    process.start()
    there.close()
    transport = here.recv()
    wrapped, held = in_own_process(master_ceremony.made_and_wrapped, sender, PINS, master, transport)
    here.send(wrapped)
    assert here.recv() == held
    process.join(_PATIENCE_S)


def _receive(pipe: Connection, config: TokenConfig, master: RingMaster) -> None:
    with master_ceremony.receiving(config, PINS, master) as receiver:
        pipe.send(receiver.transport)
        pipe.send(receiver.take(pipe.recv()))


def make_apart(config: TokenConfig, master: RingMaster) -> None:
    """A master of this name that only this token holds: the ceremony went wrong."""
    in_own_process(ceremony.add_master, config, SO_PIN, USER_PIN, master)
