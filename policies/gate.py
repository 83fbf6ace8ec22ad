"""The gate: one transaction in which a request is recorded and admitted, or nothing happens.

Before the database: token, proof and their binding to the request. Then, in one durable transaction: authority rows,
consumption, policy, intent. A refusal rolls that back (the token stays usable) and, if the caller proved who it is, is
recorded in a transaction of its own. What nobody proved is only counted, so that strangers cannot fill the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from uuid import UUID

from keyvault.database import Database, Transaction
from keyvault.records import KeyRef
from policies.approval_errors import ApprovalUsed
from policies.audit.errors import AuditError
from policies.authority import Authority, Client
from policies.dual_control import approver_of
from policies.engine import Policies, Question
from policies.errors import (
    AuditUnavailable,
    BindingMismatch,
    CertificateRequired,
    ClientUnknown,
    ConsentUnknown,
    LivenessUsed,
    PolicyError,
    ProofReplayed,
    PurposeMismatch,
    SchemeInvalid,
    TextMismatch,
    TokenExpired,
    TokenMalformed,
    TokenReplayed,
    VoiceKeyChanged,
    VoiceMismatch,
    VoiceUnknown,
)
from policies.grants import ON_A_VOICE, OPENING, UNDER_CONSENT, Agreed, Binding, Grant, Purpose, VerifiedProof, VerifiedToken
from policies.intents import Facts, Intent, Intents, Outcome
from policies.liveness import CHALLENGE, PASS, WINDOW_S, Liveness, Owner
from policies.proofs import ProofVerifier, certificate_thumbprint
from policies.quotas import Limits
from policies.refusals import NotCounted, Refusals, counted, record_refusal, refusal_details
from policies.requests import Request
from policies.store import PolicyStore, deciding
from policies.throttle import Throttle
from policies.tokens import TOKEN_LIFETIME_S, TokenVerifier

ADMIT = "request.admit"
"""The action of the gate's intents."""
_NONCE_KNOWN_S = WINDOW_S + TOKEN_LIFETIME_S
"""So long beyond its token a used nonce is remembered: nothing that names it is accepted any more by then."""
_SCHEMES = frozenset(binding.scheme for binding in Binding)


@dataclass(frozen=True, repr=False)
class Call:
    """One request as it came: the credentials, and what it is about to do.

    `path` is what the URL says, without its query; `proof` the one DPoP header (a request with several is refused before), or
    None where there is none.
    """

    method: str
    path: str
    scheme: str
    token: str
    proof: str | None
    certificate_der: bytes | None
    purpose: Purpose
    voice: UUID | None = None
    consent: UUID | None = None
    text: str | None = None
    challenge: str | None = None
    """The liveness challenge that is about to be answered. It names its voice, under its MAC, so the call need not."""
    text_sha256: str | None = None
    beneficiary: str | None = None
    """What is about to be approved, and for which client: in place of a text."""


