"""One step, done in a process and under a user of its own (`service.steps` is that process).

PINs travel on its pipe, never in arguments or variables. This end loads none of the libraries that the step needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from service.errors import StepFailed
from service.isolation import Account, start
from service.log_files import last_words
from service.settings import Settings

_SECONDS = 180.0
Answer = dict[str, Any]


def call(settings: Settings, account: Account, step: str, *, groups: Sequence[int] = (), **request: Any) -> Answer:
    """Run one step as `account` and return what it answers. Raises StepFailed with the step's own last words."""
    with begun(settings, account, step, groups=groups, **request) as finish:
        return finish()


@contextmanager
def begun(
    settings: Settings, account: Account, step: str, *, groups: Sequence[int] = (), **request: Any
) -> Iterator[Callable[[], Answer]]:
    """Start a step and yield what waits for its answer; a step still running when the block ends is ended."""
    argv = [sys.executable, "-P", "-m", "service.steps"]
    environ = settings.environ(worker=step)
    child = start(argv, account, environ=environ, groups=groups, stdin=subprocess.PIPE, output=subprocess.PIPE)
    assert child.stdin is not None
    with child:
        try:
            with suppress(BrokenPipeError):  # it died: its last words say why
                child.stdin.write(json.dumps(request | {"step": step}).encode())  # fits into the pipe: nobody waits
                child.stdin.close()
            child.stdin = None
            yield lambda: _answer(child, step)
        finally:
            child.kill()


def _answer(child: subprocess.Popen[bytes], step: str) -> Answer:
    try:
        said, _ = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise StepFailed(f"{step} did not end within {_SECONDS:.0f} s") from None
    if child.returncode != 0:
        last = last_words(said)
        reason = last.get("event") or f"ended with {child.returncode}"
        raise StepFailed(
            str(reason) if last.get("event") else f"{step} {reason}", fix=last.get("fix"), cause=last.get("code", "step_failed")
        )
    answer: Answer = json.loads(said.splitlines()[-1])
    return answer
