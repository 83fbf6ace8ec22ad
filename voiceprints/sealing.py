"""Numbers under seal: AES-256-GCM in the token, bound to whose they are and what they are.

Plaintext: the numbers as little-endian float32, nothing else. The additional data names tenant, voice, row kind, DEK id,
DEK version and model; a row that is moved, swapped or renamed does not open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import numpy as np

from keyvault.errors import SealBroken
from keyvault.hsm import Sealed
from keyvault.locked import LockedBuffer
from keyvault.records import canonical
from voiceprints.embedding import Vector
from voiceprints.store import RowKind, SealedRow

OVERHEAD = 28
"""Bytes of nonce and tag around the ciphertext."""

_DOMAIN = "voiceprint-row"


class Sealer(Protocol):
    """A voice's new key, for sealing (`keyvault.keys.NewVoiceKey`)."""

    def seal(self, buffer: LockedBuffer, length: int, aad: bytes) -> bytes:
        """AES-256-GCM of the buffer's first `length` bytes: nonce(12) | ciphertext | tag(16)."""


@dataclass(frozen=True)
class Binding:
    """What a sealed row is bound to."""

    tenant: str
    voice: UUID
    kind: RowKind
    dek_id: UUID
    dek_version: int
    model_id: str

    @property
    def aad(self) -> bytes:
        """The additional authenticated data, unambiguous."""
        return canonical(_DOMAIN, self.tenant, self.voice, self.kind.value, self.dek_id, self.dek_version, self.model_id)


def seal(key: Sealer, numbers: Vector, window: LockedBuffer, binding: Binding) -> bytes:
    """Seal `numbers` [n]; they pass through the first bytes of `window`, which are zero again afterwards."""
    passing = window.view(0, numbers.nbytes)
    try:
        np.copyto(passing.view("<f4"), numbers)
        return key.seal(window, numbers.nbytes, binding.aad)
    finally:
        passing.fill(0)


def count(row: SealedRow) -> int:
    """How many numbers a row holds, by the length of its seal. Raises SealBroken for a length that none has."""
    length = len(row.sealed) - OVERHEAD
    if length <= 0 or length % 4:
        raise SealBroken("a sealed row has an impossible length")
    return length // 4


def place(row: SealedRow, *, tenant: str, voice: UUID, kind: RowKind, target: LockedBuffer) -> tuple[Sealed, Vector]:
    """What to open, and the view [n] of `target` that it will stand in. Tenant, voice and kind are what the caller asked for,
    not what the row says. Raises SealBroken for a length that none has."""
    binding = Binding(tenant, voice, kind, row.dek_id, row.dek_version, row.model_id)
    numbers: Vector = target.array(count(row), "<f4")
    return Sealed(row.sealed, binding.aad, target, numbers.ctypes.data - target.address), numbers
