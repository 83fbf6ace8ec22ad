"""The other site, as this one meets it: what may be asked, how it is spelled on the wire, and how refusals come back.

A `Link` carries one call's bytes to the other site and its reply's bytes back; what it is made of (mutual TLS, a pipe, a
function) is somebody else's. `serve` answers such a call from a node; `RemotePeer` makes one. Nobody trusts the link: what
matters in a message is signed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from keyvault.errors import KeyVaultError
from keyvault.sync.errors import Conflict, PeerRefused, StatementMalformed
from keyvault.sync.statement import Certificate, Phase
from keyvault.sync.wire import Statement


class Peer(Protocol):
    """What a coordinator asks of a site, near (`SiteNode`) or far (`RemotePeer`). See `SiteNode` for each promise.

    Far, every method also raises PeerUnavailable, where the call may or may not have been acted on: ask again.
    """

    @property
    def name(self) -> str: ...

    def state(self) -> bytes: ...
    def lacking(self) -> tuple[str, ...]: ...
    def challenge(self) -> bytes: ...
    def status(self, challenge: bytes) -> bytes: ...
    def hear(self, status: bytes) -> None: ...
    def certificates(self, after: int) -> tuple[bytes, ...]: ...
    def accuse(self, evidence: bytes) -> None: ...
    def offer(self, phase: Phase, proposal: bytes, peer_nonce: bytes) -> tuple[bytes, ...]: ...
    def answer(self, phase: Phase, proposal: bytes, peer_nonce: bytes, blobs: Sequence[bytes]) -> tuple[bytes, ...]: ...
    def reveal(self, phase: Phase, proposal: bytes, theirs: Sequence[bytes]) -> tuple[bytes, ...]: ...
    def prepare(self, proposal: bytes, answers: Sequence[bytes]) -> bytes: ...
    def commit(self, prepares: Sequence[bytes]) -> bytes: ...
    def acknowledge(self, commits: Sequence[bytes], answers: Sequence[bytes]) -> bytes: ...
    def accept(self, certificate: bytes) -> None: ...
    def withdraw(self) -> bytes: ...


class BatchPeer(Protocol):
    """What one site's `Batches` asks of the other's. See `keyvault.sync.batches`."""

    def take(self, batch: bytes) -> bytes: ...
    def close(self, closing: bytes) -> None: ...
    def page(self, kind: str, after: bytes) -> bytes: ...
    def summary(self) -> bytes: ...


class RowPeer(Protocol):
    """What one site's `Rows` asks of the other's. See `keyvault.sync.rows`."""

    def take_rows(self, changes: bytes) -> bytes: ...
    def send_differing(self, held: bytes) -> None: ...


class WitnessPeer(Protocol):
    """What a site asks of the other as the witness of its audit log. See `policies.witness.cosigning`."""

    @property
    def name(self) -> str: ...
    def witnessed(self, log: str) -> int: ...
    def cosign(self, offer: bytes) -> str: ...


class Link(Protocol):
    """How a call's bytes reach the other site."""

    def call(self, method: str, message: bytes) -> bytes:
        """The reply to this call. Raises PeerUnavailable where none came; refusals are replies like others."""


