"""Builds every object of a vault worker, once a process. The only place where the packages meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from keyvault.database import Database, Transaction
from keyvault.errors import KeyNotFound
from keyvault.hsm import Hsm, KeyName, SiteHsm
from keyvault.hsm_listeners import UNHEARD, Listeners
from keyvault.key_uses import Place
from keyvault.keys import VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef, RecordMac, canonical
from keyvault.signing.serving import SigningKeys
from keyvault.store import KeyStore
from keyvault.sync.store import SyncStore
from policies.audit.store import AuditStore
from policies.authority import Voice
from policies.browsers import BrowserKeys
from policies.dual_control import DualControl
from policies.gate import Gate
from policies.grants import VerifiedProof
from policies.liveness import Liveness
from policies.minting import Minting
from policies.nonces import Nonces
from policies.proofs import ProofVerifier
from policies.quotas import Limits
from policies.registry import Registry
from policies.store import PolicyStore, durable
from policies.throttle import ATTEMPTS, Throttle
from policies.tickets import Tickets
from policies.tokens import TokenMint, TokenVerifier, jwks
from service.broken_glass import BrokenGlass, Watched
from service.key_events import KeyEventRecorder
from service.masters import connect, serving_token
from service.policy_sets import active_policies
from service.refusal_counts import RefusalCounts
from service.settings import Settings
from service.vault.agreement import Agreement, AgreementParts
from service.vault.hsm_events import HsmEvents
from service.vault.log_moves import LogMoves
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
from voiceprints.presence import Presence

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
        with serving_token(settings, database, Place.VAULT, listeners) as hsm:
            heard = events or HsmEvents()
            uses = _vault(settings, database, hsm, heard)
            with heard.writing(database, KeyEventRecorder(uses.intents)):
                yield uses
    finally:
        database.dispose()


def _vault(settings: Settings, database: Database, hsm: SiteHsm, events: HsmEvents) -> Vault:
    mac = RecordMac(hsm)
    store, audit = PolicyStore(mac), AuditStore(database, hsm)
    glass = BrokenGlass(settings, database, hsm, audit)
    agreement = _agreement(settings, database, hsm, glass)
    keys = VoiceKeys(hsm, KeyStore(), KeyEventRecorder(audit), mac, receipts=not agreement.alone, site=settings.site)
    clock, registry = time.time, Registry(store, time.time)
    signing = SigningKeys(hsm, database, KeyName.TOKEN_SIGNER, lambda: datetime.now(UTC), heard=events.hear)
    callers = _callers(settings, database, hsm, keys, store, audit, glass, signing)
    memory, engine = LockedMemory(), HibariEngine()
    hearing: dict[str, Any] = {"memory": memory, "activity": Activity(), "encoder": Encoder()}
    opening = OpenVoices(database=database, keys=keys, memory=memory, clock=clock, break_glass=glass.to_open)
    matching = Matching(voices=opening, **hearing)
    return Vault(
        database=database,
        gate=callers.gate,
        minting=callers.minting,
        browsers=callers.browsers,
        tickets=callers.tickets,
        registry=registry,
        store=store,
        intents=audit,
        enrolment=Enrolment(
            database=database, keys=keys, registry=registry, conditioner=engine, scratch_bytes=engine.scratch_bytes, **hearing
        ),
        erasure=erasure_of(hsm, store, audit, alone=agreement.alone),
        opening=opening,
        matching=matching,
        liveness=callers.liveness,
        dual_control=callers.dual_control,
        presence=Presence(database, store, matching, clock),
        speech=Speech(engine, Scheduler(at_once=SPEAKING_AT_ONCE, waiting=IN_LINE)),
        agreement=agreement,
        receipt_of=None if agreement.alone else lambda tenant, voice: _synced(database, keys, tenant, voice),
        ready=_readiness(database, hsm, store),
        hsm=hsm,
        jwks=lambda: jwks(callers.signing),
    )


@dataclass(frozen=True)
class _Callers:
    """The ways in: each decides and records what a caller may, and none of them opens anything."""

    gate: Gate
    minting: Minting
    tickets: Tickets
    browsers: BrowserKeys
    liveness: Liveness
    dual_control: DualControl
    signing: SigningKeys


def _callers(
    settings: Settings,
    database: Database,
    hsm: SiteHsm,
    keys: VoiceKeys,
    store: PolicyStore,
    audit: AuditStore,
    glass: BrokenGlass,
    signing: SigningKeys,
) -> _Callers:
    mac, clock, issuer, refusals = RecordMac(hsm), time.time, settings.public_base_url, RefusalCounts(time.time)
    proofs, liveness = ProofVerifier(issuer, clock, Nonces(mac, clock)), Liveness(mac, hsm.random, clock)
    dual_control = DualControl(mac, hsm.random, clock)
    recorded: dict[str, Any] = {"database": database, "store": store, "intents": audit, "refusals": refusals, "clock": clock}
    decided = {"engine": active_policies(hsm, settings.site, settings.roster_file), "territory": settings.territory, **recorded}
    throttle = Throttle.shared(Limits().attempts, clock, settings.run_dir / ATTEMPTS)
    bound = {"proofs": proofs, "throttle": throttle, "liveness": liveness, "broken_glass": Watched(glass.in_force), **decided}
    return _Callers(
        gate=Gate(verifier=TokenVerifier(signing, issuer, AUDIENCE, clock), **bound),
        minting=Minting(
            mint=TokenMint(hsm, signing, issuer, AUDIENCE, clock),
            dual_control=dual_control,
            key_of=lambda transaction, voice: _key_of(keys, transaction, voice),
            **bound,
        ),
        tickets=Tickets(random=hsm.random, **decided),
        browsers=BrowserKeys(proofs=proofs, **recorded),
        liveness=liveness,
        dual_control=dual_control,
        signing=signing,
    )


def _key_of(keys: VoiceKeys, transaction: Transaction, voice: Voice) -> KeyRef:
    """The exact key that the voice's row names. Raises KeyNotFound, never another version."""
    key = keys.get(transaction, voice.dek_id)
    if (key.voice, key.ref.version) != (voice.voice_id, voice.key_version):
        raise KeyNotFound(f"voice {voice.voice_id} names a key that is not its own")
    return key.ref


