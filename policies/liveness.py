"""Liveness: a nonce of random digits that a voice's speaker says aloud within a minute, and the pass for who did.

Neither is stored: a challenge and a pass are short texts under the record MAC, bound to one client and one voice, so every
worker of a site knows them and another site's are refused. What makes each work once is the gate, which uses the nonce up in
the transaction that admits the request: the challenge with the recording, the pass with the token that names its nonce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from keyvault.errors import RecordTampered
from keyvault.records import RecordMac
from policies import jws
from policies.errors import LivenessExpired, LivenessInvalid
from policies.grants import CLOCK_TOLERANCE_S

DIGITS = 6
"""How many are asked for: a recording made before says them by chance once in a million."""
WINDOW_S = 60
"""How long a challenge may be answered, and then how long a token may be asked for with the pass."""
CHALLENGE, PASS = "liveness.challenge", "liveness.pass"
"""What a nonce is used up as: each once."""

_ID, _TIME, _MAC = 16, 8, 16


@dataclass(frozen=True)
class Owner:
    """Whose a challenge or a pass is: one client, for one voice."""

    tenant: str
    client_id: str
    voice: UUID


@dataclass(frozen=True)
class Challenge:
    """Digits to be said. `text` is what the client sends back with the recording; `asked_at` in seconds since 1970."""

    id: UUID
    digits: str
    asked_at: int
    text: str

    @property
    def expires_at(self) -> int:
        return self.asked_at + WINDOW_S


@dataclass(frozen=True, repr=False)
class Pass:
    """What shows that a challenge was answered. `text` goes into the request for a token, until `expires_at`."""

    id: UUID
    expires_at: int
    text: str


class Liveness:
    """Gives challenges and passes out, and reads them. Any thread."""

    def __init__(self, mac: RecordMac, random: Callable[[int], bytes], clock: Callable[[], float]) -> None:
        """`random`: so many bytes from the HSM."""
        self._mac, self._random, self._clock = mac, random, clock

    def ask(self, owner: Owner) -> Challenge:
        """New digits, all equally likely."""
        nonce, now = UUID(bytes=self._random(_ID)), int(self._clock())
        digits = f"{int.from_bytes(self._random(16)) % 10**DIGITS:0{DIGITS}}"
        mac = self._mac.make(CHALLENGE, *_fields(owner), nonce, now, digits)
        return Challenge(nonce, digits, now, jws.encode(nonce.bytes + now.to_bytes(_TIME) + digits.encode() + mac))

    def asked(self, text: str, owner: Owner) -> Challenge:
        """The challenge that this owner was given, and may still answer. Raises LivenessInvalid, LivenessExpired."""
        challenge = self.read(text, owner)
        self._require_now(challenge.asked_at)
        return challenge

    def read(self, text: str, owner: Owner) -> Challenge:
        """The challenge that this owner was given, however long ago: for one that was admitted. Raises LivenessInvalid."""
        data = _decoded(text, _ID + _TIME + DIGITS + _MAC)
        nonce, asked_at = _nonce(data)
        digits = data[_ID + _TIME : -_MAC].decode("ascii", "replace")
        self._check(data, CHALLENGE, *_fields(owner), nonce, asked_at, digits)
        return Challenge(nonce, digits, asked_at, text)

    def passed(self, challenge: Challenge, owner: Owner) -> Pass:
        """The pass for a challenge that was answered just now."""
        now = int(self._clock())
        mac = self._mac.make(PASS, *_fields(owner), challenge.id, now)
        return Pass(challenge.id, now + WINDOW_S, jws.encode(challenge.id.bytes + now.to_bytes(_TIME) + mac))

    def presented(self, text: str, owner: Owner) -> UUID:
        """The nonce of this owner's pass, while it lasts. Raises LivenessInvalid, LivenessExpired."""
        data = _decoded(text, _ID + _TIME + _MAC)
        nonce, passed_at = _nonce(data)
        self._check(data, PASS, *_fields(owner), nonce, passed_at)
        self._require_now(passed_at)
        return nonce

    def _check(self, data: bytes, domain: str, *fields: str | int | UUID) -> None:
        try:
            self._mac.check(data[-_MAC:], domain, *fields)
        except RecordTampered:
            raise LivenessInvalid() from None

    def _require_now(self, begins: int) -> None:
        if not begins - CLOCK_TOLERANCE_S <= self._clock() < begins + WINDOW_S:
            raise LivenessExpired()


def _fields(owner: Owner) -> tuple[str, str, UUID]:
    return owner.tenant, owner.client_id, owner.voice


def _decoded(text: str, length: int) -> bytes:
    # Looked at before it is decoded: a text of another length costs nothing, however long it is.
    if len(text) != -(-length * 4 // 3):
        raise LivenessInvalid()
    try:
        data = jws.decode(text)
    except ValueError:
        data = b""
    if len(data) != length:
        raise LivenessInvalid()
    return data


def _nonce(data: bytes) -> tuple[UUID, int]:
    return UUID(bytes=data[:_ID]), int.from_bytes(data[_ID : _ID + _TIME])
