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


_HSM = "hsm_unavailable hsm_timeout hsm_busy pkcs11_module_refused pin_rejected pin_throttled audit_signing_failed"
_INTEGRITY = (
    "hsm_promise_broken record_tampered signing_key_tampered authority_row_tampered seal_broken unwrap_rejected model_refused"
    " erasure_certificate_invalid"
    " audit_error audit_tampered audit_diverged audit_record_invalid audit_completion_refused"
    " onnxruntime_conflict policy_set_invalid policy_set_tampered"
    " certificate_invalid sync_signature_invalid statement_malformed same_key_unproved sites_diverged site_frozen"
    " checkpoint_refused log_forked log_shortened"
    " store_rolled_back token_rolled_back token_not_in_roster master_missing ceremony_message_invalid"
)
_REFUSED = (
    "denied client_inactive client_unknown certificate_required grant_mismatch binding_mismatch scheme_invalid"
    " token_expired token_invalid token_malformed token_replayed proof_invalid proof_replayed proof_required use_dpop_nonce"
    " purpose_mismatch text_mismatch voice_mismatch voice_key_changed voice_suspended voice_erased voice_not_erased outside_hours"
    " consent_expired consent_purpose consent_territory consent_withdrawn"
    " liveness_required liveness_invalid liveness_expired liveness_used"
    " dual_control_required dual_control_invalid dual_control_expired dual_control_used dual_control_own approver_refused"
    " ticket_unknown ticket_expired ticket_used invitation_unknown invitation_expired invitation_used"
    " browser_roles_refused browser_has_no_certificate key_used_otherwise certificate_request_refused"
    " ceremony_refused introduction_refused adoption_incomplete sync_refused peer_refused"
    " key_quarantined key_still_referenced key_state_forbids key_compromised key_destroyed key_use_refused"
    " reason_missing delay_too_short nothing_pending approval_invalid approval_expired requester_approved"
    " signer_in_use overlap_too_short rotation_pin_needed rotation_token_holds no_rotation_token"
)
_CONFLICT = "already_running port_taken row_changed client_exists audit_log_occupied sync_conflict site_behind signer_rotating"
_TEMPORARY = (
    "database_unavailable audit_unavailable voiceprints_unavailable busy site_busy rate_limited quota_exhausted"
    " peer_unheard peer_unavailable awaiting_sync stale_epoch sync_store_unavailable approvals_missing client_awaits_officers"
)
_LOCAL = (
    "key_vault_error service_error settings_refused secret_refused state_folder_refused half_made part_missing"
    " process_failed step_failed"
    " not_running nobody_answers demo_failed edge_self_test_failed database_unsuitable site_unfounded site_not_admitted"
    " argument_refused command_malformed invalid_authorization_details unsupported_grant_type hours_invalid consent_invalid"
    " voice_unknown consent_unknown key_version_not_found schedule_unknown schedule_invalid"
    " client_missing client_name_refused tenant_refused authority_missing authority_refused officer_key_refused"
    " approval_request_unknown approval_request_unreadable roster_unreadable sealed_bundle_refused ceremony_awaited"
    " backup_failed backup_refused nothing_to_adopt nothing_to_install audit_log_empty audit_range_refused"
)
"""What was named wrongly, is not there, or does not run on this machine. An unknown code counts so too."""

BY_CODE: dict[str, Exit] = {
    code: exit_
    for exit_, codes in (
        (Exit.HSM, _HSM),
        (Exit.INTEGRITY, _INTEGRITY),
        (Exit.REFUSED, _REFUSED),
        (Exit.CONFLICT, _CONFLICT),
        (Exit.TEMPORARY, _TEMPORARY),
        (Exit.LOCAL, _LOCAL),
    )
    for code in codes.split()
}
"""Every code that the vault, the policies and the service declare; what speech and voices alone refuse is LOCAL."""


def exit_for(error: BaseException) -> Exit:
    """The exit code of an error that ended a command; a step or process that failed counts as what ended it."""
    return BY_CODE.get(str(getattr(error, "cause", getattr(error, "code", ""))), Exit.LOCAL)


class Ended(click.exceptions.Exit):
    """End the command with a code after it has said everything itself."""

    def __init__(self, code: Exit) -> None:
        super().__init__(int(code))
