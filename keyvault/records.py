"""Stored records: exact bytes, a MAC made in the token, and the check that comes before any use.

A MAC covers `canonical(domain, *fields)`: a version byte, then each field as type, length and value, so that no two
different rows have the same bytes. The domain keeps a row of one table from passing as a row of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

Field = str | int | bytes | UUID | datetime | None | Sequence[str]

_FORMAT = b"\x01"


@dataclass(frozen=True)
class KeyRef:
    """One exact key version: DEK id, its version, and the ring version that wraps it now."""

    id: UUID
    version: int
    ring: str
    ring_version: int


def canonical(domain: str, *fields: Field) -> bytes:
    """The bytes that a record's MAC covers. Unambiguous: equal only for equal domain, types and values."""
    return _FORMAT + b"".join(_encoded(field) for field in (domain, *fields))


def _encoded(field: Field) -> bytes:
    kind, value = _typed(field)
    return kind + len(value).to_bytes(4, "big") + value


def _typed(field: Field) -> tuple[bytes, bytes]:
    match field:
        case None:
            return b"n", b""
        case str():
            return b"s", field.encode()
        case bytes():
            return b"b", field
        case int():
            return b"i", str(field).encode()
        case UUID():
            return b"u", field.bytes
        case datetime():
            # Postgres keeps microseconds: write and read back must give the same bytes.
            return b"t", field.astimezone(UTC).isoformat(timespec="microseconds").encode()
        case _:
            return b"l", b"".join(_encoded(item) for item in field)
