"""A voice's keys: made, found, opened. Nothing of a key is stored unless the whole block that used it succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from uuid import UUID, uuid4

from keyvault.database import Transaction
from keyvault.errors import HsmUnavailable, KeyCompromised, KeyDestroyed, KeyNotFound, RowChanged
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import DEFAULT_RING, NewDek, RingMaster, Sealed, SiteHsm
from keyvault.lifecycle import PendingUse
from keyvault.locked import LockedBuffer
from keyvault.records import KeyRef, RecordMac, RingVersion, WrappedKey, canonical
from keyvault.rings import Rings
from keyvault.states import KeyState, KeyUse, require_use
from keyvault.store import KeyStore
from keyvault.sync.errors import AwaitingSync


@dataclass(frozen=True)
class NewVoiceKey:
    """A voice's key version while it is being made: seal with it before the block ends."""

    ref: KeyRef
    _dek: NewDek

    def seal(self, buffer: LockedBuffer, length: int, aad: bytes) -> bytes:
        """AES-256-GCM of the buffer's first `length` bytes, in the token: nonce(12) | ciphertext | tag(16)."""
        return self._dek.seal(buffer, length, aad)


@dataclass(frozen=True)
class FoundKey(WrappedKey):
    """A stored key as it was found in one transaction, with the state of the ring version that wraps it (None: there is none).

    Nothing is opened by a key that was found in another way, or long ago: a state that changed since is not seen.
    """

    ring_state: KeyState | None = None

    @cached_property
    def record(self) -> bytes:
        """What the MAC covers: made once for the check when the key is found and the one before it opens."""
        return canonical(WrappedKey.DOMAIN, *self.fields)

    @classmethod
    def of(cls, key: WrappedKey, ring_state: KeyState | None) -> FoundKey:
        """`key` beside the state that was just read."""
        return cls(**{field.name: getattr(key, field.name) for field in fields(key)}, ring_state=ring_state)


