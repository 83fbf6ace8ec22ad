"""Exit codes of every command, in one table, and which error gives which."""

from __future__ import annotations

from enum import IntEnum

import click


class Exit(IntEnum):
    """What a script may rely on."""

    OK = 0
    LOCAL = 1  # usage, settings, files, this machine
    HSM = 2  # the HSM does not answer or does not let us in
    INTEGRITY = 3  # something was changed, or a promise does not hold
    REFUSED = 4  # a rule forbids it
    PARTIAL = 5  # done in part
    CONFLICT = 6  # something else is there already, or changed meanwhile
    TEMPORARY = 75  # not yet: something is away, or officers are awaited; give it again (EX_TEMPFAIL of sysexits.h)


_HSM = ("hsm_unavailable", "pkcs11_module_refused", "pin_rejected", "call_failed")
_INTEGRITY = (
    *(
        "hsm_promise_broken",
        "record_tampered",
        "signing_key_tampered",
        "authority_row_tampered",
        "seal_broken",
        "unwrap_rejected",
        "model_refused",
    ),
    "erasure_certificate_invalid",
    *("audit_tampered", "audit_diverged", "runtime_conflict", "policy_set_invalid", "policy_set_tampered"),
    *("certificate_invalid", "sync_signature_invalid", "statement_malformed", "same_key_unproved", "sites_diverged", "site_frozen"),
    *("checkpoint_refused", "log_forked", "log_shortened"),
    *("store_rolled_back", "token_rolled_back", "token_not_in_roster", "master_missing", "ceremony_message_invalid"),
)
_REFUSED = (
    *("denied", "client_inactive", "grant_mismatch", "token_expired", "ceremony_refused", "certificate_request_refused"),
    *("sync_refused", "peer_refused", "key_quarantined", "key_still_referenced", "voice_erased", "introduction_refused"),
    *("browser_roles_refused", "browser_has_no_certificate", "key_used_otherwise", "adoption_incomplete"),
    *("reason_missing", "delay_too_short", "nothing_pending", "voice_not_erased"),
    *("approval_invalid", "approval_expired", "requester_approved", "key_state_forbids"),
    *("key_compromised", "key_destroyed", "signer_in_use", "overlap_too_short", "key_use_refused"),
    *("rotation_pin_needed", "rotation_token_holds", "no_rotation_token"),
)
_CONFLICT = (
    *("already_running", "port_taken", "row_changed", "client_exists", "log_occupied", "sync_conflict", "site_behind"),
    "signer_rotating",
)
_TEMPORARY = (
    *("database_unavailable", "audit_unavailable", "busy", "site_busy"),
    *("peer_unheard", "peer_unavailable", "awaiting_sync", "stale_epoch", "sync_store_unavailable"),
    *("approvals_missing", "client_awaits_officers"),
)

BY_CODE: dict[str, Exit] = {
    **dict.fromkeys(_HSM, Exit.HSM),
    **dict.fromkeys(_INTEGRITY, Exit.INTEGRITY),
    **dict.fromkeys(_REFUSED, Exit.REFUSED),
    **dict.fromkeys(_CONFLICT, Exit.CONFLICT),
    **dict.fromkeys(_TEMPORARY, Exit.TEMPORARY),
}
"""Error codes; every other known error is LOCAL."""


def exit_for(error: BaseException) -> Exit:
    """The exit code of an error that ended a command; a step or process that failed counts as what ended it."""
    return BY_CODE.get(str(getattr(error, "cause", getattr(error, "code", ""))), Exit.LOCAL)


class Ended(click.exceptions.Exit):
    """End the command with a code after it has said everything itself."""

    def __init__(self, code: Exit) -> None:
        super().__init__(int(code))
