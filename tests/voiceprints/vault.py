"""A whole small vault for tests: real token, real database, real models, and grants made by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import numpy as np
from hsm_fixtures import ServingToken

from keyvault.database import Database, Transaction
from keyvault.events import KeyEvent
from keyvault.keys import VoiceKeys
from keyvault.records import KeyRef, RecordMac
from keyvault.store import KeyStore
from policies.grants import Grant, Purpose, VerifiedProof, VerifiedToken
from policies.registry import Registry
from policies.store import PolicyStore
from voiceprints.activity import Activity
from voiceprints.encoder import Encoder
from voiceprints.enrolment import EnrolledVoice, Enrolment
from voiceprints.matching import Matching
from voiceprints.memory import LockedMemory, Scratch
from voiceprints.opening import OpenVoices

TENANT = "acme"


class SpectrumConditioner:
    """Measures a long-term spectrum: small, deterministic, and its numbers are as personal as an engine's."""

    conditioning_size = 48
    model_id = "spectrum/1"

    def measure(self, samples: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
        frames = samples[: len(samples) // 512 * 512].reshape(-1, 512)
        bands = scratch((self.conditioning_size,), np.float32)
        for frame in frames:
            bands += np.abs(np.fft.rfft(frame))[1:241].reshape(self.conditioning_size, 5).sum(axis=1)
        np.log1p(bands, out=out)


@dataclass
class EventList:
    events: list[KeyEvent] = field(default_factory=list)

    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        self.events.append(event)


class SmallVault:
    """Everything that enrols, opens and compares, joined as the service joins it."""

    def __init__(self, token: ServingToken, database: Database, activity: Activity, encoder: Encoder) -> None:
        self.database, self.hsm, self.now = database, token.hsm, time.time()
        mac = RecordMac(token.hsm)
        self.registry = Registry(PolicyStore(mac), self.clock)
        self.keys = VoiceKeys(token.hsm, KeyStore(), EventList(), mac)
        self.memory = LockedMemory(8 << 20, patience_s=0.2)
        self.conditioner = SpectrumConditioner()
        self.activity, self.encoder = activity, encoder
        self.enrolment = self.enrolling()
        self.voices = OpenVoices(database=database, keys=self.keys, memory=self.memory, clock=self.clock)
        self.matching = Matching(voices=self.voices, memory=self.memory, activity=activity, encoder=encoder)
        with database.begin() as transaction:
            self.keys.rings.register(transaction, token.hsm.masters()[0])
            self.consent = self.registry.record_consent(
                transaction,
                tenant=TENANT,
                subject="speaker",
                purposes=["speak", "compare"],
                territory=["DE"],
                expires_at=datetime.now(UTC) + timedelta(days=1),
                evidence="spoken",
            ).consent_id

    def clock(self) -> float:
        return self.now

    def enrolling(self, **changed: object) -> Enrolment:
        parts = {"keys": self.keys, "registry": self.registry, "conditioner": self.conditioner, "memory": self.memory} | changed
        return Enrolment(database=self.database, activity=self.activity, encoder=self.encoder, **parts)

    def enrol(self, recordings: Sequence[np.ndarray], name: str = "Anna") -> EnrolledVoice:
        return self.enrolment.enrol(recordings, name, self.grant(Purpose.ENROL, consent=self.consent))

    def grant(
        self, purpose: Purpose, voice: UUID | None = None, key: KeyRef | None = None, consent: UUID | None = None, **changed: object
    ) -> Grant:
        token = VerifiedToken(
            issuer="https://vault.test",
            jti=str(uuid4()),
            tenant=TENANT,
            client_id="client",
            purpose=purpose,
            voice=voice,
            key=key,
            consent=consent,
            text_sha256=None,
            max_chars=None,
            x5t_s256="thumbprint",
            jkt="key",
            issued_at=int(self.now),
            expires_at=int(self.now) + 5,
        )
        return Grant(replace(token, **changed), VerifiedProof("key", str(uuid4()), int(self.now)), uuid4(), ("policy",))

    def speak(self, voice: EnrolledVoice, **changed: object) -> Grant:
        return self.grant(Purpose.SPEAK, **{"voice": voice.voice_id, "key": voice.key} | changed)

    def compare(self, voice: EnrolledVoice, **changed: object) -> Grant:
        return self.grant(Purpose.COMPARE, **{"voice": voice.voice_id, "key": voice.key} | changed)
