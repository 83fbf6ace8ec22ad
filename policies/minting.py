"""The token endpoint: client credentials over mutual TLS (RFC 8705 §2) with DPoP (RFC 9449 §5) and RFC 9396 details.

Everything that the gate will ask is asked here already, so that a hopeless request gets no token. The mint is recorded in
the same transaction as the decision, and the token is signed only after that transaction is on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any
from uuid import UUID

from keyvault.database import Database, Transaction
from keyvault.records import KeyRef
from policies.audit.errors import AuditError
from policies.authority import Client, Voice, key_alone
from policies.dual_control import DualControl, Utterance, approver_of
from policies.engine import Policies, Question
from policies.errors import (
    AuditUnavailable,
    BindingMismatch,
    CertificateRequired,
    ClientUnknown,
    GrantTypeUnsupported,
    PolicyError,
    ProofReplayed,
)
from policies.gate import key_details, require_rows, used_details
from policies.grants import OPENING, Agreed, Binding, VerifiedProof
from policies.intents import Facts, Intent, Intents, Outcome
from policies.liveness import Liveness, Owner
from policies.proofs import ProofVerifier, certificate_thumbprint
from policies.quotas import MINUTE_S, Limits
from policies.refusals import NotCounted, Refusals, counted, record_refusal, refusal_details
from policies.requests import Request
from policies.store import Opening, PolicyStore, deciding
from policies.throttle import Throttle
from policies.tokens import TOKEN_LIFETIME_S, Entitlement, TokenMint
from policies.wishes import Wish

MINT = "token.mint"
"""The action of the token endpoint's intents."""
TOKEN_TYPES = {Binding.BOTH: "DPoP", Binding.CERTIFICATE: "Bearer", Binding.KEY: "DPoP"}
"""The `token_type` of an answer: RFC 9449 §5, RFC 8705 §3."""
KeyOf = Callable[[Transaction, Voice], KeyRef]
"""The key version that a voice is sealed with now, and the ring version that wraps it. Raises KeyNotFound."""


@dataclass(frozen=True, repr=False)
class TokenRequest:
    """One request to the token endpoint, as it came. Without a DPoP proof, it asks for a token bound to the certificate alone."""

    method: str
    path: str
    proof: str | None
    certificate_der: bytes | None
    grant_type: str
    authorization_details: str


@dataclass(frozen=True, repr=False)
class IssuedToken:
    """What the client gets, and the audit intent that says so."""

    access_token: str
    token_type: str
    expires_in: int
    authorization_details: list[dict[str, Any]]
    intent_id: UUID


