"""The use case: recordings of a consenting speaker become a sealed voice, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID, uuid4

import numpy as np

from keyvault.database import Database
from keyvault.keys import VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef
from policies.errors import GrantMismatch
from policies.grants import Grant, Purpose
from policies.registry import Registry
from policies.store import durable
from voiceprints.activity import Activity
from voiceprints.decoding import Samples, checked_samples
from voiceprints.embedding import BYTES, SIZE, Vector, centre
from voiceprints.encoder import Encoder
from voiceprints.errors import ConditioningInvalid
from voiceprints.memory import LockedMemory, Scratch
from voiceprints.quality import ENROLMENT, Quality, QualityLimits, measured, speaker_agreement
from voiceprints.sealing import Binding, Sealer, seal
from voiceprints.store import RowKind, SealedRow, VoiceprintStore

_ALIGNED = 64 * 8  # what the views lose to alignment


class Conditioner(Protocol):
    """What an engine measures of a speaker, to speak in the voice's colour later (`synth.engine.Engine`)."""

    @property
    def conditioning_size(self) -> int:
        """How many float32 numbers."""

    @property
    def model_id(self) -> str:
        """Name and content hash; stands in the AAD."""

    def measure(self, samples: Samples, out: Vector, scratch: Scratch) -> None:
        """From 16 kHz mono speech, write the numbers into `out` [conditioning_size]."""


@dataclass(frozen=True)
class EnrolledVoice:
    """A voice that is now on disk under seal."""

    voice_id: UUID
    name: str
    key: KeyRef
    quality: Quality


@dataclass(frozen=True)
class _Measured:
    window: LockedBuffer
    embedding: Vector
    conditioning: Vector
    quality: Quality


class Enrolment:
    """Enrols voices. Safe from any thread."""

    def __init__(
        self,
        *,
        database: Database,
        keys: VoiceKeys,
        registry: Registry,
        memory: LockedMemory,
        activity: Activity,
        encoder: Encoder,
        conditioner: Conditioner,
        limits: QualityLimits = ENROLMENT,
        scratch_bytes: int = 1 << 20,
    ) -> None:
        """`scratch_bytes`: locked memory for the conditioner's own arrays."""
        self._database = database
        self._keys = keys
        self._registry = registry
        self._memory = memory
        self._activity = activity
        self._encoder = encoder
        self._conditioner = conditioner
        self._limits = limits
        self._scratch_bytes = scratch_bytes
        self._store = VoiceprintStore()

    def enrol(self, recordings: Sequence[Samples], name: str, grant: Grant) -> EnrolledVoice:
        """Measure, seal and register one speaker's recordings (16 kHz mono) under the consent that the grant names.

        Key, rows and voice are written in one transaction; on any failure nothing is left, in the clear or sealed. Raises
        GrantMismatch, InvalidSamples, EmptyAudio, QualityRefused (with every gate that failed), EmbeddingInvalid,
        ConditioningInvalid, LockedMemoryExhausted, and what the key vault and the registry raise.
        """
        grant.require(Purpose.ENROL)
        if grant.token.consent is None:
            raise GrantMismatch("the grant names no consent")
        voice, tenant = uuid4(), grant.token.tenant
        found = [self._activity.speech(checked_samples(samples)) for samples in recordings]
        quality = measured(recordings, found)
        quality.require(self._limits)
        speech = [part.only(samples) for part, samples in zip(found, recordings, strict=True) if part.segments]
        with self._memory.buffer(self._room(speech)) as buffer:
            values = self._measured(speech, buffer, quality)
            with durable(self._database, tenant) as transaction, self._keys.create(transaction, tenant=tenant, voice=voice) as key:
                self._store.add(transaction, self._sealed(key, key.ref, values, tenant, voice))
                self._registry.register_voice(
                    transaction, voice_id=voice, tenant=tenant, name=name, consent_id=grant.token.consent, key=key.ref
                )
        return EnrolledVoice(voice, name, key.ref, values.quality)

    def _room(self, speech: Sequence[Samples]) -> int:
        numbers = 4 * self._conditioner.conditioning_size
        return max(BYTES, numbers) + BYTES + numbers + self._encoder.locked_bytes(speech) + self._scratch_bytes + _ALIGNED

    def _measured(self, speech: Sequence[Samples], buffer: LockedBuffer, quality: Quality) -> _Measured:
        size = self._conditioner.conditioning_size
        buffer.array(max(SIZE, size))  # the first bytes: the window that values pass through to the token
        embedding, conditioning = buffer.array(SIZE), buffer.array(size)
        windows = self._encoder.windows(speech, buffer.array)
        quality = quality.with_agreement(speaker_agreement(windows))
        quality.require(self._limits)
        centre(windows, embedding)
        self._conditioner.measure(np.concatenate(speech), conditioning, buffer.array)
        if not np.isfinite(conditioning).all():
            raise ConditioningInvalid
        return _Measured(buffer, embedding, conditioning, quality)

    def _sealed(self, key: Sealer, ref: KeyRef, values: _Measured, tenant: str, voice: UUID) -> list[SealedRow]:
        now = datetime.now(UTC)
        rows = []
        for kind, numbers, model in (
            (RowKind.EMBEDDING, values.embedding, self._encoder.model_id),
            (RowKind.CONDITIONING, values.conditioning, self._conditioner.model_id),
        ):
            binding = Binding(tenant, voice, kind, ref.id, ref.version, model)
            sealed = seal(key, numbers, values.window, binding)
            rows.append(SealedRow(voice, kind, tenant, ref.id, ref.version, model, sealed, now))
        return rows
