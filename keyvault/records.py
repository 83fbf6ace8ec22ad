"""Stored records: exact bytes, a MAC made in the token, and the check that comes before any use.

A MAC covers `canonical(domain, *fields)`: a version byte, then each field as type, length and value, so that no two
different rows have the same bytes. The domain keeps a row of one table from passing as a row of another.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar
from uuid import UUID

from keyvault.errors import RecordTampered
from keyvault.hsm import Hsm, KeyName
from keyvault.states import KeyState

Field = str | int | bytes | UUID | datetime | None | Sequence[str]

_FORMAT = b"\x01"
_head = struct.Struct(">cI").pack
_UUID_HEAD = _head(b"u", 16)


@dataclass(frozen=True)
class KeyRef:
    """One exact key version: DEK id, its version, and the ring version that wraps it now."""

    id: UUID
    version: int
    ring: str
    ring_version: int


@dataclass(frozen=True)
class WrappedKey:
    """One stored key version: the DEK wrapped under its ring master, and what the record MAC binds it to."""

    ref: KeyRef
    tenant: str
    voice: UUID
    state: KeyState
    blob: bytes = field(repr=False)
    created_at: datetime
    first_ring_version: int
    """The ring version that first wrapped it: an erased key is shredded once every version since then is destroyed."""
    synced: int = 0
    """The `row_version` for which every site has signed a receipt; 0 is `awaiting_sync`."""
    row_version: int = 1
    mac: bytes = field(default=b"", repr=False)

    DOMAIN: ClassVar[str] = "wrapped_key"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every column but the MAC, in the table's order: what the MAC covers."""
        return self.fields_under(self.ref.ring_version, self.blob, self.row_version)

    def fields_under(self, ring_version: int, blob: bytes, row_version: int) -> tuple[Field, ...]:
        """The same for this key wrapped anew: nothing else of it changes by that."""
        ref = self.ref
        identity = (ref.id, self.tenant, self.voice, ref.version, ref.ring, ring_version)
        return (*identity, self.state.value, blob, self.created_at, self.first_ring_version, self.synced, row_version)


@dataclass(frozen=True)
class Move:
    """A key that was wrapped anew: the row as it was read, and its new blob and MAC. Its row version counts up by one."""

    old: WrappedKey
    blob: bytes = field(repr=False)
    mac: bytes = field(repr=False)


@dataclass(frozen=True)
class RingVersion:
    """One version of a ring's master and its state."""

    ring: str
    version: int
    state: KeyState
    created_at: datetime
    destroy_at: datetime | None = None
    """When its destruction, approved and still to be cancelled, is due; None while none is pending."""
    reason: str = ""
    """Why it is in this state, in the words of whoever changed it."""
    row_version: int = 1
    mac: bytes = field(default=b"", repr=False)
    peer_destroy_at: datetime | None = None
    """The same at the other site, as its HSM said when it was heard last: it raises alerts here, and destroys nothing."""

    DOMAIN: ClassVar[str] = "ring_version"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every column but the MAC: what the MAC covers."""
        own = (self.ring, self.version, self.state.value, self.created_at, self.destroy_at, self.reason, self.row_version)
        return own if self.peer_destroy_at is None else (*own, self.peer_destroy_at)

    @property
    def due(self) -> datetime | None:
        """When the first destruction that is pending at either site is due; None while none is."""
        return min((at for at in (self.destroy_at, self.peer_destroy_at) if at is not None), default=None)


@dataclass(frozen=True)
class Tombstone:
    """What stays of an erased voice: which key versions it had, under which ring versions, and how far its erasure is.

    `erased` at both sites once `peer_erased_at` stands; `shredded` once every ring version from `first_ring_version` to
    `last_ring_version` is destroyed at every site: then no copy of the database opens it again.
    """

    voice: UUID
    tenant: str
    dek_ids: tuple[UUID, ...]
    ring: str
    first_ring_version: int
    last_ring_version: int
    erased_at: datetime
    peer_erased_at: datetime | None = None
    shredded_at: datetime | None = None
    row_version: int = 1
    mac: bytes = field(default=b"", repr=False)

    DOMAIN: ClassVar[str] = "tombstone"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every column but the MAC, in the table's order: what the MAC covers."""
        deks = [str(dek) for dek in self.dek_ids]
        covered = (self.ring, self.first_ring_version, self.last_ring_version)
        times = (self.erased_at, self.peer_erased_at, self.shredded_at)
        return (self.voice, self.tenant, deks, *covered, *times, self.row_version)


class RecordMac:
    """AES-CMAC (RFC 4493) under `record-mac`, a key that never leaves the token: writing the database is not enough."""

    def __init__(self, hsm: Hsm) -> None:
        self._hsm = hsm

    def make(self, domain: str, *fields: Field) -> bytes:
        """The MAC of a row, 16 bytes."""
        return self._hsm.mac(KeyName.RECORD_MAC, canonical(domain, *fields))

    def make_many(self, domain: str, rows: Sequence[Sequence[Field]]) -> list[bytes]:
        """The MAC of each row, in order."""
        return self._hsm.mac_many(KeyName.RECORD_MAC, [canonical(domain, *fields) for fields in rows])

    def check(self, mac: bytes, domain: str, *fields: Field) -> None:
        """Raise RecordTampered unless `mac` is the row's."""
        self.check_bytes(mac, domain, canonical(domain, *fields))

    def check_bytes(self, mac: bytes, domain: str, record: bytes) -> None:
        """The same for a row whose canonical bytes are at hand."""
        self.require(self._hsm.mac(KeyName.RECORD_MAC, record), mac, domain)

    @staticmethod
    def require(made: bytes, mac: bytes, domain: str) -> None:
        """Raise RecordTampered unless `mac`, as the row has it, is what the token made of the row."""
        if not hmac.compare_digest(mac, made):
            raise RecordTampered(f"a {domain} row does not carry its MAC")


def canonical(domain: str, *fields: Field) -> bytes:
    """The bytes that a record's MAC covers. Unambiguous: equal only for equal domain, types and values."""
    return _FORMAT + _encoded((domain, *fields))


def _encoded(fields: Iterable[Field]) -> bytes:
    """Type, length, value of each, one after another. One frame for all of them: this is on the way of every open."""
    parts: list[bytes] = []
    add = parts.append
    one: Any
    for one in fields:
        exact = type(one)  # to ask this first costs a third of `match`
        if exact is str:
            value = one.encode()
            add(_head(b"s", len(value)))
            add(value)
        elif exact is int:
            value = b"%d" % one
            add(_head(b"i", len(value)))
            add(value)
        elif exact is UUID:
            add(_UUID_HEAD)
            add(one.bytes)
        else:
            kind, value = _typed(one)
            add(_head(kind, len(value)))
            add(value)
    return b"".join(parts)


def _typed(one: Field) -> tuple[bytes, bytes]:
    """The letter of its type, and its bytes."""
    match one:
        case None:
            return b"n", b""
        case str():
            return b"s", one.encode()
        case bytes():
            return b"b", one
        case int():
            return b"i", str(one).encode()
        case UUID():
            return b"u", one.bytes
        case datetime():
            # Postgres keeps microseconds: write and read back must give the same bytes.
            return b"t", one.astimezone(UTC).isoformat(timespec="microseconds").encode()
        case _:
            return b"l", _encoded(one)
