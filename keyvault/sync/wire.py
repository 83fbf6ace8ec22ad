"""Statements as exact bytes: a frozen dataclass, its canonical encoding, and a parser that accepts nothing else.

The encoding is `keyvault.records.canonical`: the class's DOMAIN, then each field in order. A nested statement is a byte
field with its own domain, and a tuple is a byte field of domain "list". `decode` builds the value, whose constructor
checks it, and then demands that the value encodes to the very same bytes: one meaning, one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints
from uuid import UUID

from keyvault.records import Field, canonical
from keyvault.sync.errors import StatementMalformed

MAX_BYTES = 1 << 22
_REMEMBERED_BYTES = 1 << 14
DIGEST = 32
_INTEGER = re.compile(rb"0|[1-9][0-9]{0,15}")  # below 10**16: epochs, versions and counts never come near it


@dataclass(frozen=True)
class Statement:
    """A value with exactly one spelling in bytes. Subclasses name a DOMAIN of their own and check their fields."""

    DOMAIN: ClassVar[str]

    def encode(self) -> bytes:
        """The canonical bytes: what is signed, hashed and stored."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        # Values never change, and nested ones are encoded again by everything around them.
        return canonical(self.DOMAIN, *(_outgoing(getattr(self, field.name)) for field in fields(self)))

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The value of these bytes. Raises StatementMalformed unless they are exactly what `encode` writes."""
        if len(data) > MAX_BYTES:
            raise StatementMalformed("a statement is larger than 4 MiB")
        this: Any = cls
        value: Self = _decoded(this, data) if len(data) <= _REMEMBERED_BYTES else _decoded.__wrapped__(this, data)
        return value


def domain_of(data: bytes) -> str:
    """The domain that these canonical bytes claim. Raises StatementMalformed."""
    kind, value = next(_elements(data), (b"", b""))
    if kind != b"s":
        raise StatementMalformed
    return _text(value)


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless a field is as its class demands; `decode` turns it into StatementMalformed."""
    if not condition:
        raise ValueError(message)


def is_digest(value: bytes, *, empty: bool = False) -> bool:
    """Whether this is a SHA-256, or where `empty` allows it, nothing."""
    return len(value) == DIGEST or (empty and not value)


@lru_cache(512)
def _decoded(cls: Any, data: bytes) -> Any:
    """The value; values never change, and a site reads the same state and roster again and again."""
    hints = _hints(cls)
    parts = _parts(data, cls.DOMAIN)
    if len(parts) != len(hints):
        raise StatementMalformed(f"a {cls.DOMAIN} statement has {len(hints)} fields")
    try:
        value = cls(*(_incoming(hint, kind, part) for hint, (kind, part) in zip(hints, parts, strict=True)))
        spelled = value.encode()
    except (ValueError, OverflowError) as error:  # the latter of a time that is in no year of ours in UTC
        raise StatementMalformed(f"a {cls.DOMAIN} statement does not hold together: {error}") from error
    if spelled != data:
        raise StatementMalformed(f"a {cls.DOMAIN} statement is spelled in another way")
    return value


@cache
def _hints(cls: Any) -> tuple[Any, ...]:
    hints = get_type_hints(cls)
    return tuple(hints[field.name] for field in fields(cls))


def _outgoing(value: Any) -> Field:
    if isinstance(value, Statement):
        return value.encode()
    if isinstance(value, tuple):
        return canonical("list", *(_outgoing(item) for item in value))
    field: Field = value
    return field


def _incoming(hint: Any, kind: bytes, value: bytes) -> Any:
    if isinstance(hint, UnionType):
        if kind == b"n":
            return None
        hint = next(choice for choice in get_args(hint) if choice is not NoneType)
    if get_origin(hint) is tuple:
        _expect(kind, b"b")
        return tuple(_incoming(get_args(hint)[0], *part) for part in _parts(value, "list"))
    if issubclass(hint, Statement):
        _expect(kind, b"b")
        return hint.decode(value)
    wanted, read = _SCALARS[next(base for base in hint.__mro__ if base in _SCALARS)]
    _expect(kind, wanted)
    scalar = read(value)
    return scalar if isinstance(scalar, hint) else hint(scalar)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise StatementMalformed("a text field is not UTF-8") from error


def _integer(value: bytes) -> int:
    if not _INTEGER.fullmatch(value):
        raise StatementMalformed("a number field is not a natural number")
    return int(value)


_SCALARS: dict[type, tuple[bytes, Callable[[bytes], Any]]] = {
    str: (b"s", _text),
    int: (b"i", _integer),
    bytes: (b"b", bytes),
    UUID: (b"u", lambda value: UUID(bytes=value)),
    datetime: (b"t", lambda value: datetime.fromisoformat(_text(value))),
}


def _expect(kind: bytes, wanted: bytes) -> None:
    if kind != wanted:
        raise StatementMalformed("a field has another type")


def _parts(data: bytes, domain: str) -> list[tuple[bytes, bytes]]:
    first, *rest = list(_elements(data)) or [(b"", b"")]
    if first != (b"s", domain.encode()):
        raise StatementMalformed(f"this is not a {domain} statement")
    return rest


def _elements(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if data[:1] != b"\x01":
        raise StatementMalformed("the statement has no known format")
    at = 1
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        if at + 5 > len(data) or end > len(data):
            raise StatementMalformed("the statement is cut off")
        yield data[at : at + 1], data[at + 5 : end]
        at = end
