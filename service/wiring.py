"""Builds every object of a vault worker, once a process. The only place where the packages meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from keyvault.database import Database, Transaction
from keyvault.errors import KeyNotFound
from keyvault.hsm import Hsm, KeyName, RingMaster, SiteHsm
from keyvault.hsm_listeners import UNHEARD, Listeners
from keyvault.keys import DEFAULT_RING, VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef, RecordMac, canonical
from keyvault.store import KeyStore
from policies.audit.store import AuditStore
from policies.authority import Voice
from policies.engine import PolicyEngine
from policies.gate import Gate
from policies.grants import VerifiedProof
from policies.minting import Minting
from policies.proofs import ProofVerifier
from policies.registry import Registry
from policies.store import PolicyStore, durable
from policies.tokens import TokenMint, TokenVerifier, jwks
from service.key_events import KeyEventRecorder
from service.masters import connect, serving_token
from service.officers import read_roster
from service.refusal_counts import RefusalCounts
from service.settings import Settings
from service.vault.hsm_events import HsmEvents
from service.vault.readiness import Readiness
from service.vault.vault import Vault
from service.voices import erasure_of
from synth.hibari_engine import HibariEngine
from synth.scheduler import Scheduler
from synth.speech import Speech
from voiceprints.activity import Activity
from voiceprints.encoder import Encoder
from voiceprints.enrolment import Enrolment
from voiceprints.matching import Matching
from voiceprints.memory import LockedMemory
from voiceprints.opening import OpenVoices

AUDIENCE = "glottis-vault"
SPEAKING_AT_ONCE = 1
"""Syntheses at once in one worker: each keeps one core busy, and workers are started by the core."""
IN_LINE = 64
"""Requests that may wait for their turn in one worker, each with its voice open: a dozen kilobytes of locked memory."""


@contextmanager
def vault(settings: Settings, listeners: Listeners = UNHEARD, events: HsmEvents | None = None) -> Iterator[Vault]:
    """One vault worker's use cases, and the readiness that was seen to hold. `events` are written into its audit log."""
    database = connect(settings.role_url("vault"))
    try:
        with serving_token(settings, database, listeners) as hsm:
            uses = _vault(settings, database, hsm)
            with (events or HsmEvents()).writing(database, KeyEventRecorder(uses.intents)):
                yield uses
    finally:
        database.dispose()


def _vault(settings: Settings, database: Database, hsm: SiteHsm) -> Vault:
    mac = RecordMac(hsm)
    store, audit = PolicyStore(mac), AuditStore(database, hsm)
    keys = VoiceKeys(hsm, KeyStore(), KeyEventRecorder(audit), mac)
    with database.begin() as transaction:
        serving = keys.rings.serving(transaction, DEFAULT_RING)
    signer = hsm.public_key(KeyName.TOKEN_SIGNER)
    issuer, clock = settings.public_base_url, time.time
    proofs, policies, refusals = ProofVerifier(issuer, clock), PolicyEngine.shipped(), RefusalCounts(clock)
    registry = Registry(store, clock)
    gate = Gate(
        database=database,
        verifier=TokenVerifier([signer], issuer, AUDIENCE, clock),
        proofs=proofs,
        engine=policies,
        store=store,
        intents=audit,
        refusals=refusals,
        territory=settings.territory,
        clock=clock,
    )
    minting = Minting(
        database=database,
        mint=TokenMint(hsm, issuer, AUDIENCE, clock),
        proofs=proofs,
        engine=policies,
        store=store,
        intents=audit,
        refusals=refusals,
        key_of=lambda transaction, voice: _key_of(keys, transaction, voice),
        territory=settings.territory,
        clock=clock,
    )
    memory, activity, encoder, engine = LockedMemory(), Activity(), Encoder(), HibariEngine()
    opening = OpenVoices(database=database, keys=keys, memory=memory, clock=clock)
    return Vault(
        database=database,
        gate=gate,
        minting=minting,
        registry=registry,
        store=store,
        intents=audit,
        enrolment=Enrolment(
            database=database,
            keys=keys,
            registry=registry,
            memory=memory,
            activity=activity,
            encoder=encoder,
            conditioner=engine,
            scratch_bytes=engine.scratch_bytes,
        ),
        erasure=erasure_of(hsm, store, audit, alone=read_roster(settings.roster_file).development),
        opening=opening,
        matching=Matching(voices=opening, memory=memory, activity=activity, encoder=encoder),
        speech=Speech(engine, Scheduler(at_once=SPEAKING_AT_ONCE, waiting=IN_LINE)),
        ready=_readiness(database, hsm, store, serving),
        jwks=lambda: jwks([signer]),
    )


def _key_of(keys: VoiceKeys, transaction: Transaction, voice: Voice) -> KeyRef:
    """The exact key that the voice's row names. Raises KeyNotFound, never another version."""
    key = keys.get(transaction, voice.dek_id)
    if (key.voice, key.ref.version) != (voice.voice_id, voice.key_version):
        raise KeyNotFound(f"voice {voice.voice_id} names a key that is not its own")
    return key.ref


def _readiness(database: Database, hsm: Hsm, store: PolicyStore, master: RingMaster) -> Readiness:
    aad = canonical("canary")
    with LockedBuffer(64) as buffer, hsm.new_dek(master) as dek:
        buffer.view(0, 32)[:] = 1
        wrapped, sealed = dek.wrapped, dek.seal(buffer, 32, aad)

    def unwraps() -> None:
        with LockedBuffer(64) as buffer, hsm.open_dek(master, wrapped) as dek:
            dek.open_into(sealed, aad, buffer)

    def writes() -> None:
        # A full disk still answers SELECT: a row of the guard is written like a request's, and swept like one.
        with durable(database) as transaction:
            store.consume_proof(transaction, VerifiedProof("readyz", str(uuid4()), int(time.time())))

    return Readiness({"hsm": unwraps, "database": writes})
