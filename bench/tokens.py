"""What it costs to admit one request and to mint one token, against the least that each could cost in the same run.

    python -m bench.tokens [--quick]

One JSON object a line; the goal is for the ratio. A whole installation is made in a temporary folder: embedded Postgres,
SoftHSM tokens, roles, schema. The gate is everything from the credentials to the admitted request: token, proof, binding,
authority rows with their MACs, consumption, policy, intent, COMMIT. Its measure is one ES256 verification and one INSERT that
is on disk, with the same pool and role. Both are timed in turn, so that a busy machine slows both; the figure is the median.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import insert, text

from bench.lines import report_ratio
from keyvault.database import Database, see_every_tenant
from keyvault.hsm import Hsm, KeyName
from keyvault.key_uses import Place, acting
from keyvault.keys import VoiceKeys
from keyvault.records import RecordMac
from keyvault.signing.serving import SigningKeys
from keyvault.store import KeyStore
from policies.audit.store import AuditStore
from policies.authority import Role
from policies.dual_control import DualControl
from policies.engine import PolicyEngine
from policies.gate import Call, Gate
from policies.grants import Purpose
from policies.liveness import Liveness
from policies.minting import Minting, TokenRequest
from policies.proofs import ProofVerifier, certificate_thumbprint, make_proof, public_jwk
from policies.registry import Registry
from policies.store import PolicyStore, used_token
from policies.tokens import Entitlement, TokenMint, TokenVerifier, jwk_thumbprint
from service import bringup, certificates
from service.key_events import KeyEventRecorder
from service.masters import connect, serving_token
from service.refusal_counts import RefusalCounts
from service.settings import Settings
from service.wiring import AUDIENCE

TENANT, CLIENT, TEXT = "bench", "app", "The quick brown fox jumps over the lazy dog."
SPEECH_PATH, TOKEN_PATH = "/v1/audio/speech", "/oauth/token"
ROUNDS, QUICK_ROUNDS, WARM_UP = 400, 60, 10
GOAL = 2.0


@dataclass
class Site:
    """One vault worker's gate and mint on a real installation, and a client that calls them."""

    settings: Settings
    database: Database
    hsm: Hsm

    def __post_init__(self) -> None:
        mac, issuer = RecordMac(self.hsm), self.settings.public_base_url
        self.audit = AuditStore(self.database, self.hsm)
        self.store = PolicyStore(mac)
        self.keys = VoiceKeys(self.hsm, KeyStore(), KeyEventRecorder(self.audit), mac)
        self.registry = Registry(self.store, time.time)
        signing = SigningKeys(self.hsm, self.database, KeyName.TOKEN_SIGNER, lambda: datetime.now(UTC))
        self.mint = TokenMint(self.hsm, signing, issuer, AUDIENCE, time.time)
        proofs, engine, refusals = ProofVerifier(issuer, time.time), PolicyEngine.shipped(), RefusalCounts(time.time)
        liveness = Liveness(mac, self.hsm.random, time.time)
        self.gate = Gate(
            database=self.database,
            verifier=TokenVerifier(signing, issuer, AUDIENCE, time.time),
            proofs=proofs,
            engine=engine,
            store=self.store,
            intents=self.audit,
            refusals=refusals,
            territory=self.settings.territory,
            clock=time.time,
            liveness=liveness,
        )
        self.minting = Minting(
            database=self.database,
            mint=self.mint,
            proofs=proofs,
            engine=engine,
            store=self.store,
            intents=self.audit,
            refusals=refusals,
            key_of=lambda transaction, voice: self.keys.get(transaction, voice.dek_id).ref,
            dual_control=DualControl(mac, self.hsm.random, time.time),
            territory=self.settings.territory,
            clock=time.time,
            liveness=liveness,
        )
        self._dpop = ec.generate_private_key(ec.SECP256R1())
        _, request = certificates.new_request()
        issued = x509.load_pem_x509_certificate(bringup.issue_client(self.settings, request, CLIENT))
        self._certificate = issued.public_bytes(serialization.Encoding.DER)
        self._voice = self._registered()

    def _registered(self) -> UUID:
        """A client with the right to speak, a consent, and a voice with a key of its own."""
        jkt, voice = jwk_thumbprint(public_jwk(self._dpop.public_key())), uuid4()
        with self.database.begin() as transaction:
            see_every_tenant(transaction)
            for master in self.hsm.masters():
                self.keys.rings.register(transaction, master)
            self.registry.register_client(
                transaction,
                client_id=CLIENT,
                tenant=TENANT,
                cert_sha256=certificate_thumbprint(self._certificate),
                jkt=jkt,
                roles=[Role.SPEAKER],
            )
            consent = self.registry.record_consent(
                transaction,
                tenant=TENANT,
                subject="nobody",
                purposes=["speak"],
                territory=["*"],
                expires_at=datetime.now(UTC) + timedelta(days=1),
                evidence="none",
            )
            with acting(Place.ENROL), self.keys.create(transaction, tenant=TENANT, voice=voice) as key:
                pass
            self.registry.register_voice(
                transaction, voice_id=voice, tenant=TENANT, name="one", consent_id=consent.consent_id, key=key.ref
            )
        return voice

    def token_request(self) -> TokenRequest:
        """A client's request for a token to speak TEXT."""
        wanted = {"type": "glottis_voice", "actions": ["speak"], "voice": str(self._voice), "text_sha256": _sha256(TEXT)}
        proof = make_proof(self._dpop, "POST", self.settings.public_base_url + TOKEN_PATH)
        return TokenRequest("POST", TOKEN_PATH, proof, self._certificate, "client_credentials", json.dumps([wanted]))

    def call(self) -> Call:
        """A client's request to speak TEXT, with a fresh token and proof."""
        token = self.minting.issue(self.token_request()).access_token
        proof = make_proof(self._dpop, "POST", self.settings.public_base_url + SPEECH_PATH, token)
        certificate = self._certificate
        return Call("POST", SPEECH_PATH, "DPoP", token, proof, certificate, Purpose.SPEAK, voice=self._voice, text=TEXT)

    def entitlement(self) -> Entitlement:
        """What a token to speak TEXT says."""
        with self.database.begin() as transaction:
            see_every_tenant(transaction)
            key = self.keys.current(transaction, self._voice).ref
        x5t, jkt = certificate_thumbprint(self._certificate), jwk_thumbprint(public_jwk(self._dpop.public_key()))
        return Entitlement(
            self.mint.new_jti(), TENANT, CLIENT, Purpose.SPEAK, x5t, jkt, self._voice, key, None, _sha256(TEXT), len(TEXT)
        )


