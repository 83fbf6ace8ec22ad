"""What travels to the other site with a voice's key: its consent, its own row, its sealed voiceprint. Nothing in the clear.

Each site keeps the rows under a MAC of its own. Of a row that both have, `policies.joining` says what stands, so that a
withdrawal or a suspension never gets lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from keyvault.database import Transaction
from keyvault.sync.errors import SyncRefused
from keyvault.sync.wire import Statement, require
from policies.audit.details import Details
from policies.authority import Client, Voice
from policies.consent import Consent
from policies.errors import PolicyError
from policies.joining import joined
from policies.store import PolicyStore
from policies.unsent.store import note
from service.spelling import Spelling
from voiceprints.store import SealedRow, VoiceprintStore

CLIENT = Spelling(Client, "replica/1/client")
CONSENT = Spelling(Consent, "replica/1/consent")
VOICE = Spelling(Voice, "replica/2/voice")
SEALED = Spelling(SealedRow, "replica/1/voiceprint")


@dataclass(frozen=True)
class _Rows(Statement):
    """All of one voice. They belong together: one tenant, one voice, and the key that the voice's row names."""

    DOMAIN = "replica/1/rows"
    consent: bytes
    voice: bytes
    voiceprint: tuple[bytes, ...]

    def __post_init__(self) -> None:
        voice, consent = VOICE.decode(self.voice), CONSENT.decode(self.consent)
        require((consent.consent_id, consent.tenant) == (voice.consent_id, voice.tenant), "the consent is the voice's")
        key = (voice.voice_id, voice.tenant, voice.dek_id, voice.key_version)
        rows = [SEALED.decode(row) for row in self.voiceprint]
        sealed = {(row.voice_id, row.tenant, row.dek_id, row.dek_version) for row in rows}
        require(sealed <= {key}, "every sealed row is the voice's, under its key")
        kinds = [row.kind for row in rows]
        require(len(kinds) == len(set(kinds)), "each kind of row is there once")


@contextmanager
def refusing() -> Iterator[None]:
    """What the policies' tables refuse as the sites' refusal, so that it holds up one row and no other."""
    try:
        yield
    except PolicyError as error:
        raise SyncRefused(f"{error.code}: {error}") from error


class VoiceRows:
    """Implements `keyvault.sync.batches.Replica` over the tables of policies and voiceprints."""

    def __init__(self, store: PolicyStore, details: Details) -> None:
        self._policies, self._details, self._voiceprints = store, details, VoiceprintStore()

    def rows_of(self, transaction: Transaction, voice: UUID) -> bytes:
        """The voice's rows as exact bytes; empty for a voice that has none. Raises SyncRefused for a row changed outside."""
        with refusing():
            found = self._policies.voice_anywhere(transaction, voice)
            consent = self._policies.consent(transaction, found.consent_id) if found else None
        if found is None or consent is None:
            return b""
        sealed = tuple(SEALED.encode(row) for row in self._voiceprints.rows(transaction, voice))
        return _Rows(CONSENT.encode(consent), VOICE.encode(found), sealed).encode()

    def take(self, transaction: Transaction, voice: UUID, rows: bytes) -> None:
        """Keep what the other site sent of this voice, as far as it is newer than what is here.

        Raises StatementMalformed, and SyncRefused for another voice's rows or another tenant's, or one changed outside.
        """
        if not rows:
            return
        given = _Rows.decode(rows)
        theirs = VOICE.decode(given.voice)
        if theirs.voice_id != voice:
            raise SyncRefused("the rows are another voice's")
        with refusing():
            take_consent(self._policies, transaction, CONSENT.decode(given.consent))
            mine = self._policies.voice_anywhere(transaction, voice)
            if mine is not None and mine.tenant != theirs.tenant:
                raise SyncRefused("this voice is another tenant's here")
            stands = theirs if mine is None else joined(mine, theirs)
            if stands == mine:
                return
            self._policies.take(transaction, stands)
            if stands != theirs:
                note(transaction, "voice", str(voice), stands.row_version)
            if stands.dek_id == theirs.dek_id:
                self._voiceprints.replace(transaction, voice, [SEALED.decode(row) for row in given.voiceprint])

    def drop(self, transaction: Transaction, voice: UUID) -> None:
        """Forget the voice's rows, and the details of this site's log entries about it: it was erased. Idempotent.

        The consent stays, as the record of what was allowed.
        """
        self._details.erase(transaction, voice)
        self._voiceprints.replace(transaction, voice, ())
        self._policies.forget_voice(transaction, voice)


def take_consent(store: PolicyStore, transaction: Transaction, theirs: Consent) -> Consent | None:
    """Keep the other site's consent as far as it is newer: the row that stands, None where that was here before.

    Raises SyncRefused for another tenant's, AuthorityRowTampered, RowChanged.
    """
    mine = store.consent(transaction, theirs.consent_id)
    if mine is not None and mine.tenant != theirs.tenant:
        raise SyncRefused("this consent is another tenant's here")
    stands = theirs if mine is None else joined(mine, theirs)
    if stands == mine:
        return None
    store.take(transaction, stands)
    if stands != theirs:
        note(transaction, "consent", str(stands.consent_id), stands.row_version)
    return stands
