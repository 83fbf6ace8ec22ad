"""The signing keys of a site as the operator and the clock see them: commands of the site process, as functions of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from keyvault.database import Database
from keyvault.errors import KeyNotFound
from keyvault.events import Recorder
from keyvault.hsm import ROTATING, KeyName, SiteHsm
from keyvault.records import RecordMac
from keyvault.signing.rotation import Seen, SignerRotation
from keyvault.signing.versions import OVERLAP
from policies.tokens import key_id
from service.sync.arguments import Call

Facts = dict[str, Any]
_log = structlog.get_logger()


class SignerCommands:
    """The commands about signing keys of one site process, and the work that falls due."""

    def __init__(self, database: Database, hsm: SiteHsm, recorder: Recorder, age: timedelta) -> None:
        """`age`: when a signing version is followed by the next one by itself; zero is never."""
        self._age = age
        self._rotation = SignerRotation(database=database, hsm=hsm, mac=RecordMac(hsm), recorder=recorder, clock=_now)

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        return {call.__name__: call for call in (self.signers, self.signer_rotate, self.signer_retire)}

    def signers(self) -> Facts:
        """Every version of every signing key that has versions; and versions in the token that no row names, which never sign."""
        unknown = [f"{name.value}/{version}" for name in ROTATING for version in self._rotation.unknown(name)]
        return {"signers": [_facts(seen) for name in ROTATING for seen in self._rotation.all(name)], "unknown": unknown}

    def signer_rotate(self, name: str, overlap_seconds: float) -> Facts:
        """Make and publish the next version. Raises SignerRotating, OverlapTooShort, KeyNotFound."""
        made = self._rotation.rotate(_named(name), timedelta(seconds=overlap_seconds))
        return self._one(made.name, made.version)

    def signer_retire(self, name: str, version: int) -> Facts:
        """End an overlap early and destroy that version. Raises SignerInUse, KeyNotFound."""
        self._rotation.retire(_named(name), version)
        return self._one(_named(name), version)

    def turn(self) -> None:
        """Destroy every version whose overlap is over, and rotate what is too old."""
        for ended in self._rotation.turn():
            _log.info("signer_destroyed", name=ended.name.value, version=ended.version)
        for name in self._rotation.due(self._age):
            made = self._rotation.rotate(name, OVERLAP)
            _log.info("signer_made", name=name.value, version=made.version, signs_at=_time(made.signs_at))

    def _one(self, name: KeyName, version: int) -> Facts:
        return next(_facts(seen) for seen in self._rotation.all(name) if seen.key.version == version)


def _named(name: str) -> KeyName:
    if name not in set(KeyName):
        raise KeyNotFound(f"there is no signing key {name!r}")
    return KeyName(name)


def _facts(seen: Seen) -> Facts:
    key = seen.key
    return {
        "name": key.name.value,
        "version": key.version,
        "state": seen.state.value,
        "kid": key_id(key.public_key),
        "held_here": seen.held,
        "made_at": _time(key.made_at),
        "signs_at": _time(key.signs_at),
        "retires_at": _time(key.retires_at),
        "destroyed_at": _time(key.destroyed_at),
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds")


def _now() -> datetime:
    return datetime.now(UTC)
