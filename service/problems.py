"""Errors on the wire: one table from stable codes to HTTP statuses, one JSON form.

Domain code never names a status. The form is the one OpenAI's clients read: `{"error": {"code", "message", "type", "param"}}`,
with `fix` beside it. Nothing of what the caller sent is ever echoed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil

from starlette.responses import JSONResponse

_BY_STATUS: Mapping[int, str] = {
    400: "certificate_ambiguous client_cert_invalid"
    " invalid_request unsupported_grant_type invalid_authorization_details consent_invalid hours_invalid",
    401: "certificate_revoked"
    " certificate_required client_unknown token_malformed token_invalid token_expired token_replayed proof_invalid"
    " use_dpop_nonce proof_replayed proof_required ticket_unknown ticket_expired ticket_used"
    " invitation_unknown invitation_expired invitation_used"
    " scheme_invalid binding_mismatch purpose_mismatch voice_mismatch text_mismatch voice_key_changed"
    " grant_mismatch liveness_invalid liveness_expired liveness_used"
    " dual_control_invalid dual_control_expired dual_control_used",
    403: "denied client_inactive voice_suspended consent_withdrawn consent_expired consent_purpose consent_territory"
    " liveness_required not_live outside_hours dual_control_required dual_control_own"
    " approver_refused key_used_otherwise key_state_forbids key_compromised key_destroyed",
    404: "not_found voice_unknown consent_unknown key_version_not_found voiceprint_missing voice_erased",
    405: "method_not_allowed",
    408: "client_disconnected cancelled",
    409: "row_changed model_mismatch",
    413: "too_large upload_too_large audio_too_long text_too_long speech_too_long",
    415: "not_audio unsupported_audio",
    422: "audio_refused damaged_audio audio_empty invalid_samples decode_timeout quality_refused embedding_invalid"
    " digits_unreadable recording_used not_fresh"
    " conditioning_invalid too_little_speech empty_input unspeakable speed_out_of_range",
    429: "rate_limited quota_exhausted",
    # Broken trust or our own fault: refused, and somebody should look.
    500: "internal_error record_tampered authority_row_tampered seal_broken unwrap_rejected hsm_promise_broken audit_tampered"
    " audit_diverged audit_error audit_record_invalid audit_completion_refused conditioning_refused synthesis_failed model_refused"
    " key_vault_error key_use_refused voiceprint_error policy_set_invalid policy_set_tampered onnxruntime_conflict"
    " ceremony_refused",
    503: "revocations_unknown"
    " busy vault_unavailable audit_unavailable hsm_unavailable pin_rejected locked_memory_exhausted voiceprints_unavailable"
    " pkcs11_module_refused"
    " decoder_unavailable recogniser_unavailable audit_signing_failed audit_log_occupied"
    " awaiting_sync stale_epoch key_quarantined site_frozen site_unfounded store_rolled_back token_rolled_back"
    " sync_store_unavailable signing_key_tampered master_missing hsm_timeout hsm_busy pin_throttled",
}
STATUS: Mapping[str, int] = {code: status for status, codes in _BY_STATUS.items() for code in codes.split()}
"""Every code that a request can be answered with, and its HTTP status. Replay and expiry are 401: SDKs retry 409 and 5xx."""

RETRY_AFTER_S: Mapping[str, int] = {
    code: 2 if code in ("audit_unavailable", "hsm_unavailable") else 1 for code in _BY_STATUS[503].split()
}

_WINDOWS_S: Mapping[str, int] = {"rate_limited": 60, "quota_exhausted": 86_400}
"""These count by the minute and by the day, UTC: what was used up is there again when the next one begins."""
_KINDS = {
    429: "rate_limit_error",
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


def status_of(code: str) -> int:
    """The HTTP status of a code; one that is not in the table is our own fault."""
    return STATUS.get(code, 500)


def public_message(code: str, error: Exception) -> str:
    """What a caller may read of an error of ours. What a recording or a text lacks says so in full, with limits of ours.

    What is no fault of the caller's (5xx) says the first line of its docstring alone: its own words name files, hashes, keys.
    """
    return str(error) if status_of(code) < 500 else fixed_message(code, error)


def fixed_message(code: str, error: Exception) -> str:
    """The first line of the error's docstring."""
    return (type(error).__doc__ or code).strip().splitlines()[0]


def problem(
    code: str, message: str, fix: str, *, extra: Mapping[str, object] | None = None, retry_after_s: float | None = None
) -> JSONResponse:
    """The answer for a refusal. `extra` holds measured values and thresholds, never input.

    `retry_after_s`: when to come again, where that is known better than by RETRY_AFTER_S.
    """
    status = status_of(code)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"code": code, "message": message, "fix": fix, "type": kind, "param": None, **(extra or {})}
    headers = {"Cache-Control": "no-store"}
    if code in RETRY_AFTER_S:
        headers["Retry-After"] = str(RETRY_AFTER_S[code] if retry_after_s is None else ceil(retry_after_s))
    if code in _WINDOWS_S:
        headers["Retry-After"] = str(_WINDOWS_S[code] - int(time.time()) % _WINDOWS_S[code])
    if status in (401, 403, 429):
        # SDKs retry some refusals by themselves; a single-use token would come back as a replay.
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = _challenge(code)
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def certificate_required() -> JSONResponse:
    """For a connection without a client certificate: readable, where a failed handshake would not be."""
    fix = (
        "Connect with the certificate that was issued to this client (mutual TLS). A page calls with a browser's own key only where"
        " GLOTTIS_BROWSER_ORIGINS names the page's origin."
    )
    return problem("certificate_required", "This call needs a client certificate.", fix)


def _challenge(code: str) -> str:
    if code.startswith("ticket_"):
        return 'Ticket error="invalid_token"'
    return f'DPoP error="{_oauth_error(code)}", algs="ES256"'


def _oauth_error(code: str) -> str:
    """RFC 9449 §7.1 and §9, RFC 6750 §3.1."""
    if code == "use_dpop_nonce":
        return code
    return "invalid_dpop_proof" if code.startswith("proof_") else "invalid_token"


def unexpected() -> JSONResponse:
    """Our own fault: no detail leaves the process; the log has it."""
    return problem(
        "internal_error", "Something failed inside Glottis.", "Look at the vault's log for this time; report it with the log entry."
    )
