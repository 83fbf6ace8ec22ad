"""One version of a signing key as a row: its public half and the times at which it begins to sign, and at which it ends.

Times, not steps, say what a version may do: every process that has read a row does the same at the same moment, and a process
that was killed between two steps leaves nothing half done. The names of the states are those of NIST SP 800-57 Part 1, section 7,
where it has one: before it signs a version is pre-active, and one that is only verified with is deactivated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import ClassVar

from keyvault.hsm import KeyName, signer_label
from keyvault.records import Field

LOOK_S = 2.0
"""How old a worker's look at the rows may be."""
LEAST_OVERLAP = timedelta(seconds=12)
"""Above the life of a token with its tolerance, and above two looks of every worker: a shorter overlap is refused."""
OVERLAP = timedelta(minutes=15)
"""Above the age at which a copy of the published keys must be fetched again."""


class SignerState(StrEnum):
    """What a version does now."""

    NEXT = "next"
    """Published, so that everybody knows it before its first signature."""
    SIGNING = "signing"
    OVERLAPPING = "overlapping"
    """Its signatures are accepted; it makes no more."""
    RETIRED = "retired"
    """Accepted no more; it is destroyed with the site process's next turn."""
    DESTROYED = "destroyed"


@dataclass(frozen=True)
class SigningKey:
    """One version. `public_key` is SubjectPublicKeyInfo (DER): a key of that label in the token with another one is not it."""

    name: KeyName
    version: int
    public_key: bytes = field(repr=False)
    made_at: datetime
    signs_at: datetime
    retires_at: datetime | None = None
    destroyed_at: datetime | None = None
    row_version: int = 1
    mac: bytes = field(default=b"", repr=False)

    DOMAIN: ClassVar[str] = "signing_key"

    @property
    def label(self) -> str:
        """Its label inside the token."""
        return signer_label(self.name, self.version)

    @property
    def text(self) -> str:
        """As people write it: `token-signer/2`."""
        return f"{self.name.value}/{self.version}"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every column but the MAC, in the table's order: what the MAC covers."""
        times = (self.made_at, self.signs_at, self.retires_at, self.destroyed_at)
        return (self.name.value, self.version, self.public_key, *times, self.row_version)

    def over(self, now: datetime) -> bool:
        """Whether nothing that it signed is accepted any more."""
        return self.destroyed_at is not None or (self.retires_at is not None and self.retires_at <= now)


def signing_at(versions: list[SigningKey], now: datetime) -> SigningKey | None:
    """The version that signs now: the newest that has begun and is not over. None where there is none: then nothing is signed."""
    begun = [one for one in versions if one.signs_at <= now]
    newest = max(begun, key=lambda one: one.version, default=None)
    return None if newest is None or newest.over(now) else newest


def state_of(one: SigningKey, versions: list[SigningKey], now: datetime) -> SignerState:
    """What this version does now, among all of its name."""
    if one.destroyed_at is not None:
        return SignerState.DESTROYED
    if one.over(now):
        return SignerState.RETIRED
    if one.signs_at > now:
        return SignerState.NEXT
    return SignerState.SIGNING if one == signing_at(versions, now) else SignerState.OVERLAPPING
