"""What travels to the other site with a voice's key: its consent, its own row, its sealed voiceprint. Nothing in the clear.

Each site keeps the rows under a MAC of its own. A row that both have is taken if the other site's is newer by its row
version; of two of one version the stricter stays, so that a withdrawal or a suspension never gets lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from keyvault.database import Transaction
from keyvault.sync.errors import SyncRefused
from keyvault.sync.wire import Statement, require
from policies.audit.details import Details
from policies.authority import Voice, VoiceState
from policies.consent import Consent, ConsentState
from policies.store import PolicyStore
from voiceprints.store import RowKind, SealedRow, VoiceprintStore


@dataclass(frozen=True)
class _Consent(Statement):
    DOMAIN = "replica/1/consent"
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


@dataclass(frozen=True)
class _Voice(Statement):
    DOMAIN = "replica/2/voice"
    voice_id: UUID
    tenant: str
    name: str
    consent_id: UUID
    state: VoiceState
    dek_id: UUID
    key_version: int
    created_at: datetime
    row_version: int
    terms: tuple[str, ...]


@dataclass(frozen=True)
class _Sealed(Statement):
    DOMAIN = "replica/1/voiceprint"
    voice_id: UUID
    kind: RowKind
    tenant: str
    dek_id: UUID
    dek_version: int
    model_id: str
    sealed: bytes
    created_at: datetime


@dataclass(frozen=True)
class _Rows(Statement):
    """All of one voice. They belong together: one tenant, one voice, and the key that the voice's row names."""

    DOMAIN = "replica/1/rows"
    consent: _Consent
    voice: _Voice
    voiceprint: tuple[_Sealed, ...]

    def __post_init__(self) -> None:
        voice = self.voice
        require((self.consent.consent_id, self.consent.tenant) == (voice.consent_id, voice.tenant), "the consent is the voice's")
        key = (voice.voice_id, voice.tenant, voice.dek_id, voice.key_version)
        sealed = {(row.voice_id, row.tenant, row.dek_id, row.dek_version) for row in self.voiceprint}
        require(sealed <= {key}, "every sealed row is the voice's, under its key")
        kinds = [row.kind for row in self.voiceprint]
        require(len(kinds) == len(set(kinds)), "each kind of row is there once")


class VoiceRows:
    """Implements `keyvault.sync.batches.Replica` over the tables of policies and voiceprints."""

    def __init__(self, store: PolicyStore, details: Details) -> None:
        self._policies, self._details, self._voiceprints = store, details, VoiceprintStore()

    def rows_of(self, transaction: Transaction, voice: UUID) -> bytes:
        """The voice's rows as exact bytes; empty for a voice that has none. Raises AuthorityRowTampered."""
        found = self._policies.voice_anywhere(transaction, voice)
        consent = self._policies.consent(transaction, found.consent_id) if found else None
        if found is None or consent is None:
            return b""
        sealed = tuple(_Sealed(**vars(row)) for row in self._voiceprints.rows(transaction, voice))
        return _Rows(_Consent(**vars(consent)), _Voice(**vars(found)), sealed).encode()

    def take(self, transaction: Transaction, voice: UUID, rows: bytes) -> None:
        """Keep what the other site sent of this voice, as far as it is newer than what is here.

        Raises StatementMalformed, SyncRefused for another voice's rows or another tenant's, RowChanged, AuthorityRowTampered.
        """
        if not rows:
            return
        given = _Rows.decode(rows)
        if given.voice.voice_id != voice:
            raise SyncRefused("the rows are another voice's")
        self._take_consent(transaction, Consent(**_values(given.consent)))
        theirs, mine = Voice(**_values(given.voice)), self._policies.voice_anywhere(transaction, voice)
        if mine is not None and mine.tenant != theirs.tenant:
            raise SyncRefused("this voice is another tenant's here")
        if mine is None or _prevails(theirs.row_version, mine.row_version, strict=theirs.state is VoiceState.SUSPENDED):
            self._policies.take(transaction, theirs)
            self._voiceprints.replace(transaction, voice, [SealedRow(**_values(row)) for row in given.voiceprint])

    def drop(self, transaction: Transaction, voice: UUID) -> None:
        """Forget the voice's rows, and the details of this site's log entries about it: it was erased. Idempotent.

        The consent stays, as the record of what was allowed.
        """
        self._details.erase(transaction, voice)
        self._voiceprints.replace(transaction, voice, ())
        self._policies.forget_voice(transaction, voice)

    def _take_consent(self, transaction: Transaction, theirs: Consent) -> None:
        mine = self._policies.consent(transaction, theirs.consent_id)
        if mine is not None and mine.tenant != theirs.tenant:
            raise SyncRefused("this consent is another tenant's here")
        if mine is None or _prevails(theirs.row_version, mine.row_version, strict=theirs.state is ConsentState.WITHDRAWN):
            self._policies.take(transaction, theirs)


def _prevails(theirs: int, mine: int, *, strict: bool) -> bool:
    """Whether the other site's row replaces ours."""
    return theirs > mine or (theirs == mine and strict)


def _values(statement: Statement) -> dict[str, Any]:
    """The fields, without what the encoding caches beside them."""
    return {name: value for name, value in vars(statement).items() if not name.startswith("_")}
