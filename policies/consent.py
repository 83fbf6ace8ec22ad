"""Consent: what one speaker allowed, for which purposes, where, until when, and the evidence of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from keyvault.records import Field
from policies.errors import ConsentInvalid

EVERYWHERE = "*"
"""The territory of a consent that is not limited to any; an installation there needs such consents."""

CONSENT_PURPOSES = frozenset({"speak", "compare", "identify"})
"""What a speaker can consent to. What a consent does not name is not done; to enrol, one is enough."""

_TERRITORY = re.compile(r"[A-Z]{2}|\*")


class ConsentState(StrEnum):
    """A consent that was withdrawn stays withdrawn; a new one is a new row."""

    ACTIVE = "active"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True)
class Consent:
    """One recorded consent. `territory`: ISO 3166 alpha-2 codes, or `*`. `evidence_sha256`: of the evidence, kept elsewhere."""

    consent_id: UUID
    tenant: str
    subject: str
    purposes: tuple[str, ...]
    territory: tuple[str, ...]
    expires_at: datetime
    evidence_sha256: str
    state: ConsentState
    created_at: datetime
    row_version: int

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers."""
        return (
            *(self.consent_id, self.tenant, self.subject, self.purposes, self.territory),
            *(self.expires_at, self.evidence_sha256, self.state.value, self.created_at, self.row_version),
        )

    def covers(self, territory: str) -> bool:
        """Whether the consent holds in `territory`."""
        return EVERYWHERE in self.territory or territory in self.territory

    def __repr__(self) -> str:
        # The subject and the evidence are about a person: they stay out of logs.
        return f"Consent({self.consent_id}, {self.state}, {'/'.join(self.purposes)})"


def check_terms(
    subject: str, purposes: Sequence[str], territory: Sequence[str], expires_at: datetime, evidence: str, now: datetime
) -> None:
    """Raise ConsentInvalid unless these are terms that can be recorded."""
    if not 0 < len(subject) <= 256 or not subject.isprintable():
        raise ConsentInvalid("subject")
    if not purposes or len(set(purposes)) != len(purposes) or not set(purposes) <= CONSENT_PURPOSES:
        raise ConsentInvalid("purposes: one or more of " + ", ".join(sorted(CONSENT_PURPOSES)))
    if not 0 < len(territory) <= 300 or not all(_TERRITORY.fullmatch(code) for code in territory):
        raise ConsentInvalid("territory: ISO 3166 alpha-2 codes, or *")
    if expires_at.tzinfo is None or expires_at <= now:
        raise ConsentInvalid("expires_at: a time in the future, with its zone")
    # At most a megabyte, and text that has a UTF-8 form: its hash must mean something to whoever keeps the evidence.
    if not 0 < len(evidence) <= 2**20 or any("\ud800" <= character <= "\udfff" for character in evidence):
        raise ConsentInvalid("evidence")