def _agreement(settings: Settings, database: Database, hsm: Hsm, glass: BrokenGlass) -> Agreement:
    def now() -> datetime:
        return datetime.now(UTC)

    parts = AgreementParts(
        database=database,
        store=SyncStore(RecordMac(hsm)),
        site=settings.site,
        age_limit_s=settings.peer_age_hours * 3600,
        broken_glass=glass.to_serve,
        clock=now,
    )
    return Agreement(parts)


def _synced(database: Database, keys: VoiceKeys, tenant: str, voice: UUID) -> bool:
    """Whether every site has signed for the voice's newest key."""
    with durable(database, tenant) as transaction:
        return bool(keys.current(transaction, voice).synced)


def _readiness(database: Database, hsm: Hsm, store: PolicyStore) -> Readiness:
    aad = canonical("canary")

    def unwraps() -> None:
        """Under the newest master that this worker serves: a key is made, sealed with, unwrapped and opened with."""
        master = hsm.masters()[-1]
        with LockedBuffer(64) as plain, LockedBuffer(64) as opened:
            plain.view(0, 32)[:] = 1
            with hsm.new_dek(master) as dek:
                wrapped, sealed = dek.wrapped, dek.seal(plain, 32, aad)
            with hsm.open_dek(master, wrapped) as dek:
                dek.open_into(sealed, aad, opened)

    def writes() -> None:
        # A full disk still answers SELECT: a row of the guard is written like a request's, and swept like one.
        with durable(database) as transaction:
            store.consume_proof(transaction, VerifiedProof("readyz", str(uuid4()), int(time.time())))

    return Readiness({"hsm": unwraps, "database": writes, "log": LogMoves(database)})
