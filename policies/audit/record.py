"""What an intent or completion looks like as bytes: canonical JSON that names nobody and gives away no detail. Pure.

A body holds ids, times, action, outcome and purpose; tenant, client and voice as keyed pseudonyms; and of each detail only a
salted commitment. Every detail has a salt of its own, drawn from the record's salt, so that showing one gives no help in
guessing another. RFC 8785 without floating point numbers; texts in Unicode NFC.
"""

from __future__ import annotations

import hmac
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from keyvault.records import canonical
from policies.audit.errors import RecordInvalid
from policies.audit.verify import canonical_json, commitment, strict_json
from policies.intents import Intent

Value = str | int | None
Mac = Callable[[bytes], bytes]

MAX_BODY = 1 << 15
"""Bytes of one body. Everything in it is short; what is longer is a mistake or an attack."""
_LARGEST_INT = 2**53 - 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Stamp:
    """Where and when a record was written: worker (one per start of a process), its gap-free counter, UTC time."""

    worker: str
    counter: int
    time: datetime

    def fields(self) -> dict[str, Value]:
        """As they stand in a body; microseconds, as Postgres keeps them."""
        moment = self.time.astimezone(UTC).replace(tzinfo=None)
        return {"worker": self.worker, "counter": self.counter, "time": moment.isoformat(timespec="microseconds") + "Z"}


def intent_fields(intent_id: UUID, intent: Intent, salt: bytes, pseudonym: Mac) -> dict[str, Any]:
    """What an intent's body says besides its stamp. Raises RecordInvalid."""
    return {
        "v": 1,
        "kind": "intent",
        "id": str(intent_id),
        "action": text(intent.action),
        "outcome": text(intent.outcome),
        "purpose": text(intent.purpose),
        "tenant": pseudonym_of("tenant", intent.tenant, pseudonym),
        "client": pseudonym_of("client", intent.client_id, pseudonym),
        "voice": None if intent.voice is None else pseudonym_of("voice", str(intent.voice), pseudonym),
        "details": {name: commitment(detail_salt(salt, name), name, value) for name, value in plain(intent.details).items()},
    }


def completion_fields(intent_id: UUID, outcome: str, facts: Mapping[str, str | int]) -> dict[str, Any]:
    """Likewise for a completion. Its facts stand in the clear: they must name no one. Raises RecordInvalid."""
    return {"v": 1, "kind": "completion", "id": str(intent_id), "outcome": text(outcome), "facts": plain(facts)}


def body(fields: Mapping[str, Any], stamp: Stamp) -> bytes:
    """The exact bytes that are stored, MAC-ed and hashed into the log. Raises RecordInvalid if they are too many."""
    written = canonical_json({**fields, **stamp.fields()})
    if len(written) > MAX_BODY:
        raise RecordInvalid(f"a record has more than {MAX_BODY} bytes")
    return written


def detail_bytes(salt: bytes, details: Mapping[str, Value]) -> bytes:
    """What is sealed beside an intent: its salt and the values that its leaf commits to."""
    return canonical_json({"salt": salt.hex(), "values": plain(details)})


def detail_context(intent_id: UUID) -> bytes:
    """What an intent's sealed details are bound to."""
    return canonical("audit-detail", intent_id)


def disclosures(opened: bytes, names: frozenset[str] | None = None) -> dict[str, dict[str, Value]]:
    """From an opened detail, what an auditor gets of it (all, or these names): each value with its own salt."""
    sealed = strict_json(opened)
    salt = bytes.fromhex(sealed["salt"])
    return {
        name: {"salt": detail_salt(salt, name).hex(), "value": value}
        for name, value in sealed["values"].items()
        if names is None or name in names
    }


def pseudonym_of(kind: str, value: str, mac: Mac) -> str:
    """The same person or thing always has the same one; without the key in the token nobody can tell whose it is."""
    return mac(canonical("audit-pseudonym", kind, text(value))).hex()


def detail_salt(salt: bytes, name: str) -> bytes:
    """HMAC-SHA256(salt, name)."""
    return hmac.digest(salt, name.encode(), "sha256")


def plain(values: Mapping[str, Value]) -> dict[str, Value]:
    """Details or facts as they are recorded. Raises RecordInvalid for a name or value that has no one canonical spelling."""
    return {_name(name): _value(value) for name, value in values.items()}


def text(value: str) -> str:
    """A text in NFC. Raises RecordInvalid for what UTF-8 cannot hold."""
    if isinstance(value, str) and value.isascii():
        return value  # as almost all are: the same in any normal form
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise RecordInvalid("not a text")
    return unicodedata.normalize("NFC", value)


def _name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RecordInvalid("a name is not of a-z, 0-9, dot, dash and underscore")
    return name


def _value(value: Value) -> Value:
    if value is None:
        return None
    if isinstance(value, int):
        if isinstance(value, bool) or abs(value) > _LARGEST_INT:
            raise RecordInvalid("a number is not whole or too large")
        return int(value)
    return text(value)
