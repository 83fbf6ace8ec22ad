"""What works once, for whoever presents it: 256 random bits, of which the database has the SHA-256 and nothing else.

A row says, under the record MAC, what the secret is good for, and until when. That it was used stands in the list that only
grows, so nobody who writes rows makes it fresh again. Nothing here touches a database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from uuid import UUID

from keyvault.records import Field
from policies import jws

SECRET_BYTES = 32
MAX_LIFETIME_S = 600
"""The longest that a one-time secret may live."""
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True)
class UploadTicket:
    """One enrolment, under one consent, with a request body of at most `max_bytes`, in the name of the client that minted it."""

    secret_sha256: str
    tenant: str
    client_id: str
    consent_id: UUID
    max_bytes: int
    expires_at: datetime
    row_version: int = 1

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers."""
        return (
            *(self.secret_sha256, self.tenant, self.client_id, self.consent_id),
            *(self.max_bytes, self.expires_at, self.row_version),
        )


@dataclass(frozen=True)
class BrowserInvitation:
    """One key made in a browser may register as this client, with these roles; for one voice, where one is named."""

    secret_sha256: str
    tenant: str
    client_id: str
    roles: tuple[str, ...]
    voice_id: UUID | None
    expires_at: datetime
    row_version: int = 1

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers."""
        return (
            *(self.secret_sha256, self.tenant, self.client_id, self.roles),
            *(self.voice_id, self.expires_at, self.row_version),
        )


def written(secret: bytes) -> str:
    """The secret as people and programs carry it: base64url without padding."""
    return jws.encode(secret)


def digest_of(written: str) -> str | None:
    """The SHA-256, in hex, under which a row knows this secret; None for what cannot be one."""
    return sha256(written.encode()).hexdigest() if _SECRET.fullmatch(written) else None
