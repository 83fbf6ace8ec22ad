"""The use case: a new key for one voice. Its rows are opened and sealed again inside one locked buffer, for a maintenance grant.

Order: what is about to happen is on record before anything is opened; rows, new wrapped key and the voice's row then change in
one transaction, in which the old key version is destroyed too. A crash leaves the voice as it was or as it is to be. Whoever
erases, seals again or re-wraps the voice meanwhile is noticed, and then nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from keyvault.database import Database, Transaction
from keyvault.errors import RowChanged
from keyvault.events import KeyEvent, Recorder
from keyvault.keys import FoundKey, NewVoiceKey, VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef
from keyvault.tombstones import Tombstones
from policies.authority import Voice
from policies.errors import VoiceUnknown
from policies.grants import MaintenanceGrant
from policies.store import PolicyStore, durable
from voiceprints.embedding import Vector
from voiceprints.memory import LockedMemory
from voiceprints.opening import sealed_voice
from voiceprints.sealing import Binding, count, place, seal
from voiceprints.store import SealedRow, VoiceprintStore

_ALIGNED = 64 * 4  # what the views lose to alignment


class Resealing:
    """Gives voices new keys, one at a time. Only for a process that keeps the rules of a vault: hardened, memory locked."""

    def __init__(
        self,
        *,
        database: Database,
        keys: VoiceKeys,
        tombstones: Tombstones,
        policies: PolicyStore,
        recorder: Recorder,
        memory: LockedMemory,
        clock: Callable[[], float],
        break_glass: Callable[[FoundKey], None] | None = None,
    ) -> None:
        """`break_glass` returns where officers let a key under a compromised version open now, and raises otherwise: the grant
        alone opens none."""
        self._break_glass = break_glass
        self._database, self._keys, self._tombstones, self._policies = database, keys, tombstones, policies
        self._recorder, self._memory, self._clock = recorder, memory, clock
        self._store = VoiceprintStore()

    def reseal(self, voice: UUID, grant: MaintenanceGrant) -> KeyRef:
        """Seal the voice under a new key and destroy the old one; returns the new key version, durable.

        Tokens for the old version are refused from then on. Raises GrantExpired, GrantMismatch, VoiceUnknown, RowChanged
        where somebody else changed the voice meanwhile, what `OpenVoices.opened` raises for a voice that does not open, and
        AuditUnavailable. Nothing has changed then.
        """
        grant.recheck(self._now(), voice=voice)
        known, rows, key = self._begun(voice, grant)
        numbers = [count(row) for row in rows]
        room = 4 * (max(numbers) + sum(numbers)) + _ALIGNED
        with self._memory.buffer(room) as buffer:
            buffer.array(max(numbers))  # the first bytes: the window that values pass through to the token
            glass = None if self._break_glass is None else partial(self._break_glass, key)
            places = [place(row, tenant=known.tenant, voice=voice, kind=row.kind, target=buffer) for row in rows]
            parts, opened = [part for part, _ in places], [numbers for _, numbers in places]
            self._keys.open(key, parts, lambda: grant.recheck(self._now(), voice=voice), break_glass=glass)
            with durable(self._database) as transaction:
                self._tombstones.lock(transaction, voice)
                with self._keys.create(transaction, tenant=known.tenant, voice=voice) as new:
                    self._require_unchanged(transaction, known, rows, key)
                    sealed = [self._sealed(new, row, part, buffer) for row, part in zip(rows, opened, strict=True)]
                    self._store.replace(transaction, voice, sealed)
                    self._policies.swap(transaction, known, replace(known, dek_id=new.ref.id, key_version=new.ref.version))
                self._finish(transaction, known, new.ref, grant)
        return new.ref

    def _begun(self, voice: UUID, grant: MaintenanceGrant) -> tuple[Voice, tuple[SealedRow, SealedRow], FoundKey]:
        """The voice as it is, still sealed, once it is on record that it will be opened for this job."""
        with durable(self._database) as transaction:
            known = self._policies.voice_anywhere(transaction, voice)
            if known is None:
                raise VoiceUnknown()
            embedding, conditioning, key = sealed_voice(transaction, self._store, self._keys, known.tenant, voice)
            facts: dict[str, str | int] = {"voice": str(voice), "tenant": known.tenant, "dek": str(key.ref.id)}
            facts |= {"version": key.ref.version, "job": grant.job, "approved_by": " ".join(grant.approved_by)}
            self._recorder.record(transaction, KeyEvent("voice.resealing", facts))
        return known, (embedding, conditioning), key

    def _require_unchanged(self, transaction: Transaction, known: Voice, rows: tuple[SealedRow, SealedRow], key: FoundKey) -> None:
        """What was opened is still what is stored; a key that was only re-wrapped is the same key. Raises RowChanged."""
        embedding, conditioning, current = sealed_voice(transaction, self._store, self._keys, known.tenant, known.voice_id)
        if (embedding, conditioning) != rows or (current.ref.id, current.ref.version) != (key.ref.id, key.ref.version):
            raise RowChanged(f"voice {known.voice_id} was changed while it was sealed again")

    def _sealed(self, new: NewVoiceKey, row: SealedRow, numbers: Vector, window: LockedBuffer) -> SealedRow:
        binding = Binding(row.tenant, row.voice_id, row.kind, new.ref.id, new.ref.version, row.model_id)
        sealed = seal(new, numbers, window, binding)
        return replace(row, dek_id=new.ref.id, dek_version=new.ref.version, sealed=sealed, created_at=self._now())

    def _finish(self, transaction: Transaction, known: Voice, new: KeyRef, grant: MaintenanceGrant) -> None:
        """Destroy the versions before, and put on record what was done."""
        about: dict[str, str | int] = {"voice": str(known.voice_id), "tenant": known.tenant}
        for old in self._tombstones.retire_older(transaction, known.voice_id, new.version):
            event = KeyEvent("key.destroyed", about | {"dek": str(old.ref.id), "version": old.ref.version})
            self._recorder.record(transaction, event)
        done = about | {"dek": str(new.id), "version": new.version, "job": grant.job}
        self._recorder.record(transaction, KeyEvent("voice.resealed", done))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)
