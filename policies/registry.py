"""Use cases that change who may do what: clients, consents, voices. Each writes MACed rows in the caller's transaction.

Who may call them is decided before: by the gate for requests, by the officers' console for clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

from keyvault.database import Transaction
from keyvault.records import KeyRef
from policies.authority import Client, ClientState, Role, Voice, VoiceState, VoiceTerm
from policies.caller_errors import BrowserHasNoCertificate
from policies.consent import Consent, ConsentState, check_terms
from policies.errors import ClientInactive, ClientUnknown, ConsentExpired, ConsentUnknown, ConsentWithdrawn, VoiceUnknown
from policies.hours import Hours
from policies.quotas import EVERYONE, Limits, Quota, Scope
from policies.store import PolicyStore


class Registry:
    """Registers and changes. Every method raises AuthorityRowTampered rather than build on a row changed outside."""

    def __init__(self, store: PolicyStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def register_client(
        self, transaction: Transaction, *, client_id: str, tenant: str, cert_sha256: str, jkt: str, roles: Sequence[Role]
    ) -> Client:
        """Register a client by its certificate's x5t#S256 and its DPoP key's thumbprint.

        Raises RowChanged if its name or certificate is taken, KeyUsedOtherwise for a browser's key.
        """
        client = Client(client_id, tenant, cert_sha256, jkt, tuple(roles), ClientState.ACTIVE, row_version=1)
        self._store.insert(transaction, client)
        return client

    def rotate_client(self, transaction: Transaction, client_id: str, *, cert_sha256: str, jkt: str) -> Client:
        """Give a client a new certificate and DPoP key; the old ones end here.

        Raises ClientUnknown, ClientInactive for one that was revoked, RowChanged if the certificate is another client's, and
        KeyUsedOtherwise for a browser's key.
        """
        client = self._client(transaction, client_id)
        if client.state is not ClientState.ACTIVE:
            raise ClientInactive(("base.client-active",))
        if client.browser:
            raise BrowserHasNoCertificate()
        return self._store.swap(transaction, client, replace(client, cert_sha256=cert_sha256, jkt=jkt))

    def change_roles(self, transaction: Transaction, client_id: str, roles: Sequence[Role]) -> Client:
        """Give a client these roles in place of those it has. Raises ClientUnknown, ClientInactive, RowChanged."""
        client = self._client(transaction, client_id)
        if client.state is not ClientState.ACTIVE:
            raise ClientInactive(("base.client-active",))
        return self._store.swap(transaction, client, replace(client, roles=tuple(roles)))

    def revoke_client(self, transaction: Transaction, client_id: str) -> Client:
        """From the commit on, the client may do nothing, also with tokens in hand. Raises ClientUnknown, RowChanged."""
        client = self._client(transaction, client_id)
        return self._store.swap(transaction, client, replace(client, state=ClientState.REVOKED))

    def record_consent(
        self,
        transaction: Transaction,
        *,
        tenant: str,
        subject: str,
        purposes: Sequence[str],
        territory: Sequence[str],
        expires_at: datetime,
        evidence: str,
    ) -> Consent:
        """Record what a speaker allowed; of the evidence its SHA-256 is kept. Raises ConsentInvalid."""
        now = self._now()
        check_terms(subject, purposes, territory, expires_at, evidence, now)
        consent = Consent(
            consent_id=uuid4(),
            tenant=tenant,
            subject=subject,
            purposes=tuple(sorted(purposes)),
            territory=tuple(sorted(set(territory))),
            expires_at=expires_at,
            evidence_sha256=hashlib.sha256(evidence.encode()).hexdigest(),
            state=ConsentState.ACTIVE,
            created_at=now,
            row_version=1,
        )
        self._store.insert(transaction, consent)
        return consent

    def withdraw_consent(self, transaction: Transaction, consent_id: UUID) -> Consent:
        """From the commit on, nothing is done under this consent. Raises ConsentUnknown, RowChanged."""
        consent = self._store.consent(transaction, consent_id)
        if consent is None:
            raise ConsentUnknown()
        return self._store.swap(transaction, consent, replace(consent, state=ConsentState.WITHDRAWN))

    def register_voice(
        self, transaction: Transaction, *, voice_id: UUID, tenant: str, name: str, consent_id: UUID, key: KeyRef
    ) -> Voice:
        """Name a voice that is being enrolled in this transaction, and the key it is sealed with.

        An enrolment takes longer than its token lives, so the consent is looked at again here. Raises ConsentUnknown,
        ConsentWithdrawn, ConsentExpired.
        """
        consent = self._store.consent(transaction, consent_id)
        if consent is None or consent.tenant != tenant:
            raise ConsentUnknown()
        if consent.state is not ConsentState.ACTIVE:
            raise ConsentWithdrawn(("consent.active",))
        if consent.expires_at <= self._now():
            raise ConsentExpired(("consent.unexpired",))
        voice = Voice(
            voice_id=voice_id,
            tenant=tenant,
            name=name,
            consent_id=consent_id,
            state=VoiceState.ACTIVE,
            dek_id=key.id,
            key_version=key.version,
            created_at=self._now(),
            row_version=1,
        )
        self._store.insert(transaction, voice)
        return voice

    def suspend_voice(self, transaction: Transaction, tenant: str, voice_id: UUID) -> Voice:
        """From the commit on, the voice stays closed. Raises VoiceUnknown, RowChanged."""
        voice = self._store.voice(transaction, tenant, voice_id)
        if voice is None:
            raise VoiceUnknown()
        return self._store.swap(transaction, voice, replace(voice, state=VoiceState.SUSPENDED))

    def set_voice_terms(self, transaction: Transaction, voice_id: UUID, terms: Collection[VoiceTerm]) -> Voice:
        """From the commit on, exactly these terms hold for the voice. Raises VoiceUnknown, RowChanged."""
        voice = self._store.voice_anywhere(transaction, voice_id)
        if voice is None:
            raise VoiceUnknown()
        return self._store.swap(transaction, voice, replace(voice, terms=tuple(sorted(term.value for term in terms))))

    def limit_client(self, transaction: Transaction, client_id: str, hours: Hours | None) -> Client:
        """From the commit on, the client may call in these hours alone, or always.

        Raises ClientUnknown, ClientInactive, RowChanged.
        """
        client = self._client(transaction, client_id)
        if client.state is not ClientState.ACTIVE:
            raise ClientInactive(("base.client-active",))
        return self._store.swap(transaction, client, replace(client, hours=_text(hours)))

    def limit_voice(self, transaction: Transaction, voice_id: UUID, hours: Hours | None) -> Voice:
        """From the commit on, the voice opens in these hours alone, or always. Raises VoiceUnknown, RowChanged."""
        voice = self._store.voice_anywhere(transaction, voice_id)
        if voice is None:
            raise VoiceUnknown()
        return self._store.swap(transaction, voice, replace(voice, hours=_text(hours)))

    def set_quota(self, transaction: Transaction, scope: Scope, name: str, limits: Limits) -> Quota:
        """From the commit on, these limits hold for this client or voice, or for everyone who has none of their own.

        Raises ClientUnknown, VoiceUnknown, RowChanged.
        """
        if name != EVERYONE and scope is Scope.CLIENT:
            self._client(transaction, name)
        if name != EVERYONE and scope is Scope.VOICE and self._store.voice_anywhere(transaction, UUID(name)) is None:
            raise VoiceUnknown()
        quota = Quota(scope, name, limits.requests, limits.characters, limits.seconds, limits.attempts, row_version=1)
        known = self._store.quota(transaction, scope, name)
        if known is not None:
            return self._store.swap(transaction, known, quota)
        self._store.insert(transaction, quota)
        return quota

    def _client(self, transaction: Transaction, client_id: str) -> Client:
        client = self._store.client(transaction, client_id)
        if client is None:
            raise ClientUnknown()
        return client

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _text(hours: Hours | None) -> str | None:
    return None if hours is None else str(hours)
