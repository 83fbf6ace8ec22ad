"""Every code has one status, every error one code that the table knows, and nothing that was sent comes back."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import Response

from service.edge import uploads
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


def test_what_is_our_own_fault_says_its_fixed_message_alone() -> None:
    from synth.errors import Busy, ModelRefused, TextTooLong
    from voiceprints.errors import AudioTooLong, DecoderUnavailable

    for error in (DecoderUnavailable("could not be started: [Errno 13] /opt/secret"), ModelRefused("sha256 secret")):
        refusal = refusal_of(error)
        assert refusal is not None
        assert (str(refusal), refusal.code) == (str(type(error)()), error.code)
    for limit in (TextTooLong("one request may hold 4000"), AudioTooLong("longer than 60 seconds")):
        assert str(refusal_of(limit)) == str(limit)
    busy = refusal_of(Busy(20.4))
    assert busy is not None
    answer = problem(busy.code, str(busy), busy.fix, retry_after_s=busy.retry_after_s)
    assert answer.headers["retry-after"] == "21"
    assert "Retry-After" in busy.fix


def test_an_upload_without_room_is_answered_busy_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "WAIT_SECONDS", 0.01)
    carried: list[int] = []

    async def scene() -> tuple[int, int, int]:
        app = SimpleNamespace(state=SimpleNamespace(uploads=asyncio.Semaphore(1)))
        request = Request({"type": "http", "app": app, "headers": []})
        leave = asyncio.Event()

        async def carry(body: AsyncIterator[bytes]) -> Response:
            chunks = [len(chunk) async for chunk in body]
            carried.append(len(chunks))
            assert not app.state.uploads.locked()  # while the vault works, the next upload may come
            return Response()

        async def slow(_: AsyncIterator[bytes]) -> Response:
            await leave.wait()
            return Response(status_code=204)

        first = asyncio.create_task(uploads.in_turn(request, slow))
        await asyncio.sleep(0)
        refused = await uploads.in_turn(request, carry)
        assert carried == []
        leave.set()
        done = await first
        return refused.status_code, done.status_code, (await uploads.in_turn(request, carry)).status_code

    assert asyncio.run(scene()) == (503, 204, 200)
    assert carried == [1]


def test_a_page_without_a_certificate_reads_which_setting_lets_it_call() -> None:
    assert b"GLOTTIS_BROWSER_ORIGINS" in bytes(certificate_required().body)


def test_no_refusal_invites_a_retry_with_a_spent_token() -> None:
    for code in ("token_replayed", "token_expired", "denied"):
        answer = problem(code, "m", "f")
        assert answer.status_code in (401, 403)
        assert answer.headers["x-should-retry"] == "false"
    assert problem("busy", "m", "f").headers["retry-after"] == "1"