class Gate:
    """Admits requests. Safe to call from several threads."""

    def __init__(
        self,
        *,
        database: Database,
        verifier: TokenVerifier,
        proofs: ProofVerifier,
        engine: Policies,
        store: PolicyStore,
        intents: Intents,
        refusals: Refusals,
        territory: str,
        clock: Callable[[], float],
        liveness: Liveness,
        broken_glass: Callable[[], frozenset[str]] = frozenset,
        throttle: Throttle | None = None,
    ) -> None:
        """`territory`: where this installation is, an ISO 3166 code; consents are measured against it.

        `broken_glass`: what officers let this site do at the moment, as `break_glass.cedar` names it.
        """
        self._database = database
        self._verifier = verifier
        self._proofs = proofs
        self._engine = engine
        self._store = store
        self._intents = intents
        self._refusals = refusals
        self._territory = territory
        self._clock = clock
        self._liveness = liveness
        self._broken_glass = broken_glass
        self._throttle = throttle or Throttle(Limits().attempts, clock)

    def admit(self, call: Call) -> Grant:
        """Admit the call: when this returns, its intent is on disk. Raises PolicyError otherwise, and nothing has happened.

        Raises AuditUnavailable where the database cannot record it; the token is then not used up.
        """
        with counted(self._refusals, self._throttle, call.certificate_der):
            token, proof = self._authenticated(call)
        try:
            _check_request(token, call)
            nonce, glass = self._nonce(token, call), self._broken_glass() if token.purpose in OPENING else frozenset()
            with deciding(self._database) as transaction:
                return self._admitted(transaction, token, proof, nonce, len(call.text or ""), glass)
        except (AuditError, AuditUnavailable):
            raise  # what the log could not take is not a refusal that it could take
        except PolicyError as refusal:
            once = proof or _once(token)
            record_refusal(
                self._database, self._store, self._intents, self._refusals, once, refusal, _denied(token, proof, refusal),
                self._store.spend(token.caller, None, self._clock(), attempts=int(not isinstance(refusal, NotCounted))),
            )  # fmt: skip
            raise

    def _authenticated(self, call: Call) -> tuple[VerifiedToken, VerifiedProof | None]:
        """The caller holds every key that the token names. No database."""
        if call.certificate_der is None and call.scheme.lower() != Binding.KEY.scheme:
            raise CertificateRequired()
        if call.scheme.lower() not in _SCHEMES:
            raise SchemeInvalid()
        token = self._token(call)
        proof = self._proof(call, token)
        # A browser may hold a certificate of its own for other ends: its token names none, and none is looked at.
        if token.x5t_s256 is not None and not compare_digest(certificate_thumbprint(call.certificate_der or b""), token.x5t_s256):
            raise BindingMismatch("another certificate")
        return token, proof

    def _token(self, call: Call) -> VerifiedToken:
        """The token. Who shows no certificate is told so, unless the token names none. Raises PolicyError."""
        try:
            token = self._verifier.verify(call.token)
        except TokenMalformed:
            if call.certificate_der is None:
                raise CertificateRequired() from None
            raise
        if call.certificate_der is None and token.x5t_s256 is not None:
            raise CertificateRequired()
        return token

    def _proof(self, call: Call, token: VerifiedToken) -> VerifiedProof | None:
        """The proof by the token's key; None where it names none, and then there may be none. Raises PolicyError."""
        if call.scheme.lower() != token.bound.scheme:
            raise SchemeInvalid(f"a token bound to {token.bound}")
        if token.jkt is None:
            if call.proof is not None:
                raise SchemeInvalid("a proof beside a token that no key is bound to")
            return None
        proof = self._proofs.verify(call.proof or "", call.method, call.path, call.token)
        if not compare_digest(proof.jkt, token.jkt):
            raise BindingMismatch("another DPoP key")
        return proof

    def _nonce(self, token: VerifiedToken, call: Call) -> tuple[str, UUID] | None:
        """The liveness nonce that the call uses up, and as what. Raises LivenessInvalid, LivenessExpired."""
        if call.challenge is not None and token.voice is not None:
            return CHALLENGE, self._liveness.asked(call.challenge, Owner(token.tenant, token.client_id, token.voice)).id
        return None if token.liveness is None else (PASS, token.liveness)

    def _admitted(
        self,
        transaction: Transaction,
        token: VerifiedToken,
        proof: VerifiedProof | None,
        nonce: tuple[str, UUID] | None,
        characters: int,
        glass: frozenset[str],
    ) -> Grant:
        """Two round trips, and more for a nonce or a second client's word: what is to be known, then the intent with the COMMIT."""
        request = Request(token.caller, proof, self._clock(), token, token.voice, token.consent, characters)
        opening = self._store.open(transaction, request, *self._intents.place())
        authority, left = opening.authority()
        client = _known(authority, token)
        if not opening.fresh_token:
            raise TokenReplayed()
        if not opening.fresh_proof:
            raise ProofReplayed()
        if nonce is not None and not self._store.use_nonce(transaction, *nonce, until=token.expires_at + _NONCE_KNOWN_S):
            raise LivenessUsed()
        approver = None if token.agreed is None else self._approver(transaction, token.agreed)
        # Read after consuming: a guard row may be forgotten once the token is over, and not before (store.RETENTION_S).
        now = self._clock()
        if now >= token.expires_at:
            raise TokenExpired()
        if proof is not None:
            self._proofs.check_age(proof.issued_at)
        rows, live = (client, authority.voice, authority.consent), token.liveness is not None
        question = Question(
            *(token.purpose, *rows, self._territory, now, left, token.bound, live),
            approver=approver,
            beneficiary=token.beneficiary,
            broken_glass=glass,
        )
        decided_by = self._engine.at(opening.policies, transaction).decide(question).require()
        facts: Facts = {"policies": ",".join(decided_by), **used_details(nonce and nonce[1], token.agreed)}
        intent = _intent("allowed", token, proof, facts)
        intent_id = self._intents.append(transaction, intent, opening.rows, commit=True)
        passed = nonce[1] if nonce is not None and nonce[0] == PASS else None
        return Grant(token, proof, intent_id, decided_by, passed, token.agreed)

    def _approver(self, transaction: Transaction, agreed: Agreed) -> Client:
        """The second client, by its row of now; its word is used up. Raises ApprovalUsed, ApproverRefused."""
        if not self._store.use_approval(transaction, agreed.id):
            raise ApprovalUsed()
        return approver_of(self._store, transaction, agreed)


