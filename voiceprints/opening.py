"""Where a request finds a stored voiceprint in the clear: inside `with voices.opened(voice, grant)`.

The one other place is `resealing.py`, where a voice passes from one key to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from keyvault.database import Database, Transaction
from keyvault.errors import RecordTampered, SealBroken
from keyvault.keys import FoundKey, VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef
from policies.errors import GrantMismatch
from policies.grants import OPENING, Grant
from voiceprints.embedding import BYTES, SIZE, Vector, checked_embedding
from voiceprints.memory import LockedMemory, Scratch
from voiceprints.sealing import count, place
from voiceprints.store import RowKind, SealedRow, VoiceprintStore, reading

SCRATCH_BYTES = 2 << 20
"""Room for arrays that hold a voice's numbers while it speaks."""

_ALIGNED = 128  # what two views lose to alignment


@dataclass(frozen=True)
class OpenVoice:
    """A voice in the clear, for the length of one `with` block: both arrays are views of one locked buffer.

    `scratch` hands out views of a second one, taken when it is first asked: a voice that waits for its turn holds little.
    Never copy from any of them; all are zero when the block has ended.
    """

    key: KeyRef
    embedding: Vector = field(repr=False)
    embedding_model: str
    conditioning: Vector = field(repr=False)
    conditioning_model: str
    scratch: Scratch = field(repr=False)


class _Scratch:
    """Locked memory that is taken when the first array is asked for, and given back with everything that `held` holds."""

    def __init__(self, memory: LockedMemory, size: int, held: ExitStack) -> None:
        self._memory, self._size, self._held = memory, size, held
        self._buffer: LockedBuffer | None = None

    def __call__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        if self._buffer is None:
            self._buffer = self._held.enter_context(self._memory.buffer(self._size))
        return self._buffer.array(shape, dtype)


class OpenVoices:
    """Opens voices for granted requests. Safe from any thread."""

    def __init__(
        self,
        *,
        database: Database,
        keys: VoiceKeys,
        memory: LockedMemory,
        clock: Callable[[], float],
        break_glass: Callable[[FoundKey], None] | None = None,
    ) -> None:
        """`break_glass` returns where officers let a key under a compromised version open now, and raises otherwise."""
        self._break_glass = break_glass
        self._database = database
        self._keys = keys
        self._memory = memory
        self._clock = clock
        self._store = VoiceprintStore()

    @contextmanager
    def opened(self, voice: UUID, grant: Grant, *, scratch_bytes: int = SCRATCH_BYTES) -> Iterator[OpenVoice]:
        """Open `voice`, which the grant must name, to speak or to compare. Whatever happens in the block, it is wiped after.

        The key record's MAC is checked first, the grant again at the moment of C_UnwrapKey. Raises GrantMismatch,
        GrantExpired, VoiceprintMissing, VoiceprintsUnavailable, LockedMemoryExhausted, and from the key vault RecordTampered,
        KeyStateForbids, KeyNotFound, UnwrapRejected, SealBroken, HsmUnavailable. Nothing is open then.
        """
        if grant.token.purpose not in OPENING:
            raise GrantMismatch(f"a grant to {grant.token.purpose} opens no voice")
        grant.require(grant.token.purpose, voice=voice)
        tenant = grant.token.tenant
        embedding, conditioning, key = self._found(tenant, voice)
        room = BYTES + 4 * count(conditioning) + _ALIGNED
        with ExitStack() as held:
            buffer = held.enter_context(self._memory.buffer(room))
            glass = None if self._break_glass is None else partial(self._break_glass, key)
            first, numbers = place(embedding, tenant=tenant, voice=voice, kind=RowKind.EMBEDDING, target=buffer)
            second, colour = place(conditioning, tenant=tenant, voice=voice, kind=RowKind.CONDITIONING, target=buffer)
            self._keys.open(key, [first, second], lambda: grant.recheck(self._clock(), key=key.ref), break_glass=glass)
            yield OpenVoice(
                key.ref,
                checked_embedding(numbers),
                embedding.model_id,
                colour,
                conditioning.model_id,
                _Scratch(self._memory, scratch_bytes, held),
            )

    def _found(self, tenant: str, voice: UUID) -> tuple[SealedRow, SealedRow, FoundKey]:
        with reading(self._database, tenant) as transaction:
            return sealed_voice(transaction, self._store, self._keys, tenant, voice)


def sealed_voice(
    transaction: Transaction, store: VoiceprintStore, keys: VoiceKeys, tenant: str, voice: UUID
) -> tuple[SealedRow, SealedRow, FoundKey]:
    """The voice's embedding and conditioning, still sealed, and their key: all three say the same of each other.

    Raises VoiceprintMissing, KeyNotFound, RecordTampered, SealBroken.
    """
    embedding, conditioning = store.load(transaction, tenant, voice)
    key = keys.get(transaction, embedding.dek_id)
    # The key's record is under MAC, the rows are not: where they disagree, the rows were changed.
    if (key.tenant, key.voice) != (tenant, voice):
        raise RecordTampered("the voiceprint's rows name another voice's key")
    if {(row.dek_id, row.dek_version) for row in (embedding, conditioning)} != {(key.ref.id, key.ref.version)}:
        raise RecordTampered("the voiceprint's rows name another version of the key")
    if count(embedding) != SIZE:
        raise SealBroken("the sealed embedding has another size")
    return embedding, conditioning, key
