"""Signing keys get a next version, and lose old ones. For the site process alone; workers read what it writes (`serving.py`).

1. The next version is made in the token and written down, with the times at which it begins to sign and at which the one before
   ends: one transaction, in which the token is asked first. A crash before its COMMIT leaves a key that no row names; it never
   signs, and the next rotation destroys it. A crash after it changes nothing, because only the clock moves on from there.
2. From its row's COMMIT the new version is published. One overlap later it signs; another overlap later the old one is over.
3. What is over is destroyed in the token, looked for again, and only then written down as destroyed: until that stands it is
   done again.

Two rotations at once: the second waits for the first one's transaction, and then finds that a version is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from keyvault.database import Database, Transaction
from keyvault.errors import KeyNotFound, OverlapTooShort, SignerInUse, SignerRotating
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import ROTATING, KeyName, SiteHsm
from keyvault.records import RecordMac
from keyvault.signing.store import SigningKeyStore
from keyvault.signing.versions import LEAST_OVERLAP, SignerState, SigningKey, signing_at, state_of
from keyvault.sync.store import lasting


@dataclass(frozen=True)
class Seen:
    """A version, what it does now, and whether this site's token holds it."""

    key: SigningKey
    state: SignerState
    held: bool


class SignerRotation:
    """The versions of one site's signing keys. `clock` answers with UTC time."""

    def __init__(
        self, *, database: Database, hsm: SiteHsm, mac: RecordMac, recorder: Recorder, clock: Callable[[], datetime]
    ) -> None:
        self._database, self._hsm, self._mac, self._recorder, self._clock = database, hsm, mac, recorder, clock
        self._store = SigningKeyStore()
        self._looked_again = False

    def all(self, name: KeyName) -> list[Seen]:
        """Every version, oldest first. Raises RecordTampered, and KeyNotFound for a key that has no versions."""
        with lasting(self._database) as transaction:
            versions = self._noted(transaction, name)
        held, now = self._hsm.signer_versions(name), self._clock()
        return [Seen(one, state_of(one, versions, now), one.version in held) for one in versions]

    def unknown(self, name: KeyName) -> tuple[int, ...]:
        """Versions in the token that no row names: left by a crash, by a restored database, or by whoever has the PIN."""
        known = {seen.key.version for seen in self.all(name)}
        return tuple(version for version in self._hsm.signer_versions(name) if version not in known)

    def due(self, age: timedelta) -> list[KeyName]:
        """Keys whose signing version has signed for longer than `age`, with no next one on its way; none where `age` is zero."""
        found = [(name, seen) for name in ROTATING for seen in self.all(name)[-1:]] if age else []
        return [name for name, newest in found if self._clock() - newest.key.signs_at > age]

    def rotate(self, name: KeyName, overlap: timedelta) -> SigningKey:
        """Make and publish the next version, which signs `overlap` from now; the one before is over another `overlap` later.

        Raises SignerRotating while a version that does not sign yet is published, OverlapTooShort, RecordTampered, KeyNotFound.
        """
        if overlap < LEAST_OVERLAP:
            raise OverlapTooShort(f"the overlap is at least {LEAST_OVERLAP.total_seconds():.0f} seconds")
        with lasting(self._database) as transaction:
            versions = self._noted(transaction, name)
            now = self._clock()
            if versions and versions[-1].signs_at > now:
                raise SignerRotating(f"{versions[-1].text} is published and signs from {versions[-1].signs_at.isoformat()}")
            serving = signing_at(versions, now)
            alone = serving is None or serving.version not in self._hsm.signer_versions(name)
            public, version = self._make(name, versions)
            # Where nothing in the token may sign (one of the two was restored), there is nothing to overlap with.
            made = SigningKey(name, version, public, made_at=now, signs_at=now if alone else now + overlap)
            self._store.add(transaction, self._signed(made))
            for before in versions:
                if not before.over(now) and before.retires_at is None:
                    self._change(transaction, before, retires_at=made.signs_at + overlap)
            self._record(transaction, "signer.made", made, signs_at=made.signs_at.isoformat())
        return made

    def retire(self, name: KeyName, version: int) -> SigningKey:
        """End an overlap before its time: nothing that this version signed is accepted any more, and it is destroyed.

        Raises SignerInUse for the version that signs or is to sign, and until the one after it has signed for the least overlap.
        """
        now = self._clock()
        with lasting(self._database) as transaction:
            versions = self._noted(transaction, name)
            one = next((found for found in versions if found.version == version), None)
            if one is None:
                raise KeyNotFound(f"there is no {name.value}/{version}")
            if not one.over(now):
                self._require_followed(one, versions, now)
                one = self._change(transaction, one, retires_at=now)
                self._record(transaction, "signer.retired", one)
        self.turn()
        return next(seen.key for seen in self.all(name) if seen.key.version == version)

    def turn(self) -> list[SigningKey]:
        """Destroy every version that is over; returns those. After a start, also what was destroyed before and came back."""
        ended = []
        for name in ROTATING:
            with lasting(self._database) as transaction:
                versions = self._noted(transaction, name)
                now = self._clock()
                for one in [one for one in versions if one.over(now) and one.destroyed_at is None]:
                    self._hsm.destroy_signer(name, one.version)
                    ended.append(self._change(transaction, one, destroyed_at=now))
                    self._record(transaction, "signer.destroyed", one)
            if not self._looked_again:
                self._destroy_again(name, versions)
        self._looked_again = True
        return ended

    def _make(self, name: KeyName, versions: list[SigningKey]) -> tuple[bytes, int]:
        """A key under a number that neither a row nor the token has seen. What no row names goes: nobody knows who made it."""
        held = self._hsm.signer_versions(name)
        for leftover in set(held) - {one.version for one in versions}:
            self._hsm.destroy_signer(name, leftover)
        version = max([1, *held, *(one.version for one in versions)]) + 1
        return self._hsm.make_signer(name, version), version

    def _noted(self, transaction: Transaction, name: KeyName) -> list[SigningKey]:
        """Every version, with its MAC checked, held until the transaction ends; the first is written down where none is, unless
        the token does not hold it."""
        if name not in ROTATING:
            raise KeyNotFound(f"{name.value} has no versions: this key is not rotated by itself")
        self._store.lock(transaction, name)
        versions = self._store.versions(transaction, name)
        for one in versions:
            self._mac.check(one.mac, one.DOMAIN, *one.fields)
        if not versions and 1 in self._hsm.signer_versions(name):
            now = self._clock()
            first = self._signed(SigningKey(name, 1, self._hsm.public_key(name), made_at=now, signs_at=now))
            self._store.add(transaction, first)
            versions = [first]
        return versions

    def _require_followed(self, one: SigningKey, versions: list[SigningKey], now: datetime) -> None:
        signing = signing_at(versions, now)
        if signing is None or one.version >= signing.version:
            raise SignerInUse(f"{one.text} signs, or is about to")
        if now < signing.signs_at + LEAST_OVERLAP:
            raise SignerInUse(f"{signing.text} signs only since {signing.signs_at.isoformat()}: what {one.text} signed may live")

    def _destroy_again(self, name: KeyName, versions: list[SigningKey]) -> None:
        """A token that was put back from an older copy holds what was destroyed since."""
        came_back = {one.version for one in versions if one.destroyed_at is not None} & set(self._hsm.signer_versions(name))
        for version in came_back:
            self._hsm.destroy_signer(name, version)

    def _change(self, transaction: Transaction, old: SigningKey, **changes: Any) -> SigningKey:
        new = self._signed(replace(old, **changes, row_version=old.row_version + 1))
        self._store.replace(transaction, old, new)
        return new

    def _signed(self, one: SigningKey) -> SigningKey:
        return replace(one, mac=self._mac.make(one.DOMAIN, *one.fields))

    def _record(self, transaction: Transaction, action: str, one: SigningKey, **more: str) -> None:
        self._recorder.record(transaction, KeyEvent(action, {"name": one.name.value, "version": one.version, **more}))
