"""What the audit tests share: a store on a real database and token, and a log key of the test's own."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.export import export
from policies.audit.sequencer import Sequencer
from policies.audit.store import AuditStore
from policies.audit.verify import Report, Verifier, VerifierKey
from policies.intents import Intent

ORIGIN = "voice.example/audit"


def intent(**changes: Any) -> Intent:
    usual: dict[str, Any] = {
        "action": "voice.open",
        "outcome": "allowed",
        "tenant": "acme",
        "client_id": "reader-1",
        "voice": UUID(int=7),
        "purpose": "speak",
        "details": {"text_sha256": "ab" * 32, "key_version": 3, "liveness": None},
    }
    return Intent(**{**usual, **changes})


@dataclass
class Log:
    """One audit log: vault's side, log's side, auditor's side. The log key is in memory; its token has tests of its own."""

    database: sqlalchemy.Engine
    store: AuditStore
    file: Path
    private: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def key(self) -> VerifierKey:
        spki = self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return verifier_key(ORIGIN, spki)

    def append(self, **changes: Any) -> UUID:
        with self.database.begin() as transaction:
            return self.store.append(transaction, intent(**changes))

    def sequencer(self, **options: Any) -> Sequencer:
        return Sequencer(self.database, self.key, self.private.sign, LastCheckpoint(self.file), **options)

    def sequence(self) -> int:
        """Everything that is there; returns the size."""
        with self.sequencer() as sequencer:
            while sequencer.step().added:
                pass
            return sequencer.step().size

    def bundle(self, **options: Any) -> bytes:
        out = io.StringIO()
        export(self.database, self.key, out, **options)
        return out.getvalue().encode()

    def note(self) -> str:
        return self.sql("SELECT note FROM checkpoint ORDER BY size DESC LIMIT 1")[0][0]

    def verify(self, bundle: bytes | None = None, **options: Any) -> Report:
        data = self.bundle() if bundle is None else bundle
        return Verifier(self.key.fingerprint, **options).verify(io.BytesIO(data))

    def sql(self, statement: str, **values: Any) -> list[Any]:
        """By hand, as somebody with the database's password would."""
        with self.database.begin() as connection:
            result = connection.execute(sqlalchemy.text(statement), values)
            return list(result.all()) if result.returns_rows else []


def filled(log: Log, intents: int = 6) -> list[UUID]:
    """A log of intents, each completed, in several checkpoints."""
    ids = []
    for number in range(intents):
        ids.append(log.append(details={"number": number, "text_sha256": f"{number:064x}"}))
        log.store.complete(ids[-1], "spoken", {"milliseconds": 120 * number})
        log.sequence()
    return ids


def lines(bundle: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bundle.splitlines()]


def joined(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
