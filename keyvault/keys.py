"""A voice's keys: made, found, opened. Nothing of a key is stored unless the whole block that used it succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

from keyvault.database import Transaction
from keyvault.errors import KeyNotFound
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import Hsm, NewDek, OpenDek, RingMaster
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef, RecordMac, WrappedKey
from keyvault.rings import Rings
from keyvault.states import KeyState, KeyUse, require_use
from keyvault.store import KeyStore

DEFAULT_RING = "main"


@dataclass(frozen=True)
class NewVoiceKey:
    """A voice's key version while it is being made: seal with it before the block ends."""

    ref: KeyRef
    _dek: NewDek

    def seal(self, buffer: LockedBuffer, length: int, aad: bytes) -> bytes:
        """AES-256-GCM of the buffer's first `length` bytes, in the token: nonce(12) | ciphertext | tag(16)."""
        return self._dek.seal(buffer, length, aad)


class VoiceKeys:
    """Voiceprint keys over an HSM and the caller's transactions."""

    def __init__(self, hsm: Hsm, store: KeyStore, recorder: Recorder, mac: RecordMac, *, ring: str = DEFAULT_RING) -> None:
        self._hsm = hsm
        self._store = store
        self._recorder = recorder
        self._mac = mac
        self._ring = ring
        self.rings = Rings(hsm, store, recorder, mac)

    @contextmanager
    def create(self, transaction: Transaction, *, tenant: str, voice: UUID) -> Iterator[NewVoiceKey]:
        """Make the voice's next key version under the serving master; use it inside the block.

        When the block succeeds, the wrapped key and the event `key.created` are written into `transaction`; when it raises,
        nothing is. Raises KeyNotFound, KeyStateForbids or RecordTampered for the ring, RowChanged if another transaction
        made this voice's next version first.
        """
        master = self.rings.serving(transaction, self._ring)
        newest = self._store.newest_key(transaction, voice)
        version = 1 if newest is None else newest.ref.version + 1
        ref = KeyRef(uuid4(), version, master.ring, master.version)
        with self._hsm.new_dek(master) as dek:
            yield NewVoiceKey(ref, dek)
            blob = dek.wrapped
        key = WrappedKey(ref, tenant, voice, KeyState.ACTIVE, blob, datetime.now(UTC), master.version)
        self._store.add_key(transaction, replace(key, mac=self._mac.make(WrappedKey.DOMAIN, *key.fields)))
        facts: dict[str, str | int] = {"dek": str(ref.id), "voice": str(voice), "tenant": tenant, "version": version}
        facts |= {"ring": master.ring, "ring_version": master.version}
        self._recorder.record(transaction, KeyEvent("key.created", facts))

    def current(self, transaction: Transaction, voice: UUID) -> WrappedKey:
        """The voice's newest version, and never an older one instead. Raises KeyNotFound, RecordTampered."""
        return self._checked(self._store.newest_key(transaction, voice), f"voice {voice}")

    def get(self, transaction: Transaction, dek_id: UUID) -> WrappedKey:
        """Exactly this key version. Raises KeyNotFound, RecordTampered."""
        return self._checked(self._store.key(transaction, dek_id), f"key {dek_id}")

    @contextmanager
    def open(self, key: WrappedKey, check: Callable[[], None]) -> Iterator[OpenDek]:
        """Unwrap in the token for the length of the block: record MAC, then state, then `check()`, then C_UnwrapKey.

        Raises RecordTampered, KeyStateForbids, what `check` raises, KeyNotFound (no such master here), UnwrapRejected.
        """
        self._mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
        require_use(key.state, KeyUse.OPEN)
        with self._hsm.open_dek(RingMaster(key.ref.ring, key.ref.ring_version), key.blob, check) as dek:
            yield dek

    def _checked(self, key: WrappedKey | None, wanted: str) -> WrappedKey:
        if key is None:
            raise KeyNotFound(f"no key for {wanted}")
        self._mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
        return key
