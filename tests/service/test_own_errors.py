"""An error counts as ours only where a package of ours declares its code: others' words may hold statements and values."""

from __future__ import annotations

import json

import pytest
import structlog
from sqlalchemy.exc import InternalError, OperationalError

from keyvault.errors import HsmBusy
from service import logs
from service.checks import _try
from service.cli.main import _report
from service.errors import StepFailed, own_code, words
from service.exits import Exit
from service.sync.admin import SiteRefused
from service.sync.operator import _failed
from service.sync.work import LONGEST_S, SHORTEST_S, _pause_after

SECRET = "v9-hush-hush"


def raised(kind: type[Exception]) -> Exception:
    return kind(f"INSERT {SECRET}", {"pin": SECRET}, RuntimeError(SECRET), code="e3q8")  # type: ignore[call-arg]


def test_only_declared_codes_are_codes():
    assert own_code(HsmBusy()) == "hsm_busy"
    assert own_code(SiteRefused("denied", "no", "")) == "denied"
    assert own_code(StepFailed("x", cause="pin_rejected")) == "step_failed"
    assert [own_code(error) for error in (raised(OperationalError), raised(InternalError), ValueError("x"))] == [None] * 3
    assert words(raised(InternalError)) == "InternalError"
    assert words(ValueError("x")) == "ValueError: x"


@pytest.mark.parametrize(("kind", "code"), [(OperationalError, "database_unavailable"), (InternalError, "internal_error")])
def test_the_operator_is_told_the_kind_of_a_database_error_and_no_value(kind, code):
    answer = bytes(_failed(raised(kind)).body).decode()
    assert json.loads(answer)["error"]["code"] == code
    assert SECRET not in answer


def test_terminal_doctor_and_last_line_show_no_value(capsys):
    assert _report(raised(InternalError)) is Exit.LOCAL
    finding = _try("database", lambda: (_ for _ in ()).throw(raised(InternalError)))
    with structlog.testing.capture_logs() as lines:
        logs.log_uncaught(InternalError, raised(InternalError), None)
    said = capsys.readouterr()
    assert lines[0]["event"] == "InternalError"
    everything = f"{said.err}{said.out}{finding.said}{lines}"
    assert SECRET not in everything
    assert "e3q8" not in everything


def test_engines_hide_parameters(postgres):
    from service import masters
    from service.log import process
    from service.schema import opened

    url = postgres.url()
    with opened(url) as administration:
        engines = [masters.connect(url), process.engine(url), administration]
        for engine in engines:
            assert engine.hide_parameters
            engine.dispose()


def test_a_task_that_failed_for_hours_still_waits_and_goes_on():
    pauses = [_pause_after(failures) for failures in (0, 1, 4, 1024, 2000)]
    assert pauses == [SHORTEST_S, 2 * SHORTEST_S, LONGEST_S, LONGEST_S, LONGEST_S]
