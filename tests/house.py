"""A whole gate for tests: a real token, a real database, real policies, and clients with real keys."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from sqlalchemy import Engine, text

from keyvault.hsm import Hsm, KeyName
from keyvault.records import KeyRef, RecordMac
from keyvault.signing.serving import SigningKeys
from policies import jws
from policies.audit.store import AuditStore
from policies.authority import Client, Role, Voice
from policies.consent import Consent
from policies.dual_control import DualControl
from policies.engine import PolicyEngine
from policies.gate import Call, Gate
from policies.grants import Purpose
from policies.liveness import Liveness
from policies.minting import Minting, TokenRequest
from policies.nonces import Nonces
from policies.proofs import ProofVerifier, certificate_thumbprint, make_proof, public_jwk
from policies.quotas import Limits
from policies.registry import Registry
from policies.store import PolicyStore
from policies.throttle import Throttle
from policies.tokens import TokenMint, TokenVerifier, jwk_thumbprint

BASE = "https://voice.example"
PATHS = {
    Purpose.SPEAK: "/v1/audio/speech",
    Purpose.COMPARE: "/v1/voices/verify",
    Purpose.ENROL: "/v1/voices",
    Purpose.CONSENT: "/v1/consents",
    Purpose.READ: "/v1/voices",
    Purpose.ERASE: "/v1/voices/one",
    Purpose.LIVENESS: "/v1/liveness",
    Purpose.APPROVE: "/v1/approvals",
}
TEXT = "The quick brown fox."


class Clock:
    """The time, which a test may shift or stop."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.stopped: float | None = None

    def stop(self) -> None:
        self.stopped = time.time()

    def __call__(self) -> float:
        return (time.time() if self.stopped is None else self.stopped) + self.offset