class RemotePeer:
    """The other site behind a link. Implements every protocol of a peer."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self._link = link

    def state(self) -> bytes:
        return self._one("state")

    def lacking(self) -> tuple[str, ...]:
        return tuple(name.decode() for name in self._call("lacking"))

    def challenge(self) -> bytes:
        return self._one("challenge")

    def status(self, challenge: bytes) -> bytes:
        return self._one("status", challenge)

    def hear(self, status: bytes) -> None:
        self._call("hear", status)

    def certificates(self, after: int) -> tuple[bytes, ...]:
        """In pages, for a long history is larger than one message may be."""
        found: list[bytes] = []
        while page := self._call("certificates", str(after).encode()):
            found += page
            before, after = after, Certificate.decode(page[-1]).epoch
            if after <= before:  # it would be asked for ever
                raise StatementMalformed("the other site's certificates do not go on")
        return tuple(found)

    def accuse(self, evidence: bytes) -> None:
        self._call("accuse", evidence)

    def offer(self, phase: Phase, proposal: bytes, peer_nonce: bytes) -> tuple[bytes, ...]:
        return self._call("offer", phase.encode(), proposal, peer_nonce)

    def answer(self, phase: Phase, proposal: bytes, peer_nonce: bytes, blobs: Sequence[bytes]) -> tuple[bytes, ...]:
        return self._call("answer", phase.encode(), proposal, peer_nonce, *blobs)

    def reveal(self, phase: Phase, proposal: bytes, theirs: Sequence[bytes]) -> tuple[bytes, ...]:
        return self._call("reveal", phase.encode(), proposal, *theirs)

    def prepare(self, proposal: bytes, answers: Sequence[bytes]) -> bytes:
        return self._one("prepare", proposal, *answers)

    def commit(self, prepares: Sequence[bytes]) -> bytes:
        return self._one("commit", *prepares)

    def acknowledge(self, commits: Sequence[bytes], answers: Sequence[bytes]) -> bytes:
        return self._one("acknowledge", *commits, b"", *answers)

    def accept(self, certificate: bytes) -> None:
        self._call("accept", certificate)

    def withdraw(self) -> bytes:
        return self._one("withdraw")

    def take(self, batch: bytes) -> bytes:
        return self._one("take", batch)

    def close(self, closing: bytes) -> None:
        self._call("close", closing)

    def page(self, kind: str, after: bytes) -> bytes:
        return self._one("page", kind.encode(), after)

    def summary(self) -> bytes:
        return self._one("summary")

    def take_rows(self, changes: bytes) -> bytes:
        return self._one("take_rows", changes)

    def send_differing(self, held: bytes) -> None:
        self._call("send_differing", held)

    def witnessed(self, log: str) -> int:
        answer = self._one("witnessed", log.encode())
        if not answer.isdigit() or len(answer) > 18:
            raise StatementMalformed("how much of a log was co-signed is a number")
        return int(answer)

    def cosign(self, offer: bytes) -> str:
        return self._one("cosign", offer).decode("utf-8", "replace")

    def _one(self, method: str, *parts: bytes) -> bytes:
        reply = self._call(method, *parts)
        if len(reply) != 1:
            raise StatementMalformed(f"{method} is answered by one message")
        return reply[0]

    def _call(self, method: str, *parts: bytes) -> tuple[bytes, ...]:
        reply = _Reply.decode(self._link.call(method, _Call(parts).encode()))
        if reply.refusal:
            raise _refused(reply.refusal)
        return reply.parts


def serve(
    node: Peer,
    batches: BatchPeer,
    method: str,
    message: bytes,
    *,
    rows: RowPeer | None = None,
    witness: WitnessPeer | None = None,
) -> bytes:
    """The reply to the other site's call: what the node answers, or the refusal that it raised. Without `rows` none are taken,
    without `witness` nothing is co-signed.

    What is no refusal (a fault of our own) is raised here. Whoever calls this has made sure that the other site calls.
    """
    try:
        given = _Call.decode(message).parts
        if rows is not None and (taken := _ROW_METHODS.get(method)):
            return _Reply(taken(rows, given)).encode()
        if witness is not None and (asked := _WITNESS_METHODS.get(method)):
            return _Reply(asked(witness, given)).encode()
        answer = _METHODS.get(method)
        if answer is None:
            raise StatementMalformed(f"a site answers no call {method!r}")
        return _Reply(tuple(answer(node, batches, given))).encode()
    except (ValueError, IndexError) as error:
        return _Reply((), _Refusal.of(StatementMalformed(f"a call of {method!r} has another form: {error}"))).encode()
    except KeyVaultError as error:
        return _Reply((), _Refusal.of(error)).encode()


Parts = tuple[bytes, ...]
_PAGE = 16
"""Certificates in one reply: each carries the whole table, so a message stays well under `wire.MAX_BYTES`."""


@dataclass(frozen=True)
class _Call(Statement):
    DOMAIN = "hsm-sync/1/call"
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class _Refusal(Statement):
    DOMAIN = "hsm-sync/1/refusal"
    code: str
    message: str
    fix: str
    epoch: int

    @classmethod
    def of(cls, error: KeyVaultError) -> _Refusal:
        return cls(error.code, str(error), error.fix, error.epoch if isinstance(error, Conflict) else 0)


@dataclass(frozen=True)
class _Reply(Statement):
    DOMAIN = "hsm-sync/1/reply"
    parts: tuple[bytes, ...]
    refusal: _Refusal | None = None


def _refused(refusal: _Refusal) -> KeyVaultError:
    """The other site's refusal as the error that it is; a code from another release as PeerRefused."""
    kind = next((kind for kind in _kinds(KeyVaultError) if kind.code == refusal.code), PeerRefused)
    error = kind.__new__(kind)
    Exception.__init__(error, f"the other site: {refusal.message}")
    if isinstance(error, Conflict):
        error.epoch = refusal.epoch
    return error


