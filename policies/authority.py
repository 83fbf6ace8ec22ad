"""Who is known and what is theirs: clients and voices, as values whose every field the record MAC covers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from keyvault.records import Field
from policies.consent import Consent


class Role(StrEnum):
    """What a client may be registered to do; the policies say what each role permits."""

    ENROLLER = "enroller"
    SPEAKER = "speaker"
    VERIFIER = "verifier"
    CONSENT_KEEPER = "consent-keeper"
    READER = "reader"
    APPROVER = "approver"


BROWSER_ROLES = (Role.READER, Role.SPEAKER)
"""The roles that a browser may be given: it enrols by ticket, and uploads nothing else."""


def key_alone(jkt: str) -> str:
    """What stands in the place of a certificate's x5t#S256 for a caller without one. No x5t#S256 has a colon."""
    return f"jkt:{jkt}"


class ClientState(StrEnum):
    """A revoked client stays revoked."""

    ACTIVE = "active"
    REVOKED = "revoked"


class VoiceState(StrEnum):
    """A suspended voice is kept and stays closed."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class VoiceTerm(StrEnum):
    """What differs for one voice."""

    BEARER = "bearer"
    """Tokens bound to a certificate alone may open it."""
    LIVENESS = "liveness"
    """It opens only with a nonce that its speaker answered (`policies.liveness`)."""
    DUAL_CONTROL = "dual-control"
    """It says only what a second client approved (`policies.dual_control`)."""


@dataclass(frozen=True)
class Client:
    """A registered caller. `cert_sha256` is the certificate's x5t#S256, `jkt` its DPoP key's RFC 7638 thumbprint.

    A browser has no certificate: `cert_sha256` is its `key_alone(jkt)`. `voice_id` is the one voice that the client may reach,
    `hours` those in which it may call (`policies.hours`); None: no such limit.
    """

    client_id: str
    tenant: str
    cert_sha256: str
    jkt: str
    roles: tuple[str, ...]
    state: ClientState
    row_version: int
    voice_id: UUID | None = None
    hours: str | None = None

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers. A client without such limits has the bytes that it had before there were any."""
        limits = (self.voice_id, self.hours)
        return (
            *(self.client_id, self.tenant, self.cert_sha256, self.jkt, self.roles, self.state.value, self.row_version),
            *(limits if self.hours is not None else limits[:1] if self.voice_id is not None else ()),
        )

    @property
    def browser(self) -> bool:
        """Whether its key alone says who it is."""
        return self.cert_sha256 == key_alone(self.jkt)


@dataclass(frozen=True)
class Voice:
    """A voice's metadata. `dek_id` and `key_version` name the key of its voiceprint, `terms` what differs for it (VoiceTerm),
    `hours` those in which it opens (`policies.hours`), None: always."""

    voice_id: UUID
    tenant: str
    name: str
    consent_id: UUID
    state: VoiceState
    dek_id: UUID
    key_version: int
    created_at: datetime
    row_version: int
    terms: tuple[str, ...] = ()
    hours: str | None = None

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers. A voice without terms and hours has the bytes that it had before there were any."""
        limits = (self.terms, self.hours)
        return (
            *(self.voice_id, self.tenant, self.name, self.consent_id, self.state.value),
            *(self.dek_id, self.key_version, self.created_at, self.row_version),
            *(limits if self.hours is not None else limits[:1] if self.terms else ()),
        )


@dataclass(frozen=True)
class Authority:
    """The rows that one decision rests on, each with its MAC checked; None where there is no such row."""

    client: Client | None
    voice: Voice | None
    consent: Consent | None