class Counted:
    """Refusals, counted by code."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()

    def count(self, code: str) -> None:
        self.codes[code] += 1


@dataclass(frozen=True)
class Device:
    """A client's two keys: the certificate's DER and the DPoP key."""

    client_id: str
    certificate: bytes
    key: ec.EllipticCurvePrivateKey

    @property
    def x5t(self) -> str:
        return certificate_thumbprint(self.certificate)

    @property
    def jkt(self) -> str:
        return jwk_thumbprint(public_jwk(self.key.public_key()))


def new_device(client_id: str) -> Device:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, client_id)])
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    return Device(client_id, certificate.public_bytes(Encoding.DER), ec.generate_private_key(ec.SECP256R1()))


def sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def forge(header: dict[str, Any], claims: dict[str, Any] | bytes, key: ec.EllipticCurvePrivateKey) -> str:
    """A JWS with whatever header and claims an attacker likes, honestly signed."""
    from jwt.algorithms import ECAlgorithm

    payload = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    signed = f"{jws.encode(json.dumps(header).encode())}.{jws.encode(payload)}"
    return f"{signed}.{jws.encode(ECAlgorithm(ECAlgorithm.SHA256).sign(signed.encode(), key))}"


def key_of(_: object, voice: Voice) -> KeyRef:
    return KeyRef(voice.dek_id, voice.key_version, "voices", 1)


@dataclass
class House:
    """Everything that one vault worker has for its gate."""

    database: Engine
    hsm: Hsm
    clock: Clock = field(default_factory=Clock)
    refusals: Counted = field(default_factory=Counted)
    territory: str = "DE"
    glass: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=lambda: Limits(*[10**9] * 4))

    def __post_init__(self) -> None:
        self.store = PolicyStore(RecordMac(self.hsm), self.limits)
        self.registry = Registry(self.store, self.clock)
        self.audit = AuditStore(self.database, self.hsm)
        self.engine = PolicyEngine.shipped()
        self.signing = SigningKeys(self.hsm, self.database, KeyName.TOKEN_SIGNER, lambda: datetime.fromtimestamp(self.clock(), UTC))
        self.mint = TokenMint(self.hsm, self.signing, BASE, BASE, self.clock)
        self.verifier = TokenVerifier(self.signing, BASE, BASE, self.clock)
        self.proofs = ProofVerifier(BASE, self.clock, Nonces(RecordMac(self.hsm), self.clock))
        self.liveness = Liveness(RecordMac(self.hsm), self.hsm.random, self.clock)
        self.dual_control = DualControl(RecordMac(self.hsm), self.hsm.random, self.clock)
        common: dict[str, Any] = {
            "database": self.database,
            "proofs": self.proofs,
            "engine": self.engine,
            "store": self.store,
            "intents": self.audit,
            "refusals": self.refusals,
            "territory": self.territory,
            "clock": self.clock,
            "liveness": self.liveness,
            "broken_glass": lambda: self.glass,
            "throttle": Throttle(self.limits.attempts, self.clock),
        }
        self.gate = Gate(verifier=self.verifier, **common)
        self.minting = Minting(mint=self.mint, key_of=key_of, dual_control=self.dual_control, **common)

    def client(self, client_id: str = "app", tenant: str = "acme", roles: tuple[Role, ...] = tuple(Role)) -> Device:
        """Register a client with new keys."""
        device = new_device(client_id)
        with self.database.begin() as transaction:
            self.registry.register_client(
                transaction, client_id=client_id, tenant=tenant, cert_sha256=device.x5t, jkt=device.jkt, roles=roles
            )
        return device

    def consent(self, tenant: str = "acme", **terms: Any) -> Consent:
        wanted: dict[str, Any] = {
            "subject": "Speaker One",
            "purposes": ["speak", "compare"],
            "territory": ["*"],
            "expires_at": datetime.now(UTC) + timedelta(days=30),
            "evidence": "signed form 17",
        }
        with self.database.begin() as transaction:
            return self.registry.record_consent(transaction, tenant=tenant, **wanted | terms)

    def voice(self, tenant: str = "acme", consent: Consent | None = None, **terms: Any) -> UUID:
        consent = consent or self.consent(tenant, **terms)
        key = KeyRef(uuid4(), 1, "voices", 1)
        with self.database.begin() as transaction:
            return self.registry.register_voice(
                transaction, voice_id=uuid4(), tenant=tenant, name="One", consent_id=consent.consent_id, key=key
            ).voice_id

    def request(self, device: Device, action: str, **members: Any) -> TokenRequest:
        """A token request by this device; members go into the authorization details."""
        details = json.dumps([{"type": "glottis_voice", "actions": [action], **{k: str(v) for k, v in members.items()}}])
        proof = make_proof(device.key, "POST", f"{BASE}/oauth/token")
        return TokenRequest("POST", "/oauth/token", proof, device.certificate, "client_credentials", details)

    def token(
        self, device: Device, purpose: Purpose, voice: UUID | None = None, consent: UUID | None = None, text: str = TEXT
    ) -> str:
        members: dict[str, Any] = {"voice": voice, "consent": consent}
        if purpose is Purpose.SPEAK:
            members["text_sha256"] = sha256_hex(text)
        wanted = {name: value for name, value in members.items() if value is not None}
        return self.minting.issue(self.request(device, purpose.value, **wanted)).access_token

    def call(self, device: Device, token: str, purpose: Purpose, voice: UUID | None = None, **changes: Any) -> Call:
        """The honest call with this token, with a fresh proof, changed as the test wants."""
        path = PATHS[purpose]
        method = {Purpose.READ: "GET", Purpose.ERASE: "DELETE"}.get(purpose, "POST")
        call: dict[str, Any] = {
            "method": method,
            "path": path,
            "scheme": "DPoP",
            "token": token,
            "proof": make_proof(device.key, method, BASE + path, token),
            "certificate_der": device.certificate,
            "purpose": purpose,
            "voice": voice,
            "text": TEXT if purpose is Purpose.SPEAK else None,
        }
        return Call(**call | changes)

    def speech(self, device: Device, voice: UUID, **changes: Any) -> Call:
        """An honest call to speak TEXT, with a token of its own."""
        return self.call(device, self.token(device, Purpose.SPEAK, voice), Purpose.SPEAK, voice, **changes)

    def count(self, table: str) -> int:
        with self.database.connect() as connection:
            return connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()

    def edit(self, statement: str, **values: Any) -> None:
        """Write the database the way an attacker would."""
        with self.database.begin() as transaction:
            transaction.execute(text(statement), values)

    def of_client(self, client_id: str) -> Client:
        with self.database.begin() as transaction:
            found = self.store.client(transaction, client_id)
        assert found is not None
        return found


@pytest.fixture
def house(database: Engine, serving_token: Any) -> House:
    return House(database, serving_token.hsm)
