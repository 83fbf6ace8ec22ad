"""An `SiteHsm` that lets each key be used only from where `key_uses.py` says; anything else ends before the token is asked.

It guards against mistakes and against code that is led astray inside its own verb. It is no wall against code of an attacker in
the same process, which can name another place or call the module itself: that is said in `docs/threat-model.md`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from keyvault.errors import KeyUseRefused, UnwrapRejected
from keyvault.events import KeyEvent
from keyvault.hsm import Canary, Figures, KeyName, NewDek, OpenDek, RingMaster, Sealed, SiteHsm
from keyvault.key_uses import RING_MASTER, SYNC_ANCHOR, Place, Use, allowed, current_place

USE_REFUSED = "hsm.use_refused"
"""The event of a refusal: key, use and place, once in the life of a process for each of them."""


class GuardedHsm:
    """The token as one process may use it. `home` is where the process is outside any `acting`."""

    def __init__(self, hsm: SiteHsm, home: Place, refused: Callable[[KeyEvent], None]) -> None:
        """`refused` hears each refusal's event; it is called in the thread that asked, and must return soon and not raise."""
        self._hsm, self._home, self._refused = hsm, home, refused
        self._told: set[tuple[str, Use, Place]] = set()
        self._lock = threading.Lock()

    def require(self, key: str, use: Use) -> None:
        """Raise KeyUseRefused unless the place where this thread is may use the key so."""
        place = current_place() or self._home
        if allowed(key, use, place):
            return
        with self._lock:
            new = (key, use, place) not in self._told
            self._told.add((key, use, place))
        if new:
            self._refused(KeyEvent(USE_REFUSED, {"key": key, "use": use.value, "place": place.value}))
        raise KeyUseRefused(f"{key} may not {use.value} from {place}")

    # Uses

    def new_dek(self, master: RingMaster) -> AbstractContextManager[NewDek]:
        self.require(RING_MASTER, Use.WRAP)
        return self._hsm.new_dek(master)

    def open_dek(self, master: RingMaster, wrapped: bytes) -> AbstractContextManager[OpenDek]:
        self.require(RING_MASTER, Use.OPEN)
        return self._hsm.open_dek(master, wrapped)

    def open_recorded(
        self, master: RingMaster, wrapped: bytes, sealed: Sequence[Sealed], record: bytes, permit: Callable[[bytes], None]
    ) -> None:
        self.require(RING_MASTER, Use.OPEN)
        self.require(KeyName.RECORD_MAC, Use.MAC)
        self._hsm.open_recorded(master, wrapped, sealed, record, permit)

    def rewrap(self, wrapped: bytes, source: RingMaster, target: RingMaster) -> bytes:
        self.require(RING_MASTER, Use.REWRAP)
        return self._hsm.rewrap(wrapped, source, target)

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        self.require(RING_MASTER, Use.REWRAP)
        return self._hsm.rewrap_many(wrapped, source, target)

    def new_canary(self, master: RingMaster) -> AbstractContextManager[Canary]:
        self.require(RING_MASTER, Use.PROVE)
        return self._hsm.new_canary(master)

    def open_canary(self, master: RingMaster, blob: bytes) -> AbstractContextManager[Canary]:
        self.require(RING_MASTER, Use.PROVE)
        return self._hsm.open_canary(master, blob)

    def dek_mac(self, master: RingMaster, wrapped: bytes, data: bytes) -> bytes:
        self.require(RING_MASTER, Use.PROVE)
        return self._hsm.dek_mac(master, wrapped, data)

    def destroy_master(self, master: RingMaster) -> None:
        self.require(RING_MASTER, Use.DESTROY)
        self._hsm.destroy_master(master)

    def mac(self, key: KeyName, data: bytes) -> bytes:
        self.require(key, Use.MAC)
        return self._hsm.mac(key, data)

    def mac_many(self, key: KeyName, data: Sequence[bytes]) -> list[bytes]:
        self.require(key, Use.MAC)
        return self._hsm.mac_many(key, data)

    def sign(self, key: KeyName, data: bytes, version: int = 1) -> bytes:
        self.require(key, Use.SIGN)
        return self._hsm.sign(key, data, version)

    def seal(self, key: KeyName, plaintext: bytes, aad: bytes) -> bytes:
        self.require(key, Use.SEAL)
        return self._hsm.seal(key, plaintext, aad)

    def unseal(self, key: KeyName, sealed: bytes, aad: bytes) -> bytes:
        self.require(key, Use.UNSEAL)
        return self._hsm.unseal(key, sealed, aad)

    def make_signer(self, key: KeyName, version: int) -> bytes:
        self.require(key, Use.MAKE)
        return self._hsm.make_signer(key, version)

    def destroy_signer(self, key: KeyName, version: int) -> None:
        self.require(key, Use.DESTROY)
        self._hsm.destroy_signer(key, version)

    def replace_anchors(self, anchor: bytes) -> None:
        self.require(SYNC_ANCHOR, Use.WRITE)
        self._hsm.replace_anchors(anchor)

    # What is public, or no key's

    def masters(self) -> tuple[RingMaster, ...]:
        return self._hsm.masters()

    def public_key(self, key: KeyName, version: int = 1) -> bytes:
        return self._hsm.public_key(key, version)

    def signer_versions(self, key: KeyName) -> tuple[int, ...]:
        return self._hsm.signer_versions(key)

    def held(self) -> Mapping[str, tuple[str, ...]]:
        return self._hsm.held()

    def refresh(self, allowed: Sequence[RingMaster], required: Sequence[RingMaster]) -> None:
        self._hsm.refresh(allowed, required)

    def anchors(self) -> tuple[bytes, ...]:
        return self._hsm.anchors()

    def random(self, length: int) -> bytes:
        return self._hsm.random(length)

    @property
    def figures(self) -> Figures:
        return self._hsm.figures

    def close(self) -> None:
        self._hsm.close()