class VoiceKeys:
    """Voiceprint keys over an HSM and the caller's transactions.

    `receipts`: a key is used only once every site has signed for it. `site` is this site's name, for what is said of it.
    """

    def __init__(
        self,
        hsm: SiteHsm,
        store: KeyStore,
        recorder: Recorder,
        mac: RecordMac,
        *,
        ring: str = DEFAULT_RING,
        receipts: bool = False,
        site: str = "",
    ) -> None:
        self._hsm = hsm
        self._store = store
        self._recorder = recorder
        self._mac = mac
        self._ring = ring
        self._receipts = receipts
        self._here = f"site {site}'s token" if site else "this token"
        self._sought: set[tuple[RingMaster, int]] = set()
        self._pending = PendingUse(recorder, lambda: datetime.now(UTC))
        self.rings = Rings(hsm, store, recorder, mac)

    @contextmanager
    def create(self, transaction: Transaction, *, tenant: str, voice: UUID) -> Iterator[NewVoiceKey]:
        """Make the voice's next key version under the ring's active master; use it inside the block.

        When the block succeeds, the wrapped key and the event `key.created` are written into `transaction`; when it raises,
        nothing is. Until then the master's state can't change. Raises KeyNotFound, KeyStateForbids or RecordTampered for the
        ring, HsmUnavailable where the token lacks the master, RowChanged if another transaction made this voice's next version
        first.
        """
        master = self.rings.active(transaction, self._ring)
        self._require_sealing(transaction, master)
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

    def current(self, transaction: Transaction, voice: UUID) -> FoundKey:
        """The voice's newest version, and never an older one instead. Raises KeyNotFound, RecordTampered."""
        return self._found(transaction, self._store.key_and_ring(transaction, voice=voice), f"voice {voice}")

    def get(self, transaction: Transaction, dek_id: UUID) -> FoundKey:
        """Exactly this key version. Raises KeyNotFound, RecordTampered."""
        return self._found(transaction, self._store.key_and_ring(transaction, dek_id=dek_id), f"key {dek_id}")

    def open(
        self,
        key: FoundKey,
        sealed: Sequence[Sealed],
        check: Callable[[], None],
        *,
        break_glass: Callable[[], None] | None = None,
    ) -> None:
        """Open what is sealed under the key, in one visit to the token: record MAC, states, receipts, then `check()`, then
        C_UnwrapKey. No key is in the token when this returns or raises.

        `break_glass` opens under a compromised master too, if it returns: it raises unless officers permitted exactly that.
        Raises RecordTampered, KeyStateForbids (KeyCompromised, KeyDestroyed), AwaitingSync, what `check` raises, KeyNotFound
        naming site and version where the token has no such master, UnwrapRejected, SealBroken. Zeros then stand in the places.
        """
        master = RingMaster(key.ref.ring, key.ref.ring_version)
        broken = key.ring_state is KeyState.COMPROMISED and break_glass is not None
        if broken and break_glass is not None:
            break_glass()  # before the visit: it looks up approvals, whose MACs are made in the token too

        def permit(mac: bytes) -> None:
            RecordMac.require(mac, key.mac, WrappedKey.DOMAIN)
            require_use(key.state, KeyUse.OPEN)
            if self._receipts and not key.synced:
                raise AwaitingSync(f"not every site has signed for version {key.ref.version} of this voice's key")
            if not broken:
                self._require_opening(master, key.ring_state)
            if master not in self._hsm.masters():
                raise KeyNotFound(f"{self._here} does not hold {master.label}")
            check()

        self._hsm.open_recorded(master, key.blob, sealed, key.record, permit)

    def _found(self, transaction: Transaction, found: tuple[WrappedKey, RingVersion | None] | None, wanted: str) -> FoundKey:
        if found is None:
            raise KeyNotFound(f"no key for {wanted}")
        stored, row = found
        key = FoundKey.of(stored, None if row is None else row.state)
        self._mac.check_bytes(key.mac, WrappedKey.DOMAIN, key.record)
        if row is None:
            return key
        self._mac.check(row.mac, RingVersion.DOMAIN, *row.fields)
        self._pending.note(transaction, row)
        if row.state in _OPENED:
            self._seek(transaction, RingMaster(row.ring, row.version), row)
        return key

    def _require_opening(self, master: RingMaster, state: KeyState | None) -> None:
        match state:
            case None:
                raise KeyNotFound(f"{master.label} is no version that this site knows")
            case KeyState.COMPROMISED:
                raise KeyCompromised(f"{master.label} is compromised; nothing opens under it without broken glass")
            case KeyState.DESTROYED:
                raise KeyDestroyed(f"{master.label} is destroyed at every site")
            case _:
                require_use(state, KeyUse.OPEN)

    def _require_sealing(self, transaction: Transaction, master: RingMaster) -> None:
        """The master is active until `transaction` ends, and in this token."""
        row = self._store.hold_ring_version(transaction, master)
        if row is None:
            raise RowChanged(f"{master.label} was changed by another transaction")
        self._mac.check(row.mac, RingVersion.DOMAIN, *row.fields)
        require_use(row.state, KeyUse.SEAL)
        self._seek(transaction, master, row)
        if master not in self._hsm.masters():
            raise HsmUnavailable(f"{master.label} serves, and {self._here} does not hold it")

    def _seek(self, transaction: Transaction, master: RingMaster, row: RingVersion) -> None:
        """Look into the token again for a master that this process does not serve yet: once for each version of its row."""
        if master in self._hsm.masters() or (master, row.row_version) in self._sought:
            return
        self._hsm.refresh(self.rings.known(transaction), ())
        self._sought.add((master, row.row_version))  # after it: a look that failed was none


_OPENED = frozenset({KeyState.ACTIVE, KeyState.DEACTIVATED, KeyState.COMPROMISED})
"""States in which a version's keys can still be opened by somebody."""
