"""The sealed details of audit entries, opened for one recipient's key, as officers approved it (`audit.export-details`).

What leaves is an auditor's bundle with each detail and its salt beside the entry that committed to it, sealed for the recipient
(HPKE, RFC 9180, base mode): this host keeps no copy in the clear, and the stand-alone verifier checks the opened bundle. The
export is an entry of the log before anything leaves. An approval is good for one export.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from keyvault.approval_kinds import Facts, Kind, explained, quorum_for
from keyvault.database import Database
from keyvault.events import KeyEvent
from keyvault.hsm import Hsm
from keyvault.inbox import Inbox
from keyvault.lifecycle import APPROVALS_LAST
from keyvault.sync.errors import ApprovalMissing, SyncRefused
from keyvault.sync.node import SiteNode
from keyvault.sync.store import lasting, reading
from policies.audit.details import Details
from policies.audit.errors import RangeRefused
from policies.audit.export import Range, export
from policies.audit.store import AuditStore, last_checkpoint
from policies.audit.verify import VerifierKey
from service.errors import SealedBundleRefused
from service.sync.arguments import Call

MOST_ENTRIES = 20_000
"""In one export: a larger range is several requests."""
_SUITE = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SUITE_NAME = "DHKEM(P-256, HKDF-SHA256), HKDF-SHA256, AES-256-GCM"


@dataclass(frozen=True)
class DetailCommands:
    """The commands about details of one site process, as functions from JSON to JSON. Bytes travel as base64."""

    inbox: Inbox
    node: SiteNode
    database: Database
    hsm: Hsm
    key: VerifierKey
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        return {call.__name__: call for call in (self.details_request, self.details_export)}

    def details_request(self, start: int, end: int, tenant: str, recipient: str, reason: str) -> dict[str, Any]:
        """File the request for entries [start, end) of one tenant, or (empty) of all. Raises RangeRefused, SealedBundleRefused."""
        parts = self.node.parts
        with reading(self.database) as connection:
            last = last_checkpoint(connection)
        if last is None or not 0 <= start < end <= last.size or end - start > MOST_ENTRIES:
            raise RangeRefused(f"entries {start} to {end}, at most {MOST_ENTRIES} at once")
        key = base64.b64encode(_recipient(recipient)).decode()
        facts: Facts = {"site": self.node.name, "start": start, "end": end, "tenant": tenant, "recipient": key, "reason": reason}
        roster = self.node.ledger.roster
        subject, ends = explained(Kind.DETAILS, roster.cluster, facts).subject, parts.clock() + APPROVALS_LAST
        request = self.inbox.request(Kind.DETAILS, subject, facts, ends)
        return {"request": request, "needed": quorum_for(Kind.DETAILS, roster).threshold}

    def details_export(self, name: str) -> dict[str, Any]:
        """Carry an approved request out, once, however many ask at a time. Raises ApprovalMissing, SyncRefused, SealBroken."""
        with self._one_at_a_time:
            return self._exported(name)

    def _exported(self, name: str) -> dict[str, Any]:
        request, parts = self.inbox.one(name).request, self.node.parts
        facts = request.facts
        if request.meaning().kind is not Kind.DETAILS or facts["site"] != self.node.name:
            raise SyncRefused("this request is about no details of this site's log")
        found = self.inbox.approved(Kind.DETAILS, request.operation.subject, parts.clock())
        if found is None or found.operation is None:
            raise ApprovalMissing
        start, end, tenant = int(facts["start"]), int(facts["end"]), str(facts["tenant"])
        recipient = base64.b64decode(str(facts["recipient"]), validate=True)
        bundle, entries = self._bundle(start, end, tenant)
        sealed = _sealed(bundle, recipient)
        with lasting(parts.database) as transaction:
            said: dict[str, str | int] = {"from": start, "to": end, "entries": entries, "request": found.operation.digest.hex()}
            said |= {"recipient": sha256(recipient).hexdigest(), **({"tenant": tenant} if tenant else {})}
            parts.recorder.record(transaction, KeyEvent("audit.details_exported", said))
        self.inbox.done(found.operation)
        return {"sealed": sealed.decode(), "entries": entries}

    def _bundle(self, start: int, end: int, tenant: str) -> tuple[bytes, int]:
        """The bundle in the clear, and of how many entries it shows details."""
        database, shown = self.database, 0
        audit = AuditStore(database, self.hsm)
        with reading(database) as transaction:
            wanted = Details(self.hsm).entries_of(transaction, tenant) if tenant else None

        def disclose(intent: UUID) -> Mapping[str, Any]:
            nonlocal shown
            found = audit.disclose(intent) if wanted is None or intent in wanted else {}
            shown += bool(found)
            return found

        written = io.StringIO()
        export(database, self.key, written, wanted=Range(start, end), disclose=disclose)
        return written.getvalue().encode(), shown


def opened_bundle(sealed: bytes, key: bytes, passphrase: bytes | None) -> bytes:
    """The recipient's half: the bundle in the clear, from the sealed file and the private key (PEM). Raises SealedBundleRefused."""
    try:
        private = load_pem_private_key(key, passphrase)
        said = json.loads(sealed)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or said["suite"] != _SUITE_NAME:
            raise SealedBundleRefused("it is sealed for another kind of key")
        return _SUITE.decrypt(base64.b64decode(said["sealed"], validate=True), private, _INFO)
    except (KeyError, TypeError, ValueError, InvalidTag) as error:
        raise SealedBundleRefused(f"it does not open with this key: {type(error).__name__}") from error


_INFO = b"glottis audit details 1"


def _sealed(bundle: bytes, recipient: bytes) -> bytes:
    key = load_der_public_key(recipient)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    text = base64.b64encode(_SUITE.encrypt(bundle, key, _INFO)).decode()
    return json.dumps({"glottis_sealed_bundle": 1, "suite": _SUITE_NAME, "sealed": text}).encode()


def _recipient(pem: str) -> bytes:
    """The recipient's P-256 public key as SubjectPublicKeyInfo, DER. Raises SealedBundleRefused."""
    try:
        key = load_pem_public_key(pem.encode())
    except ValueError as error:
        raise SealedBundleRefused("the recipient's file is no public key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SealedBundleRefused("the recipient's key is no P-256 key")
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
