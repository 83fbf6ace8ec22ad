"""What policies refuse. Each error's `code` is stable; its docstring's first line is the message that a caller reads.

`detail` is for the log: it may say more, and still repeats nothing that a caller sent.
"""

from __future__ import annotations

from typing import ClassVar

_AGAIN = "Fetch a fresh token and send the request at once: tokens live five seconds and work once."
_OFFICER = "Ask the operator: `glottis clients list` shows what is registered."


class PolicyError(Exception):
    """This request is not allowed."""

    code: ClassVar[str] = "denied"
    fix: ClassVar[str] = "Ask for a fresh token with the rights this request needs."

    def __init__(self, detail: str | None = None) -> None:
        self.detail = detail
        super().__init__((type(self).__doc__ or self.code).strip().splitlines()[0])


class GrantMismatch(PolicyError):
    """The grant in hand is for something else."""

    code = "grant_mismatch"


class TokenMalformed(PolicyError):
    """This is not an access token of ours."""

    code = "token_malformed"
    fix = "Send the token from POST /oauth/token unchanged."


class TokenInvalid(PolicyError):
    """The access token does not verify."""

    code = "token_invalid"
    fix = "Fetch a fresh token from POST /oauth/token of this service."


class TokenExpired(PolicyError):
    """The access token's time is over, or has not begun."""

    code = "token_expired"
    fix = _AGAIN + " If it lasts, compare the clocks."


class GrantExpired(TokenExpired):
    """The token's time was over before the voice was opened."""


class TokenReplayed(PolicyError):
    """The access token was used before."""

    code = "token_replayed"
    fix = _AGAIN


class ProofInvalid(PolicyError):
    """The DPoP proof does not hold for this request."""

    code = "proof_invalid"
    fix = "Sign a proof (RFC 9449) for this method, this URL and this token, with a clock that is right to a few seconds."


class NonceRequired(ProofInvalid):
    """The DPoP proof needs this server's nonce."""

    code = "use_dpop_nonce"
    fix = "Sign a new proof with the claim `nonce` from the header DPoP-Nonce, and send the request again. Your clock is off."

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        super().__init__("iat is too far from our clock, or the nonce is over")


class ProofReplayed(PolicyError):
    """The DPoP proof was used before."""

    code = "proof_replayed"
    fix = "Sign a new proof for each request."


class SchemeInvalid(PolicyError):
    """The token was sent in another scheme than the one it is for."""

    code = "scheme_invalid"
    fix = (
        "Send `Authorization: DPoP <token>` and one `DPoP` header with the proof; only a token of type Bearer is sent as such,"
        " and without a proof."
    )


class CertificateRequired(PolicyError):
    """A client certificate is required."""

    code = "certificate_required"
    fix = "Connect with the client certificate that was issued to you."


class BindingMismatch(PolicyError):
    """The token belongs to another certificate or key."""

    code = "binding_mismatch"
    fix = "Use a token with the certificate and the DPoP key that it was issued to."


class PurposeMismatch(PolicyError):
    """The token is for another purpose."""

    code = "purpose_mismatch"


class VoiceMismatch(PolicyError):
    """The token is for another voice or another consent."""

    code = "voice_mismatch"


class TextMismatch(PolicyError):
    """The token is for another text."""

    code = "text_mismatch"
    fix = "Ask for a token with the SHA-256 of exactly the text to be spoken, in UTF-8."


class ClientUnknown(PolicyError):
    """No client is registered with this certificate."""

    code = "client_unknown"
    fix = _OFFICER


class VoiceUnknown(PolicyError):
    """There is no such voice."""

    code = "voice_unknown"
    fix = "List your voices with GET /v1/voices."


class ConsentUnknown(PolicyError):
    """There is no such consent."""

    code = "consent_unknown"
    fix = "Record the speaker's consent with POST /v1/consents."


class LivenessInvalid(PolicyError):
    """This is no challenge or pass of this client for this voice."""

    code = "liveness_invalid"
    fix = "Ask for new digits with POST /v1/liveness at this site, for exactly this voice, and send back what you get unchanged."


class LivenessExpired(PolicyError):
    """The digits, or the pass for them, were given out too long ago."""

    code = "liveness_expired"
    fix = "Ask for new digits with POST /v1/liveness: they are good for a minute, the pass for another."


class LivenessUsed(PolicyError):
    """The digits, or the pass for them, were used before."""

    code = "liveness_used"
    fix = "Ask for new digits with POST /v1/liveness: each are good for one recording and one use of the voice."


class VoiceKeyChanged(PolicyError):
    """The voice's key changed after the token was issued."""

    code = "voice_key_changed"
    fix = "Fetch a fresh token: it names the key version of now."


class AuthorityRowTampered(PolicyError):
    """A client, voice or consent row was changed outside Glottis."""

    code = "authority_row_tampered"
    fix = "Restore the row from a backup and look at the audit log; nothing was opened."