def require_rows(purpose: Purpose, authority: Authority) -> None:
    """The rows that this purpose is about exist. Raises VoiceUnknown, ConsentUnknown."""
    if purpose in ON_A_VOICE and authority.voice is None:
        raise VoiceUnknown()
    if purpose in UNDER_CONSENT and authority.consent is None:
        raise ConsentUnknown()


def key_details(key: KeyRef | None) -> Facts:
    """What an intent says about the key that is to be used."""
    if key is None:
        return {}
    return {"key_id": str(key.id), "key_version": key.version, "ring": key.ring, "ring_version": key.ring_version}


def used_details(nonce: UUID | None, agreed: Agreed | None) -> Facts:
    """What an intent says about what is used up beside token and proof."""
    live: Facts = {} if nonce is None else {"liveness": str(nonce)}
    return live if agreed is None else live | {"approval": str(agreed.id), "approver": agreed.approver}


def _check_request(token: VerifiedToken, call: Call) -> None:
    """The token is for exactly this request. Raises PurposeMismatch, VoiceMismatch, TextMismatch."""
    if token.purpose is not call.purpose:
        raise PurposeMismatch()
    if call.challenge is None and token.voice != call.voice:
        raise VoiceMismatch("voice")
    if call.consent is not None and token.consent != call.consent:
        raise VoiceMismatch("consent")
    if token.purpose is Purpose.APPROVE and token.text_sha256 != call.text_sha256:
        raise TextMismatch("hash")
    if token.beneficiary != call.beneficiary:
        raise VoiceMismatch("beneficiary")
    if token.purpose is Purpose.SPEAK:
        _check_text(token, call.text)


def _check_text(token: VerifiedToken, text: str | None) -> None:
    if text is None or token.text_sha256 is None or token.max_chars is None or len(text) > token.max_chars:
        raise TextMismatch("length")
    # A lone surrogate has no UTF-8, and so no hash that a client could have asked for: "surrogatepass" gives it a wrong one.
    if not compare_digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), token.text_sha256):
        raise TextMismatch("hash")


def _known(authority: Authority, token: VerifiedToken) -> Client:
    """The rows are still those that the token was minted for."""
    client = authority.client
    if client is None or (client.client_id, client.tenant) != (token.client_id, token.tenant):
        raise ClientUnknown()
    if token.jkt is not None and client.jkt != token.jkt:
        raise BindingMismatch("the client's DPoP key was replaced")
    require_rows(token.purpose, authority)
    voice = authority.voice if token.purpose in OPENING else None
    if voice is not None and (token.key is None or (voice.dek_id, voice.key_version) != (token.key.id, token.key.version)):
        raise VoiceKeyChanged()
    return client


def _once(token: VerifiedToken) -> VerifiedProof:
    """In place of a proof, where there is none: one refusal is recorded for each token, however often it is sent."""
    return VerifiedProof(f"x5t {token.x5t_s256}", token.jti, token.issued_at)


def _denied(token: VerifiedToken, proof: VerifiedProof | None, refusal: PolicyError) -> Intent:
    return _intent("denied", token, proof, refusal_details(refusal))


def _intent(outcome: Outcome, token: VerifiedToken, proof: VerifiedProof | None, more: Facts) -> Intent:
    return Intent(
        action=ADMIT,
        outcome=outcome,
        tenant=token.tenant,
        client_id=token.client_id,
        voice=token.voice,
        purpose=token.purpose.value,
        details={
            "jti": token.jti,
            "proof_jti": None if proof is None else proof.jti,
            "jkt": token.jkt,
            "x5t": token.x5t_s256,
            "consent": None if token.consent is None else str(token.consent),
            "text_sha256": token.text_sha256,
            **({} if token.beneficiary is None else {"beneficiary": token.beneficiary}),
            **key_details(token.key),
            **more,
        },
    )
