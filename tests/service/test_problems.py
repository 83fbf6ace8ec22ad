"""Every code has one status, every error one code that the table knows, and nothing that was sent comes back."""

from __future__ import annotations

import importlib
import inspect

import pytest

from service.problems import STATUS, certificate_required, problem
from service.refusals import refusal_of

ONLY_AT_START = {
    *("audit_log_empty", "audit_range_refused", "ceremony_message_invalid"),
    *("statement_malformed", "sync_signature_invalid", "certificate_invalid", "same_key_unproved", "sync_refused", "sync_conflict"),
    *("peer_unheard", "peer_unavailable", "peer_refused", "site_behind", "sites_diverged", "token_not_in_roster"),
    *("schedule_unknown", "schedule_invalid", "reason_missing", "delay_too_short", "nothing_pending", "approval_request_unknown"),
    *("erasure_certificate_invalid", "voice_not_erased", "signer_rotating", "signer_in_use", "overlap_too_short"),
    *("rotation_pin_needed", "rotation_token_holds"),
    *("checkpoint_refused", "log_forked", "log_shortened"),
    *("browser_roles_refused", "browser_has_no_certificate"),
    *("key_still_referenced", "approval_invalid", "approval_expired", "approvals_missing", "requester_approved"),
}
"""Codes of commands, which no request can end in."""


@pytest.mark.parametrize(
    "name",
    [
        *("keyvault.errors", "keyvault.sync.errors", "policies.errors", "policies.caller_errors", "policies.audit.errors"),
        "policies.approval_errors",
        *("voiceprints.errors", "synth.errors"),
    ],
)
def test_every_error_that_a_request_can_end_in_has_a_status(name: str) -> None:
    module = importlib.import_module(name)
    errors = [found for _, found in inspect.getmembers(module, inspect.isclass) if issubclass(found, Exception)]
    codes = {error.code for error in errors if error.__module__ == module.__name__}
    assert codes
    assert codes - ONLY_AT_START <= STATUS.keys()


def test_an_unknown_code_is_our_own_fault() -> None:
    assert problem("never_heard_of", "m", "f").status_code == 500


def test_details_of_keys_and_rows_stay_inside() -> None:
    from keyvault.errors import KeyNotFound

    refusal = refusal_of(KeyNotFound("no key for voice 123e4567"))
    assert refusal is not None
    assert str(refusal) == "No such key version."
    assert refusal_of(ValueError("anything else")) is None


def test_a_page_without_a_certificate_reads_which_setting_lets_it_call() -> None:
    assert b"GLOTTIS_BROWSER_ORIGINS" in bytes(certificate_required().body)


def test_no_refusal_invites_a_retry_with_a_spent_token() -> None:
    for code in ("token_replayed", "token_expired", "denied"):
        answer = problem(code, "m", "f")
        assert answer.status_code in (401, 403)
        assert answer.headers["x-should-retry"] == "false"
    assert problem("busy", "m", "f").headers["retry-after"] == "1"
