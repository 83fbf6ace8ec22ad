"""A worker of a re-wrap that dies, at whatever moment, ends the command with the reason, and never leaves it waiting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from service import ceremony_steps, rewrapping
from service.errors import StepFailed
from service.isolation import Account
from service.settings import Settings

PAGE = '{"rewrap": {"moved": 2, "left": 0, "bad": {}}}\\n'
KILLED_WITHIN_A_LINE = f"import os, sys; sys.stdout.write('{PAGE}' + '{PAGE}'[:20]); sys.stdout.flush(); os.kill(os.getpid(), 9)"
WHOLE = f"import sys; sys.stdin.read(); sys.stdout.write('{PAGE}' + '{{\"rewrap\": {{\"done\": true}}}}\\n')"
DEAD_AT_ONCE = """import sys; print('{"event": "The token refused the PIN.", "code": "pin_rejected"}')"""


def started(code: str, monkeypatch: pytest.MonkeyPatch, *, first_ended: bool = False) -> list[rewrapping.Total]:
    """Run a re-wrap whose one worker is this program."""
    told: list[rewrapping.Total] = []

    def start(*_: object, stdin: int, output: int, **__: object) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=stdin, stdout=output)
        if first_ended:
            child.wait(20)
        return child

    @contextmanager
    def no_mover(*_: object) -> Iterator[None]:
        yield None

    isolation: Any = SimpleNamespace(vault=None, database_groups=lambda **_: ())
    monkeypatch.setattr(rewrapping, "start", start)
    monkeypatch.setattr(rewrapping, "_mover", no_mover)
    monkeypatch.setattr(rewrapping, "establish", lambda *_: isolation)
    settings = Settings.load({"GLOTTIS_STATE_DIR": "/nonexistent"})
    rewrapping.rewrap(settings, rewrapping.Job("main", 2, workers=1), told.append, rotation_pin=str)
    return told


@pytest.mark.timeout(30)
def test_a_worker_killed_within_a_line_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepFailed, match="worker 0 ended with -9"):
        started(KILLED_WITHIN_A_LINE, monkeypatch)


@pytest.mark.timeout(30)
def test_a_worker_that_died_before_it_was_asked_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepFailed, match="The token refused the PIN") as refused:
        started(DEAD_AT_ONCE, monkeypatch, first_ended=True)
    assert refused.value.cause == "pin_rejected"


@pytest.mark.timeout(30)
def test_a_worker_that_comes_to_its_end_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [total.moved for total in started(WHOLE, monkeypatch)] == [2]


def test_a_token_s_process_that_died_before_it_was_asked_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, stdin: int, output: int, **__: object) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-S", "-c", DEAD_AT_ONCE], stdin=stdin, stdout=output)
        child.wait(20)
        return child

    monkeypatch.setattr(ceremony_steps, "start", start)
    settings = Settings.load({"GLOTTIS_STATE_DIR": "/nonexistent"})
    with (
        pytest.raises(StepFailed, match="The token refused the PIN"),
        ceremony_steps.token_process(settings, Account.current(), "remove") as token,
    ):
        token.ask(user_pin="0000")
