"""JWS compact serialization (RFC 7515 §7.1), read strictly: one spelling for every message, and bounded work.

RFC 8725 asks for most of this; the rest closes what common libraries let through: padding, duplicate names, other
encodings of text, non-canonical base64url. Everything here raises ValueError with a reason that repeats no input.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

Members = dict[str, Any]

MAX_DEPTH = 5
_HEADERS = 1024
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")
JTI = re.compile(r"[A-Za-z0-9._~+/=-]{22,128}")
"""An identifier long enough for 128 random bits in base64url, and short enough to store."""


@dataclass(frozen=True)
class Jws:
    """The three parts of a message whose signature has not been checked yet."""

    header: Mapping[str, Any]
    payload: bytes
    signed: bytes
    signature: bytes


def split(compact: str, *, limit: int) -> Jws:
    """Take a message apart. The length is looked at before anything else; `limit` is in characters."""
    if len(compact) > limit:
        raise ValueError("too long")
    segments = compact.split(".")
    if len(segments) != 3:
        raise ValueError("not three segments")
    header, payload, signature = segments
    return Jws(_header(header), decode(payload), f"{header}.{payload}".encode(), decode(signature))


@lru_cache(_HEADERS)
def _header(segment: str) -> Mapping[str, Any]:
    """A header, which one sender spells the same each time: those in use are kept. Raises ValueError, each time anew."""
    return MappingProxyType(strict_object(decode(segment)))


def check_header(header: Mapping[str, Any], *, typ: str, alg: str, members: frozenset[str]) -> None:
    """Raise unless the header has exactly `members` and names this type and algorithm."""
    if header.keys() != members:
        raise ValueError("header members other than the expected ones")
    if header["typ"] != typ:
        raise ValueError("another type of token")
    if header["alg"] != alg:
        raise ValueError("another algorithm than the key's")


def encode(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(segment: str) -> bytes:
    """base64url without padding (RFC 7515 §2), in its one canonical spelling. Raises ValueError."""
    if not _BASE64URL.fullmatch(segment) or len(segment) % 4 == 1:
        raise ValueError("not base64url")
    data = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    if encode(data) != segment:
        raise ValueError("not canonical base64url")
    return data


def strict_object(data: bytes) -> Members:
    """A JSON object. Raises ValueError."""
    value = strict_json(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 — bad input, not a bug
    return value


def strict_json(data: bytes) -> Any:
    """JSON as I-JSON means it (RFC 7493), whole numbers only, no deeper than MAX_DEPTH. Raises ValueError."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_refuse_number,
            parse_float=_refuse_number,
        )
    except (ValueError, RecursionError):
        raise ValueError("not strict JSON") from None
    _check_depth(value, MAX_DEPTH)
    return value


def whole(value: Any, name: str) -> int:
    """`value` as a NumericDate or count. Raises ValueError; true and false are not numbers here."""
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{name} is not a whole number")
    return value


def text(value: Any, name: str, longest: int = 256) -> str:
    """`value` as printable text without surrogates. Raises ValueError."""
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise ValueError(f"{name} is not text")
    return value


def identifier(value: Any) -> str:
    """`value` as a `jti` of at least 128 bits. Raises ValueError."""
    if not isinstance(value, str) or not JTI.fullmatch(value):
        raise ValueError("jti is not an identifier of 128 bits")
    return value


def is_low_s(signature: bytes) -> bool:
    """Whether a raw P-256 signature r||s has the smaller of its two possible s, so that it cannot be respelled."""
    return len(signature) == 64 and 0 < int.from_bytes(signature[32:]) <= P256_ORDER // 2


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Members:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate names")
    return members


def _refuse_number(_: str) -> NoReturn:
    raise ValueError("a number that is not whole")


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, dict | list):
        if left == 0:
            raise ValueError("nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)
