"""A worker's view of one signing key's versions: which signs now, and which are accepted. Read again every two seconds.

A row alone is not believed: what it names must stand in this site's token, with the public half that the row's MAC covers. So
an older row that somebody put back does not bring back a version that was destroyed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime

from keyvault.database import Database
from keyvault.errors import KeyNotFound, PromiseBroken, RecordTampered, SigningKeyTampered
from keyvault.events import KeyEvent
from keyvault.hsm import Hsm, KeyName
from keyvault.records import RecordMac
from keyvault.signing.store import SigningKeyStore
from keyvault.signing.versions import LOOK_S, SigningKey, signing_at
from keyvault.sync.errors import SyncStoreUnavailable
from keyvault.sync.store import reading


class SigningKeys:
    """The versions of one key as this worker serves with them. Safe from any thread. Iterating gives the published public keys."""

    def __init__(
        self,
        hsm: Hsm,
        database: Database,
        name: KeyName,
        clock: Callable[[], datetime],
        *,
        look_s: float = LOOK_S,
        heard: Callable[[KeyEvent], None] = lambda _: None,
    ) -> None:
        """Reads once. `heard` is told of rows that were changed outside, once until they are whole again.

        Every method raises SigningKeyTampered while they are not. Raises SyncStoreUnavailable, PromiseBroken, HsmUnavailable.
        """
        self._hsm, self._database, self._name, self._clock, self._look_s = hsm, database, name, clock, look_s
        self._mac, self._store, self._heard = RecordMac(hsm), SigningKeyStore(), heard
        self._lock = threading.Lock()
        self._known: dict[int, bytes] = {}
        self._versions: list[SigningKey] = []
        self._looked, self._tampered = -math.inf, False
        with suppress(SigningKeyTampered):
            self._look_again()

    def __iter__(self) -> Iterator[bytes]:
        """The public keys (SubjectPublicKeyInfo, DER) of every version that is accepted now, newest first."""
        now = self._clock()
        return iter([one.public_key for one in self._current() if one.version in self._known and not one.over(now)])

    def signer(self) -> SigningKey:
        """The version that signs now. Raises KeyNotFound where none may, or this token does not hold it: no other one does then."""
        found = signing_at(self._current(), self._clock())
        if found is None or found.version not in self._known:
            raise KeyNotFound(f"this token holds no {self._name.value} that may sign now")
        return found

    def sign(self, key: SigningKey, data: bytes) -> bytes:
        """Sign by this version. Raises what `Hsm.sign` raises."""
        return self._hsm.sign(self._name, data, key.version)

    def _current(self) -> list[SigningKey]:
        with self._lock:
            if time.monotonic() - self._looked > self._look_s:
                # Whatever a token is for is written down first: nothing comes of an old look while the database is away.
                with suppress(SyncStoreUnavailable):
                    self._look_again()
            if self._tampered:
                raise SigningKeyTampered(self._name.value)
            return self._versions

    def _look_again(self) -> None:
        """Raises SigningKeyTampered: what was known before counts no more, and every use looks again."""
        try:
            self._versions, self._looked = self._look(), time.monotonic()
        except RecordTampered as found:
            if not self._tampered:
                self._heard(KeyEvent("signer.tampered", {"name": self._name.value}))
            self._tampered, self._looked = True, -math.inf
            raise SigningKeyTampered(self._name.value) from found
        self._tampered = False

    def _look(self) -> list[SigningKey]:
        """Every version, newest first. Before the first rotation: the one in the token."""
        with reading(self._database) as transaction:
            rows = self._store.versions(transaction, self._name)
        for row in rows:
            self._mac.check(row.mac, row.DOMAIN, *row.fields)
        now = self._clock()
        if not rows:
            began = datetime.fromtimestamp(0, now.tzinfo)
            rows = [SigningKey(self._name, 1, self._hsm.public_key(self._name), made_at=began, signs_at=began)]
        self._known = {row.version: row.public_key for row in rows if not row.over(now) and self._holds(row)}
        return rows[::-1]

    def _holds(self, row: SigningKey) -> bool:
        if self._known.get(row.version) == row.public_key:
            return True
        try:
            held = self._hsm.public_key(self._name, row.version)
        except KeyNotFound:
            return False
        if held != row.public_key:
            raise PromiseBroken(f"the token's {row.label} is not the key that was made under that name")
        return True
