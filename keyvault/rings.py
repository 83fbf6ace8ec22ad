"""Rings: which master versions exist, and which one new keys are wrapped under."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from keyvault.database import Transaction
from keyvault.errors import HsmUnavailable, KeyNotFound, RowChanged
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import Hsm, RingMaster
from keyvault.records import RecordMac, RingVersion
from keyvault.states import KeyState, KeyUse, require_use
from keyvault.store import KeyStore


class Rings:
    """The ring versions in the database, each under its record MAC, beside the masters in the token."""

    def __init__(self, hsm: Hsm, store: KeyStore, recorder: Recorder, mac: RecordMac) -> None:
        self._hsm = hsm
        self._store = store
        self._recorder = recorder
        self._mac = mac

    def register(self, transaction: Transaction, master: RingMaster) -> None:
        """Make a master of the token the ring's newest, active version. Idempotent, also when two processes do it at once.

        Raises KeyNotFound, RecordTampered, and RowChanged where another transaction wrote this version in another state.
        """
        if master not in self._hsm.masters():
            raise KeyNotFound(f"the token holds no {master.label}")
        if any(version.version == master.version for version in self._checked(transaction, master.ring)):
            return
        version = RingVersion(master.ring, master.version, KeyState.ACTIVE, datetime.now(UTC))
        mac = self._mac.make(RingVersion.DOMAIN, *version.fields)
        if not self._store.add_ring_version(transaction, replace(version, mac=mac)):
            self._require_active(transaction, master)  # whoever came first has recorded it
            return
        self._recorder.record(transaction, KeyEvent("master.created", {"ring": master.ring, "version": master.version}))

    def _require_active(self, transaction: Transaction, master: RingMaster) -> None:
        states = {version.version: version.state for version in self._checked(transaction, master.ring)}
        if states.get(master.version) is not KeyState.ACTIVE:
            raise RowChanged(f"{master.label} was registered by another transaction, and is not active")

    def serving(self, transaction: Transaction, ring: str) -> RingMaster:
        """The master that new keys are wrapped under: the newest version, and no other where that one may not serve.

        Raises KeyNotFound, KeyStateForbids, RecordTampered, and HsmUnavailable where the token does not hold it.
        """
        versions = self._checked(transaction, ring)
        if not versions:
            raise KeyNotFound(f"ring {ring!r} has no version")
        newest = versions[-1]
        require_use(newest.state, KeyUse.SEAL)
        master = RingMaster(ring, newest.version)
        if master not in self._hsm.masters():
            raise HsmUnavailable(f"{master.label} serves, and this token does not hold it")
        return master

    def _checked(self, transaction: Transaction, ring: str) -> list[RingVersion]:
        versions = self._store.ring_versions(transaction, ring)
        for version in versions:
            self._mac.check(version.mac, RingVersion.DOMAIN, *version.fields)
        return versions
