"""What comes into a vault worker with a request, and what goes out."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from policies.gate import Call
from policies.grants import Purpose
from synth.scheduler import Turn


@dataclass(frozen=True, repr=False)
class Credentials:
    """What came with a request: method and path as called, what the client signed, the certificate that the edge reports.

    `proof` is None where there is no DPoP header.
    """

    method: str
    path: str
    scheme: str
    token: str
    proof: str | None
    certificate: bytes | None

    def call(self, purpose: Purpose, **binding: Any) -> Call:
        return Call(
            method=self.method,
            path=self.path,
            scheme=self.scheme,
            token=self.token,
            proof=self.proof,
            certificate_der=self.certificate,
            purpose=purpose,
            **binding,
        )


@dataclass(frozen=True)
class Done:
    """An answer and the audit entry it stands under."""

    intent_id: UUID
    answer: dict[str, Any]


@dataclass(frozen=True)
class SpokenAudio:
    """Finished speech. `skipped`: how many words or characters could not be voiced."""

    intent_id: UUID
    audio: bytes = field(repr=False)
    skipped: int


class Listener:
    """Whoever waits for speech, and may leave while it is made. Called from the event loop and from the speaking thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        self._left = False

    def attend(self, turn: Turn) -> None:
        """This turn speaks for the listener: it ends when they leave, or at once if they have."""
        with self._lock:
            self._turn = turn
            if self._left:
                turn.cancel()

    def leave(self) -> None:
        """Nobody listens any more: no further sentence is begun."""
        with self._lock:
            self._left = True
            if self._turn is not None:
                self._turn.cancel()