class Minting:
    """Issues tokens to registered clients. Safe to call from several threads."""

    def __init__(
        self,
        *,
        database: Database,
        mint: TokenMint,
        proofs: ProofVerifier,
        engine: Policies,
        store: PolicyStore,
        intents: Intents,
        refusals: Refusals,
        key_of: KeyOf,
        territory: str,
        clock: Callable[[], float],
        liveness: Liveness,
        dual_control: DualControl,
        broken_glass: Callable[[], frozenset[str]] = frozenset,
        throttle: Throttle | None = None,
    ) -> None:
        self._database = database
        self._mint = mint
        self._proofs = proofs
        self._engine = engine
        self._store = store
        self._intents = intents
        self._refusals = refusals
        self._key_of = key_of
        self._territory = territory
        self._clock = clock
        self._liveness = liveness
        self._dual_control = dual_control
        self._broken_glass = broken_glass
        self._throttle = throttle or Throttle(Limits().attempts, clock)

    def issue(self, request: TokenRequest) -> IssuedToken:
        """Issue one token. Raises PolicyError; a refusal to a client that proved who it is has been recorded."""
        with counted(self._refusals, self._throttle, request.certificate_der):
            wish, proof, caller = self._proved(request)
        client: Client | None = None
        try:
            glass = self._broken_glass() if wish.purpose in OPENING else frozenset()
            with deciding(self._database) as transaction:
                asked = Request(caller, proof, self._clock(), voice=wish.voice, consent=wish.consent)
                opening = self._store.open(transaction, asked, *self._intents.place())
                client = _client(opening, proof, request.certificate_der)
                entitlement, decided_by = self._entitled(transaction, client, opening, wish, proof, glass)
                facts: Facts = {"jti": entitlement.jti, "policies": ",".join(decided_by), **key_details(entitlement.key)}
                facts |= used_details(entitlement.liveness, entitlement.agreed)
                intent = _intent("allowed", client, wish, proof, facts)
                intent_id = self._intents.append(transaction, intent, opening.rows, commit=True)
        except (AuditError, AuditUnavailable):
            raise  # what the log could not take is not a refusal that it could take
        except PolicyError as refusal:
            if client is None:
                self._refusals.count(refusal.code)
                if request.certificate_der is not None:
                    self._throttle.failed(caller)
            else:
                intent = _intent("denied", client, wish, proof, refusal_details(refusal))
                spend = self._store.spend(caller, None, self._clock(), attempts=int(not isinstance(refusal, NotCounted)))
                once = proof or self._once(caller, refusal)
                record_refusal(self._database, self._store, self._intents, self._refusals, once, refusal, intent, spend)
            raise
        kind = TOKEN_TYPES[_binding(client, proof)]
        return IssuedToken(self._mint.mint(entitlement), kind, TOKEN_LIFETIME_S, wish.details(), intent_id)

    def _once(self, x5t_s256: str, refusal: PolicyError) -> VerifiedProof:
        """In place of a proof, where there is none: one refusal of a kind is recorded for each certificate in each minute."""
        minute = int(self._clock()) // MINUTE_S
        return VerifiedProof(f"x5t {x5t_s256}", f"{refusal.code} {minute}", minute * MINUTE_S)

    def _proved(self, request: TokenRequest) -> tuple[Wish, VerifiedProof | None, str]:
        """What needs no database."""
        if request.certificate_der is None and request.proof is None:
            raise CertificateRequired()
        if request.grant_type != "client_credentials":
            raise GrantTypeUnsupported()
        proof = None if request.proof is None else self._proofs.verify(request.proof, request.method, request.path, None)
        wish = Wish.parse(request.authorization_details)
        if request.certificate_der is not None:
            return wish, proof, certificate_thumbprint(request.certificate_der)
        if proof is None:
            raise CertificateRequired()
        return wish, proof, key_alone(proof.jkt)

    def _entitled(
        self,
        transaction: Transaction,
        client: Client,
        opening: Opening,
        wish: Wish,
        proof: VerifiedProof | None,
        glass: frozenset[str],
    ) -> tuple[Entitlement, tuple[str, ...]]:
        """What the token will say, and the policies that allow it."""
        if not opening.fresh_proof:
            raise ProofReplayed()
        if proof is not None:
            self._proofs.check_age(proof.issued_at)
        authority, left = opening.authority()
        require_rows(wish.purpose, authority)
        rows, now = (client, authority.voice, authority.consent), self._clock()
        nonce, agreed = self._answered(client, wish), self._agreed(client, wish)
        question = Question(
            *(wish.purpose, *rows, self._territory, now, left, _binding(client, proof)),
            live=nonce is not None,
            approver=None if agreed is None else approver_of(self._store, transaction, agreed),
            beneficiary=wish.client,
            broken_glass=glass,
        )
        decided_by = self._engine.at(opening.policies, transaction).decide(question).require()
        entitlement = Entitlement(
            jti=self._mint.new_jti(),
            tenant=client.tenant,
            client_id=client.client_id,
            purpose=wish.purpose,
            x5t_s256=None if client.browser else client.cert_sha256,
            jkt=None if proof is None else client.jkt,
            voice=wish.voice,
            key=self._key_of(transaction, authority.voice) if authority.voice and wish.purpose in OPENING else None,
            consent=wish.consent,
            text_sha256=wish.text_sha256,
            max_chars=wish.max_chars,
            liveness=nonce,
            agreed=agreed,
            beneficiary=wish.client,
        )
        return entitlement, decided_by

    def _answered(self, client: Client, wish: Wish) -> UUID | None:
        """The nonce of the pass that the client names, if it names one. Raises LivenessInvalid, LivenessExpired."""
        if wish.liveness is None or wish.voice is None:
            return None
        return self._liveness.presented(wish.liveness, Owner(client.tenant, client.client_id, wish.voice))

    def _agreed(self, client: Client, wish: Wish) -> Agreed | None:
        """The second client's word that the client names, if it names one. Raises ApprovalInvalid, ApprovalExpired."""
        if wish.approval is None or wish.voice is None or wish.text_sha256 is None:
            return None
        return self._dual_control.presented(wish.approval, Utterance(client.tenant, client.client_id, wish.voice, wish.text_sha256))


def _binding(client: Client, proof: VerifiedProof | None) -> Binding:
    """What a token asked for by this client with this proof is bound to."""
    if proof is None:
        return Binding.CERTIFICATE
    return Binding.KEY if client.browser else Binding.BOTH


def _client(opening: Opening, proof: VerifiedProof | None, certificate_der: bytes | None) -> Client:
    """The client that holds this certificate and this key. Raises CertificateRequired, ClientUnknown, BindingMismatch."""
    if opening.client is None and certificate_der is None:
        raise CertificateRequired()  # no browser's key: whoever has one like it shows a certificate beside it
    if opening.client is None:
        raise ClientUnknown()
    if proof is not None and not compare_digest(opening.client.jkt, proof.jkt):
        raise BindingMismatch("not the client's DPoP key")
    return opening.client


def _intent(outcome: Outcome, client: Client, wish: Wish, proof: VerifiedProof | None, more: Facts) -> Intent:
    return Intent(
        action=MINT,
        outcome=outcome,
        tenant=client.tenant,
        client_id=client.client_id,
        voice=wish.voice,
        purpose=wish.purpose.value,
        details={
            "proof_jti": None if proof is None else proof.jti,
            "jkt": None if proof is None else proof.jkt,
            "x5t": None if client.browser else client.cert_sha256,
            "consent": None if wish.consent is None else str(wish.consent),
            "text_sha256": wish.text_sha256,
            **({} if wish.client is None else {"beneficiary": wish.client}),
            **more,
        },
    )
