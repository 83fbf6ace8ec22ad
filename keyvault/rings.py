"""Rings: which master versions exist, and which one new keys are wrapped under."""

from __future__ import annotations

from collections.abc import Mapping
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
        if any(version.version == master.version for version in self.versions(transaction, master.ring)):
            return
        version = RingVersion(master.ring, master.version, KeyState.ACTIVE, datetime.now(UTC))
        mac = self._mac.make(RingVersion.DOMAIN, *version.fields)
        if not self._store.add_ring_version(transaction, replace(version, mac=mac)):
            self._require_active(transaction, master)  # whoever came first has recorded it
            return
        self._recorder.record(transaction, KeyEvent("master.created", {"ring": master.ring, "version": master.version}))

    def _require_active(self, transaction: Transaction, master: RingMaster) -> None:
        states = {version.version: version.state for version in self.versions(transaction, master.ring)}
        if states.get(master.version) is not KeyState.ACTIVE:
            raise RowChanged(f"{master.label} was registered by another transaction, and is not active")

    def serving(self, transaction: Transaction, ring: str) -> RingMaster:
        """The master that new keys are wrapped under: the ring's active version, and no other where there is none.

        Raises KeyNotFound, KeyStateForbids, RecordTampered, and HsmUnavailable where the token does not hold it.
        """
        master = self.active(transaction, ring)
        if master not in self._hsm.masters():
            raise HsmUnavailable(f"{master.label} serves, and this token does not hold it")
        return master

    def active(self, transaction: Transaction, ring: str) -> RingMaster:
        """The ring's active version, whether or not this process serves it yet. Raises KeyNotFound, KeyStateForbids."""
        versions = self.versions(transaction, ring)
        if not versions:
            raise KeyNotFound(f"ring {ring!r} has no version")
        active = [version for version in versions if version.state is KeyState.ACTIVE]
        if not active:
            require_use(versions[-1].state, KeyUse.SEAL)
        return RingMaster(ring, active[-1].version)

    def version(self, transaction: Transaction, master: RingMaster) -> RingVersion:
        """Exactly this version's row. Raises KeyNotFound, RecordTampered."""
        for version in self.versions(transaction, master.ring):
            if version.version == master.version:
                return version
        raise KeyNotFound(f"{master.label} is no version that this site knows")

    def all_versions(self, transaction: Transaction) -> list[RingVersion]:
        """Every version of every ring. Raises RecordTampered."""
        return [row for ring in self._store.rings(transaction) for row in self.versions(transaction, ring)]

    def known(self, transaction: Transaction) -> tuple[RingMaster, ...]:
        """Every master that may be in this site's token, of any ring: those that wait, serve or only open; not the destroyed."""
        rows = self.all_versions(transaction)
        return tuple(RingMaster(row.ring, row.version) for row in rows if row.state is not KeyState.DESTROYED)

    def mirror(
        self, transaction: Transaction, master: RingMaster, state: KeyState, now: datetime, *, reason: str | None = None
    ) -> RingVersion:
        """Write what the sites agreed on into the row that the workers read. Idempotent. Raises RecordTampered, RowChanged."""
        found = [row for row in self.versions(transaction, master.ring) if row.version == master.version]
        return self.mirror_row(transaction, found[0] if found else None, master, state, now, reason=reason)

    def mirror_row(
        self,
        transaction: Transaction,
        old: RingVersion | None,
        master: RingMaster,
        state: KeyState,
        now: datetime,
        *,
        reason: str | None = None,
    ) -> RingVersion:
        """As `mirror`, over the row as it was read and checked; None if there is none. Returns the row as it stands then.

        Agreement was checked elsewhere, so any state may come; `reason` None keeps the one that stands. Raises RowChanged.
        """
        if old is None:
            new = self._sealed(RingVersion(master.ring, master.version, state, now, reason=reason or ""))
            if not self._store.add_ring_version(transaction, new):
                raise RowChanged(f"{master.label} was entered by another transaction")
            return new
        changed = replace(old, state=state, reason=old.reason if reason is None else reason)
        if state is KeyState.DESTROYED:
            changed = replace(changed, destroy_at=None, peer_destroy_at=None)
        if changed == old:
            return old
        new = self._sealed(replace(changed, row_version=old.row_version + 1))
        self._store.replace_ring_version(transaction, old, new)
        return new

    def pending(self, transaction: Transaction) -> dict[RingMaster, datetime]:
        """Every version whose destruction this site has scheduled, with its time. Raises RecordTampered."""
        rows = self.all_versions(transaction)
        waiting = (row for row in rows if row.state is not KeyState.DESTROYED)
        return {RingMaster(row.ring, row.version): row.destroy_at for row in waiting if row.destroy_at is not None}

    def hear_pending(self, transaction: Transaction, site: str, theirs: Mapping[RingMaster, datetime]) -> None:
        """Keep what the other site has scheduled, all of it and nothing else, so that uses are reported here too; recorded.

        Nothing is destroyed by it or stays because of it. Raises RecordTampered, RowChanged.
        """
        for row in self.all_versions(transaction):
            due = None if row.state is KeyState.DESTROYED else theirs.get(RingMaster(row.ring, row.version))
            if due == row.peer_destroy_at:
                continue
            new = self._sealed(replace(row, peer_destroy_at=due, row_version=row.row_version + 1))
            self._store.replace_ring_version(transaction, row, new)
            facts: dict[str, str | int] = {"ring": row.ring, "version": row.version, "site": site}
            facts |= {"destroy_at": due.isoformat() if due else ""}
            self._recorder.record(transaction, KeyEvent("key.peer_destruction_heard", facts))

    def _sealed(self, version: RingVersion) -> RingVersion:
        return replace(version, mac=self._mac.make(RingVersion.DOMAIN, *version.fields))

    def versions(self, transaction: Transaction, ring: str) -> list[RingVersion]:
        """Every version's row, oldest first; none for an unknown ring. Raises RecordTampered."""
        versions = self._store.ring_versions(transaction, ring)
        for version in versions:
            self._mac.check(version.mac, RingVersion.DOMAIN, *version.fields)
        return versions
