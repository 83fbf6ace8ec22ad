"""The use case: is this the voice? Answers a band; the score stays inside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from policies.grants import Grant, Purpose
from voiceprints.activity import Activity
from voiceprints.decoding import Samples, checked_samples
from voiceprints.embedding import BYTES, SIZE, centre, cosine
from voiceprints.encoder import Encoder
from voiceprints.errors import ModelMismatch
from voiceprints.memory import LockedMemory
from voiceprints.opening import OpenVoices
from voiceprints.quality import PROBE, QualityLimits, measured, speaker_agreement

_ALIGNED = 64 * 4


class Band(StrEnum):
    """What a caller learns."""

    MATCH = "match"
    UNCERTAIN = "uncertain"
    NO_MATCH = "no_match"


@dataclass(frozen=True)
class Bands:
    """Cosines at which the answer changes: `match` and above, below `no_match`, and uncertain between.

    Measured for GE2E on LibriSpeech test-other: enrolled on three utterances, equal errors at 0.819; one utterance against
    one, at 0.750.
    """

    match: float = 0.82
    no_match: float = 0.75

    def of(self, similarity: float) -> Band:
        """The band of a cosine. What is not a number is no match."""
        if similarity >= self.match:
            return Band.MATCH
        return Band.UNCERTAIN if similarity >= self.no_match else Band.NO_MATCH


class Matching:
    """Compares a probe with one enrolled voice. Safe from any thread."""

    def __init__(
        self,
        *,
        voices: OpenVoices,
        memory: LockedMemory,
        activity: Activity,
        encoder: Encoder,
        limits: QualityLimits = PROBE,
        bands: Bands | None = None,
    ) -> None:
        self._voices = voices
        self._memory = memory
        self._activity = activity
        self._encoder = encoder
        self._limits = limits
        self._bands = bands or Bands()

    def compare(self, probe: Samples, voice: UUID, grant: Grant, *, purpose: Purpose = Purpose.COMPARE) -> Band:
        """The band of a probe (16 kHz mono) against `voice`, which the grant must name for comparing, or for what `purpose` says.

        The probe is measured first, so that the voice is open for one dot product. Raises QualityRefused, ModelMismatch, and
        what `OpenVoices.opened` raises.
        """
        grant.require(purpose, voice=voice)
        found = self._activity.speech(checked_samples(probe))
        quality = measured([probe], [found])
        quality.require(self._limits)
        speech = [found.only(probe)]
        with self._memory.buffer(BYTES + self._encoder.locked_bytes(speech) + _ALIGNED) as buffer:
            embedding = buffer.array(SIZE)
            windows = self._encoder.windows(speech, buffer.array)
            quality.with_agreement(speaker_agreement(windows)).require(self._limits)
            centre(windows, embedding)
            with self._voices.opened(voice, grant, scratch_bytes=0) as known:
                if known.embedding_model != self._encoder.model_id:
                    raise ModelMismatch
                return self._bands.of(cosine(embedding, known.embedding))
