"""What a client asks a token for: `authorization_details` (RFC 9396) of the type `glottis_voice`, read strictly.

One object, one action, and of each action exactly its own members. What does not hold is named by its member, in our own words:
nothing that was sent is repeated, no name that a caller made up either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from policies import jws
from policies.errors import AuthorizationDetailsInvalid
from policies.grants import Purpose
from policies.tokens import MAX_CHARS

DETAILS_TYPE = "glottis_voice"
MAX_DETAILS_LENGTH = 2048

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_MEMBERS: dict[Purpose, tuple[frozenset[str], frozenset[str]]] = {
    Purpose.SPEAK: (frozenset({"voice", "text_sha256"}), frozenset({"max_chars", "liveness", "approval"})),
    Purpose.COMPARE: (frozenset({"voice"}), frozenset({"liveness"})),
    Purpose.ENROL: (frozenset({"consent"}), frozenset()),
    Purpose.CONSENT: (frozenset(), frozenset()),
    Purpose.READ: (frozenset(), frozenset()),
    Purpose.ERASE: (frozenset({"voice"}), frozenset()),
    Purpose.LIVENESS: (frozenset({"voice"}), frozenset()),
    Purpose.APPROVE: (frozenset({"voice", "text_sha256", "client"}), frozenset()),
}
"""Members beside `type` and `actions`: those needed, those possible."""


@dataclass(frozen=True)
class Wish:
    """What a client asks a token for."""

    purpose: Purpose
    voice: UUID | None = None
    consent: UUID | None = None
    text_sha256: str | None = None
    max_chars: int | None = None
    liveness: str | None = None
    approval: str | None = None
    client: str | None = None
    """Whom an approval is for."""

    @classmethod
    def parse(cls, details: str) -> Wish:
        """From `authorization_details`: one object, one action, no member we do not know. Raises AuthorizationDetailsInvalid."""
        try:
            if len(details) > MAX_DETAILS_LENGTH:
                raise ValueError("too long")
            value = jws.strict_json(details.encode())
        except ValueError as problem:
            raise AuthorizationDetailsInvalid(str(problem)) from None
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
            raise AuthorizationDetailsInvalid("not one object in an array")
        return cls(**_read(value[0]))

    def details(self) -> list[dict[str, Any]]:
        """The granted details, in the form in which they were asked for."""
        optional: dict[str, Any] = {
            "voice": None if self.voice is None else str(self.voice),
            "consent": None if self.consent is None else str(self.consent),
            "text_sha256": self.text_sha256,
            "max_chars": self.max_chars,
            "liveness": self.liveness,
            "approval": self.approval,
            "client": self.client,
        }
        granted = {name: value for name, value in optional.items() if value is not None}
        return [{"type": DETAILS_TYPE, "actions": [self.purpose.value], **granted}]


def _read(members: dict[str, Any]) -> dict[str, Any]:
    """The fields of a wish. Raises AuthorizationDetailsInvalid, which names the first member that does not hold."""
    if members.get("type") != DETAILS_TYPE:
        raise AuthorizationDetailsInvalid(f"type is not {DETAILS_TYPE}", member="type")
    actions = members.get("actions")
    if not isinstance(actions, list) or len(actions) != 1 or actions[0] not in list(Purpose):
        raise AuthorizationDetailsInvalid("actions is not one action of ours", member="actions")
    purpose = Purpose(actions[0])
    needed, possible = _MEMBERS[purpose]
    names = members.keys() - {"type", "actions"}
    for missing in sorted(needed - names):
        raise AuthorizationDetailsInvalid(f"{missing} is missing", member=missing)
    if more := names - needed - possible:
        known = min(more & _READERS.keys(), default=None)
        raise AuthorizationDetailsInvalid(f"{known or 'a member'} is none that this action has", member=known)
    fields: dict[str, Any] = {"purpose": purpose, "max_chars": MAX_CHARS if purpose is Purpose.SPEAK else None}
    for name in sorted(names):
        try:
            fields[name] = _READERS[name](members[name])
        except ValueError:
            raise AuthorizationDetailsInvalid(f"{name} is not what it must be", member=name) from None
    return fields


def _uuid(value: Any) -> UUID:
    return UUID(jws.text(value, "id"))


def _text(value: Any) -> str:
    return jws.text(value, "member")


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256_HEX.fullmatch(value):
        raise ValueError("text_sha256 is not a SHA-256 in hex")
    return value


def _max_chars(value: Any) -> int:
    count = jws.whole(value, "max_chars")
    if not 0 < count <= MAX_CHARS:
        raise ValueError(f"max_chars is more than {MAX_CHARS}, or none")
    return count


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "voice": _uuid,
    "consent": _uuid,
    "text_sha256": _hash,
    "max_chars": _max_chars,
    "liveness": _text,
    "approval": _text,
    "client": _text,
}
"""What each member must be: returns its value, or raises ValueError."""
