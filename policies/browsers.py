"""Keys made in a browser: registered once, by a one-time code and a proof that the browser holds the key.

A browser has no certificate. Its key is made by WebCrypto and cannot be taken out of it; every request is signed by it (RFC
9449), and its tokens name the key alone. What it may do stands in `browsers.cedar`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from keyvault.database import Database, Transaction
from policies.audit.errors import AuditError
from policies.authority import BROWSER_ROLES, Client, ClientState, Role, key_alone
from policies.caller_errors import BrowserRolesRefused, InvitationExpired, InvitationUnknown, InvitationUsed
from policies.errors import AuditUnavailable, PolicyError, ProofReplayed, RowChanged, VoiceUnknown
from policies.grants import VerifiedProof
from policies.intents import Facts, Intent, Intents, Outcome
from policies.one_time import MAX_LIFETIME_S, SECRET_BYTES, BrowserInvitation, digest_of, written
from policies.proofs import ProofVerifier
from policies.refusals import Refusals, record_refusal, refusal_details
from policies.store import PolicyStore, site_wide

REGISTER = "client.registered"
"""The action of the intents, as for every client."""
_PURPOSE = "clients"


@dataclass(frozen=True, repr=False)
class Presented:
    """One request to register a key: method and path as called, the code, and a DPoP proof for it (`ath` is the code's hash)."""

    method: str
    path: str
    code: str
    proof: str


@dataclass(frozen=True, repr=False)
class Invited:
    """The code, which is shown once, and when it ends."""

    code: str
    expires_at: datetime


def invite(
    store: PolicyStore,
    transaction: Transaction,
    *,
    client_id: str,
    tenant: str,
    roles: Sequence[Role],
    voice: UUID | None,
    now: float,
    lifetime_s: int = MAX_LIFETIME_S,
) -> Invited:
    """A code for one browser, which will be `client_id`.

    Raises BrowserRolesRefused, VoiceUnknown for a voice that is not the tenant's, RowChanged where the name is taken, and
    ValueError for a longer life than MAX_LIFETIME_S.
    """
    if not roles or not set(roles) <= set(BROWSER_ROLES) or (Role.SPEAKER in roles and voice is None):
        raise BrowserRolesRefused()
    if voice is not None and store.voice(transaction, tenant, voice) is None:
        raise VoiceUnknown()
    if store.client(transaction, client_id) is not None:
        raise RowChanged("client: exists")
    if not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise ValueError("lifetime of a code")
    code = written(secrets.token_bytes(SECRET_BYTES))
    expires_at = datetime.fromtimestamp(int(now) + lifetime_s, UTC)
    digest = digest_of(code)
    assert digest is not None
    store.insert(transaction, BrowserInvitation(digest, tenant, client_id, tuple(roles), voice, expires_at))
    return Invited(code, expires_at)


class BrowserKeys:
    """Registers browsers' keys. Safe to call from several threads."""

    def __init__(
        self,
        *,
        database: Database,
        proofs: ProofVerifier,
        store: PolicyStore,
        intents: Intents,
        refusals: Refusals,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._proofs = proofs
        self._store = store
        self._intents = intents
        self._refusals = refusals
        self._clock = clock

    def register(self, presented: Presented) -> tuple[Client, UUID]:
        """Register the key that signed the proof; the client, and the log entry that says so. The code is used up by success alone.

        Raises InvitationUnknown, InvitationExpired, InvitationUsed, ProofInvalid, ProofReplayed, AuditUnavailable, RowChanged where
        the name or the browser's key is registered already, and KeyUsedOtherwise where the key is that of a client with a
        certificate. What came with no code of ours is counted and not recorded.
        """
        invitation: BrowserInvitation | None = None
        try:
            digest = digest_of(presented.code)
            if digest is None:
                raise InvitationUnknown()
            proof = self._proofs.verify(presented.proof, presented.method, presented.path, presented.code)
            with site_wide(self._database) as transaction:  # no other tenant may have this name or key
                invitation = self._store.one_time(transaction, BrowserInvitation, digest)
                if invitation is None:
                    raise InvitationUnknown()
                return self._registered(transaction, invitation, proof)
        except (AuditError, AuditUnavailable):
            raise  # what the log could not take is not a refusal that it could take
        except PolicyError as refusal:
            if invitation is None:
                self._refusals.count(refusal.code)
            else:
                self._record(invitation, refusal)
            raise

    def _registered(self, transaction: Transaction, invitation: BrowserInvitation, proof: VerifiedProof) -> tuple[Client, UUID]:
        if not self._store.consume_proof(transaction, proof):
            raise ProofReplayed()
        if not self._store.use_up(transaction, invitation):
            raise InvitationUsed()
        # Read after consuming, as in the gate.
        if self._clock() >= invitation.expires_at.timestamp():
            raise InvitationExpired()
        self._proofs.check_age(proof.issued_at)
        client = Client(
            invitation.client_id,
            invitation.tenant,
            key_alone(proof.jkt),
            proof.jkt,
            invitation.roles,
            ClientState.ACTIVE,
            row_version=1,
            voice_id=invitation.voice_id,
        )
        self._store.insert(transaction, client)
        facts: Facts = {"jkt": proof.jkt, "proof_jti": proof.jti, "roles": " ".join(sorted(client.roles))}
        return client, self._intents.append(transaction, _intent("allowed", invitation, facts))

    def _record(self, invitation: BrowserInvitation, refusal: PolicyError) -> None:
        once = VerifiedProof("browser invitation", invitation.secret_sha256, int(invitation.expires_at.timestamp()))
        spend = self._store.spend("", None, self._clock())  # nobody's: there is no such client yet
        intent = _intent("denied", invitation, refusal_details(refusal))
        record_refusal(self._database, self._store, self._intents, self._refusals, once, refusal, intent, spend)


def _intent(outcome: Outcome, invitation: BrowserInvitation, more: Facts) -> Intent:
    return Intent(
        action=REGISTER,
        outcome=outcome,
        tenant=invitation.tenant,
        client_id=invitation.client_id,
        voice=invitation.voice_id,
        purpose=_PURPOSE,
        details={"invitation": invitation.secret_sha256, **more},
    )