class Least:
    """The least that a gate could do: verify one ES256 signature, and write one row that is on disk."""

    _statement = insert(used_token)

    def __init__(self, database: Database) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self._database, self._key, self._signed = database, key.public_key(), b"x" * 700
        self._signature = key.sign(self._signed, ec.ECDSA(hashes.SHA256()))
        with database.connect() as connection:
            kept = {name: connection.scalar(text(f"SHOW {name}")) for name in ("synchronous_commit", "fsync")}
        if set(kept.values()) != {"on"}:
            raise SystemExit(f"this database does not write durably: {kept}")

    def __call__(self) -> None:
        self._key.verify(self._signature, self._signed, ec.ECDSA(hashes.SHA256()))
        row = {"iss": "bench", "jti": secrets.token_urlsafe(16), "expires_at": datetime.now(UTC)}
        with self._database.begin() as transaction:
            transaction.execute(self._statement, row)


@contextmanager
def site() -> Iterator[Site]:
    """A new installation in a temporary folder, with its database serving; all of it is gone afterwards."""
    base = Path(tempfile.mkdtemp(prefix="glottis-bench-"))
    base.chmod(0o711)  # the database's user must get through
    try:
        settings = Settings.load({"GLOTTIS_STATE_DIR": str(base / "state"), "GLOTTIS_SITES": "1"})
        with bringup.held(settings):
            installation = bringup.prepare(settings)
            assert installation.postgres is not None
            with installation.postgres.serving(bringup.superuser_password(settings)):
                database = connect(settings.role_url("vault"))
                with serving_token(settings, database, Place.TOKEN) as hsm:
                    yield Site(settings, database, hsm)
                database.dispose()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1000


def in_turn(rounds: int, *measured: Callable[[], float]) -> list[float]:
    """The medians of what is measured in turn; the first rounds only warm up."""
    found = [[run() for run in measured] for _ in range(rounds + WARM_UP)][WARM_UP:]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def measure(bench: Site, rounds: int) -> None:
    least = Least(bench.database)

    def admit() -> float:
        call = bench.call()
        return milliseconds(lambda: bench.gate.admit(call))

    def issue() -> float:
        request = bench.token_request()
        return milliseconds(lambda: bench.minting.issue(request))

    gate, token, floor = in_turn(rounds, admit, issue, lambda: milliseconds(least))
    report_ratio("tokens.gate", gate, "ms", floor, GOAL)
    report_ratio("tokens.endpoint", token, "ms", floor, None)
    entitlement, signed = bench.entitlement(), b"x" * 700
    mint, raw = in_turn(
        rounds,
        lambda: milliseconds(lambda: bench.mint.mint(entitlement)),
        lambda: milliseconds(lambda: bench.hsm.sign(KeyName.TOKEN_SIGNER, signed)),
    )
    report_ratio("tokens.mint", mint, "ms", raw, GOAL)


def _sha256(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    chosen = parser.parse_args()
    with site() as bench:
        measure(bench, QUICK_ROUNDS if chosen.quick else ROUNDS)


if __name__ == "__main__":
    main()
