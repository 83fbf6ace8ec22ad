"""Errors on the wire: one table from stable codes to HTTP statuses, one JSON form.

Domain code never names a status. The form is the one OpenAI's clients read: `{"error": {"code", "message", "type", "param"}}`,
with `fix` beside it. Nothing of what the caller sent is ever echoed.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

STATUS: Mapping[str, int] = {
    # who is calling
    "certificate_required": 401,
    "client_unknown": 401,
    "token_required": 401,
    "token_malformed": 401,
    "token_invalid": 401,
    "token_expired": 401,
    "token_replayed": 401,
    "proof_required": 401,
    "proof_malformed": 401,
    "proof_invalid": 401,
    "proof_replayed": 401,
    "binding_mismatch": 401,
    "text_mismatch": 401,
    "voice_mismatch": 401,
    "grant_mismatch": 401,
    # what they may
    "denied": 403,
    "voice_suspended": 403,
    "consent_required": 403,
    "voice_not_found": 404,
    "consent_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    # what they sent
    "invalid_request": 400,
    "too_large": 413,
    "not_audio": 415,
    "unsupported_audio": 415,
    # what the vault could not do
    "key_version_not_found": 404,
    "key_state_forbids": 403,
    "busy": 503,
    "vault_unavailable": 503,
    "audit_unavailable": 503,
    "hsm_unavailable": 503,
    "pin_rejected": 503,
    "locked_memory_exhausted": 503,
    # broken trust: refused, and somebody should look
    "record_tampered": 500,
    "seal_broken": 500,
    "unwrap_rejected": 500,
    "internal_error": 500,
}

RETRY_AFTER_S: Mapping[str, int] = {"busy": 1, "vault_unavailable": 1, "audit_unavailable": 2, "hsm_unavailable": 2}

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


def status_of(code: str) -> int:
    """The HTTP status of a code. Codes of gates and text rules, which are many, are all 422."""
    return STATUS.get(code, 422)


def problem(code: str, message: str, fix: str, *, extra: Mapping[str, object] | None = None) -> JSONResponse:
    """The answer for a refusal. `extra` holds measured values and thresholds, never input."""
    status = status_of(code)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"code": code, "message": message, "fix": fix, "type": kind, "param": None, **(extra or {})}
    headers = {"Cache-Control": "no-store"}
    if code in RETRY_AFTER_S:
        headers["Retry-After"] = str(RETRY_AFTER_S[code])
    if status in (401, 403):
        # SDKs retry some refusals by themselves; a single-use token would come back as a replay.
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = f'DPoP error="{_oauth_error(code)}", algs="ES256"'
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _oauth_error(code: str) -> str:
    return "invalid_dpop_proof" if code.startswith("proof_") else "invalid_token"


def unexpected() -> JSONResponse:
    """Our own fault: no detail leaves the process; the log has it."""
    return problem(
        "internal_error", "Something failed inside Glottis.", "Look at the vault's log for this time; report it with the log entry."
    )