def _kinds(kind: type[KeyVaultError]) -> Iterator[type[KeyVaultError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def _acknowledged(node: Peer, parts: Parts) -> Parts:
    between = parts.index(b"")
    return (node.acknowledge(parts[:between], parts[between + 1 :]),)


def _heard(node: Peer, _: BatchPeer, parts: Parts) -> Parts:
    node.hear(parts[0])
    return ()


def _accused(node: Peer, _: BatchPeer, parts: Parts) -> Parts:
    node.accuse(parts[0])
    return ()


def _accepted(node: Peer, _: BatchPeer, parts: Parts) -> Parts:
    node.accept(parts[0])
    return ()


def _closed(_: Peer, batches: BatchPeer, parts: Parts) -> Parts:
    batches.close(parts[0])
    return ()


def _differing(rows: RowPeer, parts: Parts) -> Parts:
    rows.send_differing(parts[0])
    return ()


_ROW_METHODS: Mapping[str, Callable[[RowPeer, Parts], Parts]] = {
    "take_rows": lambda rows, parts: (rows.take_rows(parts[0]),),
    "send_differing": _differing,
}
_WITNESS_METHODS: Mapping[str, Callable[[WitnessPeer, Parts], Parts]] = {
    "witnessed": lambda witness, parts: (str(witness.witnessed(parts[0].decode())).encode(),),
    "cosign": lambda witness, parts: (witness.cosign(parts[0]).encode(),),
}
_METHODS: Mapping[str, Callable[[Peer, BatchPeer, Parts], Sequence[bytes]]] = {
    "state": lambda node, _, __: (node.state(),),
    "lacking": lambda node, _, __: [name.encode() for name in node.lacking()],
    "challenge": lambda node, _, __: (node.challenge(),),
    "status": lambda node, _, parts: (node.status(parts[0]),),
    "hear": _heard,
    "certificates": lambda node, _, parts: node.certificates(int(parts[0]))[:_PAGE],
    "accuse": _accused,
    "offer": lambda node, _, parts: node.offer(Phase(parts[0].decode()), parts[1], parts[2]),
    "answer": lambda node, _, parts: node.answer(Phase(parts[0].decode()), parts[1], parts[2], parts[3:]),
    "reveal": lambda node, _, parts: node.reveal(Phase(parts[0].decode()), parts[1], parts[2:]),
    "prepare": lambda node, _, parts: (node.prepare(parts[0], parts[1:]),),
    "commit": lambda node, _, parts: (node.commit(parts),),
    "acknowledge": lambda node, _, parts: _acknowledged(node, parts),
    "accept": _accepted,
    "withdraw": lambda node, _, __: (node.withdraw(),),
    "take": lambda _, batches, parts: (batches.take(parts[0]),),
    "close": _closed,
    "page": lambda _, batches, parts: (batches.page(parts[0].decode(), parts[1]),),
    "summary": lambda _, batches, __: (batches.summary(),),
}
