"""The use case: did this voice's speaker say these digits just now? Answers with nothing, or refuses.

What it does not tell: whether a living person spoke. Who plays back spliced recordings, speaks through another voice live, or has
speech synthesised that says the digits, passes as far as the comparison lets him.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from threading import BoundedSemaphore
from uuid import UUID

from keyvault.database import Database
from policies.errors import GrantMismatch
from policies.grants import Grant, Purpose
from policies.liveness import DIGITS, Challenge, Owner
from policies.store import PolicyStore, durable
from voiceprints.decoding import RATE, Samples, checked_samples
from voiceprints.digits import spoken_digits
from voiceprints.errors import AudioTooLong, NotFresh, NotLive, RecordingUsed
from voiceprints.matching import Band, Matching

Hear = Callable[[Samples, int], str]
LONGEST_S = 20
"""Seconds of an answer. Six digits take three; what takes longer to hear than a token lives could open nothing any more."""
AT_ONCE = 2
"""Recordings that one worker listens to at once: each keeps a core busy."""


def owner_of(grant: Grant) -> Owner:
    """Whose challenge a grant is about. Raises GrantMismatch for one that names no voice."""
    if grant.token.voice is None:
        raise GrantMismatch("the grant names no voice")
    return Owner(grant.token.tenant, grant.token.client_id, grant.token.voice)


@dataclass(frozen=True)
class Presence:
    """Hears answers to challenges. Safe from any thread. `hear`: the digits that a recording says, as so many."""

    database: Database
    store: PolicyStore
    matching: Matching
    clock: Callable[[], float]
    hear: Hear = spoken_digits
    turns: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(AT_ONCE), repr=False)

    def require(self, recording: Samples, challenge: Challenge, grant: Grant) -> None:
        """The recording (16 kHz mono) says the challenge's digits in the voice that the grant names, and came for the first time.

        It is used up before anything is heard, whatever comes of it; the voice is opened last, as for a comparison. Only the
        band `match` passes. Raises AudioTooLong, NotFresh, RecordingUsed, NotLive, what `spoken_digits` and `Matching.compare`
        raise, and AuditUnavailable.
        """
        owner = owner_of(grant)
        grant.require(Purpose.LIVENESS, voice=owner.voice)
        seconds = len(checked_samples(recording)) / RATE
        if seconds > LONGEST_S:
            raise AudioTooLong(f"an answer has at most {LONGEST_S} seconds")
        if seconds > self.clock() - challenge.asked_at + 1:  # asked_at is a whole second, rounded down
            raise NotFresh
        self._use_up(recording, owner.tenant, owner.voice)
        with self.turns:
            said = self.hear(recording, DIGITS)
        if said != challenge.digits:
            raise NotLive("digits")
        if self.matching.compare(recording, owner.voice, grant, purpose=Purpose.LIVENESS) is not Band.MATCH:
            raise NotLive("voice")

    def _use_up(self, recording: Samples, tenant: str, voice: UUID) -> None:
        with durable(self.database, tenant) as transaction:
            fresh = self.store.use_recording(transaction, voice, sha256(recording.tobytes()).digest())
        if not fresh:
            raise RecordingUsed