class RowChanged(PolicyError):
    """Somebody else changed this row at the same time."""

    code = "row_changed"
    fix = "Read it again and repeat the change."


class AuditUnavailable(PolicyError):
    """The request could not be recorded, so nothing was done."""

    code = "audit_unavailable"
    fix = "Retry; the token was not used up. If it lasts, the operator's `glottis doctor` names the part that fails."


class PolicySetInvalid(PolicyError):
    """The policies do not load or do not fit their schema."""

    code = "policy_set_invalid"
    fix = "Correct the policy that the detail names; nothing is decided without a valid set."


class PolicySetTampered(PolicyError):
    """The active set of policies is not what officers activated."""

    code = "policy_set_tampered"
    fix = "Somebody changed the database outside Glottis: restore it; `glottis policy list` says which activation does not hold."


class AuthorizationDetailsInvalid(PolicyError):
    """The authorization details are not understood (RFC 9396)."""

    code = "invalid_authorization_details"
    fix = 'Send one object: {"type":"glottis_voice","actions":["speak"],"voice":"UUID","text_sha256":"hex"}.'

    def __init__(self, detail: str | None = None, *, member: str | None = None) -> None:
        """`member`: which one does not hold, by its name in our own vocabulary; never a name that a caller made up."""
        super().__init__(detail)
        self.member = member


class GrantTypeUnsupported(PolicyError):
    """Only the client_credentials grant is offered."""

    code = "unsupported_grant_type"
    fix = "Send grant_type=client_credentials."


class ConsentInvalid(PolicyError):
    """This is not a consent that can be recorded."""

    code = "consent_invalid"
    fix = "Name the subject, purposes, territory, an expiry in the future, and the evidence."


class HoursInvalid(PolicyError):
    """These are no hours that a client or a voice can be limited to."""

    code = "hours_invalid"
    fix = (
        "Name days (mon-fri, or sat,sun), two different times (08:00, 18:00) and a zone of the IANA database (Europe/Zurich, UTC)."
    )


class Denied(PolicyError):
    """The policies do not allow this."""

    def __init__(self, decided_by: tuple[str, ...]) -> None:
        self.decided_by = decided_by
        super().__init__("decided by " + ", ".join(decided_by))


class ClientInactive(Denied):
    """This client has been revoked."""

    code = "client_inactive"
    fix = _OFFICER


class ForeignVoice(Denied):
    """There is no such voice."""

    # Another tenant's voice answers exactly like one that does not exist.
    code = VoiceUnknown.code
    fix = VoiceUnknown.fix


class ForeignConsent(Denied):
    """There is no such consent."""

    code = ConsentUnknown.code
    fix = ConsentUnknown.fix


class VoiceSuspended(Denied):
    """The voice is suspended."""

    code = "voice_suspended"
    fix = "Ask the operator why the voice was suspended."


class ConsentWithdrawn(Denied):
    """The speaker withdrew the consent."""

    code = "consent_withdrawn"
    fix = "Ask the speaker for a new consent; until then the voice stays closed."


class ConsentExpired(Denied):
    """The speaker's consent has expired."""

    code = "consent_expired"
    fix = "Ask the speaker for a new consent; until then the voice stays closed."


class ConsentPurpose(Denied):
    """The speaker did not consent to this purpose."""

    code = "consent_purpose"
    fix = "Ask the speaker for a consent that names this purpose."


class ConsentTerritory(Denied):
    """The speaker's consent does not cover this territory."""

    code = "consent_territory"
    fix = "Ask the speaker for a consent that names this territory."


class ProofRequired(Denied):
    """The voice opens only for a token that is bound to a DPoP key too."""

    code = "proof_required"
    fix = "Send a DPoP proof (RFC 9449) to POST /oauth/token; the operator's `glottis voices bearer` allows a voice to do without."


class LivenessRequired(Denied):
    """The voice opens only while its speaker is shown to be there."""

    code = "liveness_required"
    fix = "Ask for digits (POST /v1/liveness), let the speaker say them, and name the pass as `liveness` in the token request."


class OutsideHours(Denied):
    """This client, or this voice, may not be used at this time."""

    code = "outside_hours"
    fix = "Come back in its hours: the operator's `glottis clients hours NAME` and `glottis voices hours ID` name them."


class RateLimited(Denied):
    """Too many requests, or too many that failed, in this minute."""

    code = "rate_limited"
    fix = "Wait for the seconds of Retry-After. The token was not used up, but it will be over: fetch a fresh one."


class QuotaExhausted(Denied):
    """The day's quota of this client or voice is used up."""

    code = "quota_exhausted"
    fix = "Wait for the seconds of Retry-After, or ask the operator for a larger quota: `glottis clients quota NAME`."
