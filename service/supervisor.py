"""Keeps programs running: starts them in stages, waits until each serves, starts a dead one again, stops all in order.

It knows nothing of what the programs do (`service/programs.py` does). One thread, no shell; every child dies with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.errors import ProcessFailed, ServiceError
from service.isolation import Account, start
from service.log_files import last_words, roll, tail

READY_SECONDS = 60.0
BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Waits before each new try; a program that dies once more than this without a steady run in between has failed."""
STEADY_SECONDS = 20.0
NEVER_AGAIN = frozenset(
    {
        *("pin_rejected", "pin_throttled", "pkcs11_module_refused", "audit_diverged"),
        *("audit_signing_failed", "hsm_promise_broken", "master_missing", "settings_refused"),
        *("secret_refused", "half_made", "edge_self_test_failed", "database_unsuitable"),
    }
)
"""Codes of last words after which another try could only do harm: a PIN is tried once a start."""
LARGEST_LOG = 16 * 2**20
"""Bytes at which a log is emptied into `NAME.log.1`, also while its program runs."""
LEAVING_SECONDS = 90.0
"""How long a replaced program may finish what it has."""
_SELDOM_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STOP = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def _nothing() -> None:
    """No preparation is needed."""


@dataclass(frozen=True)
class Program:
    """One process to keep running. `ready` says whether it serves now and must answer within two seconds."""

    name: str
    argv: Sequence[str | Path]
    account: Account
    environ: Mapping[str, str]
    ready: Callable[[], bool]
    groups: Sequence[int] = ()
    pass_fds: Sequence[int] = ()
    before: Callable[[], None] = _nothing
    death_signal: int = signal.SIGKILL
    stop_signals: Sequence[tuple[int, float]] = ((signal.SIGTERM, 2.5),)
    """Signals to stop it with, and how long each is given; SIGKILL follows. One that is not vital has the first alone."""
    replaceable: bool = False
    """Whether it may ask for a successor, on a pipe that `GLOTTIS_SUPERVISOR_FD` names (`service/vault/leaving.py`)."""
    vital: bool = True
    """Whether everything ends when this program will not stay up; else it is tried again for ever, ever more rarely."""


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0
    tries: int = 0
    next_start: float = 0.0
    ready: bool = False
    log_start: int = field(default=0, repr=False)
    rolled: bool = False
    words: int | None = None
    heir: _Child | None = None


class Supervisor:
    """Runs stages of programs. Use it in the main thread, inside `signals_held`; `say` gets one line an event."""

    def __init__(self, log_dir: Path, say: Callable[[str], None]) -> None:
        self._log_dir = log_dir
        self._say = say
        self._stages: list[list[_Child]] = []
        self._leaving: list[tuple[subprocess.Popen[bytes], float]] = []

    def start(self, programs: Sequence[Program]) -> None:
        """Start one more stage and return when every program in it serves. Raises ProcessFailed; Stopped when asked to stop."""
        stage = self.begin(programs)
        deadline = time.monotonic() + READY_SECONDS
        while True:
            self._tend()
            waiting = [child.program.name for child in stage if not self._serves(child)]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{', '.join(waiting)} did not become ready within {READY_SECONDS:.0f} s")
            _pause(_POLL_SECONDS)

    def begin(self, programs: Sequence[Program]) -> list[_Child]:
        """Start one more stage without waiting for it."""
        stage = [_Child(program) for program in programs]
        self._stages.append(stage)
        self._tend()
        return stage

    def tend(self) -> None:
        """Look after what is running for a moment, while the caller waits for something else. Raises as `start` does."""
        self._tend()
        _pause(_POLL_SECONDS)

    def watch(self) -> None:
        """Keep everything running until a signal asks to stop. Raises ProcessFailed when a program will not stay up."""
        with contextlib.suppress(Stopped):
            while True:
                _pause(0.5)
                self._tend()

    def stop(self) -> None:
        """Stop every program, last stage first. No process is left when it returns.

        What is not vital is asked first, and stops beside the others. All is over after the stages' times together, or its time.
        """
        beside = [child for stage in self._stages for child in stage if not child.program.vital and child.process is not None]
        deadline = time.monotonic() + _asked(beside, 0)
        for stage in reversed(self._stages):
            both = [*stage, *(child.heir for child in stage if child.heir is not None)]
            _stop_together([child for child in both if child.process is not None and child.program.vital])
            for child in both:
                _close_words(child)
        _wait([child.process for child in beside if child.process is not None], deadline)
        _end(beside)
        for process, _ in self._leaving:
            process.kill()
            process.wait()
            _kill_group(process.pid)
        self._stages.clear()
        self._leaving.clear()

    def pids(self) -> dict[str, int]:
        """Running programs and their process numbers."""
        children = [child for stage in self._stages for child in stage]
        return {child.program.name: child.process.pid for child in children if child.process is not None}

    def _serves(self, child: _Child) -> bool:
        if child.process is not None and not child.ready:
            child.ready = child.program.ready()
        return child.process is not None and child.ready

    def _tend(self) -> None:
        """Notice the dead, and start whatever is due."""
        self._leaving = [(process, deadline) for process, deadline in self._leaving if not _left(process, deadline)]
        for child in [child for stage in self._stages for child in stage]:
            self._hear(child)
            if child.process is not None and child.process.poll() is not None:
                self._bury(child, child.process)
            if child.process is None and time.monotonic() >= child.next_start:
                self._begin(child)
            if child.process is not None and roll(self._log(child), LARGEST_LOG):
                child.log_start, child.rolled = 0, True

    def _hear(self, child: _Child) -> None:
        """A child asks for its successor; a successor that serves takes its place, and the child leaves in peace."""
        if b"replace" in _said(child) and child.heir is None:
            self._say(f"{child.program.name} has done its share; its successor starts")
            child.heir = _Child(child.program)
            self._begin(child.heir)
        heir = child.heir
        if heir is None:
            return
        if heir.process is None or heir.process.poll() is not None:
            _close_words(heir)
            child.heir = None  # it did not come up; the child goes on, and asks again
            self._say(f"the successor of {child.program.name} ended; {child.program.name} goes on")
        elif b"serving" in _said(heir) and child.process is not None:
            child.process.send_signal(signal.SIGUSR1)
            self._leaving.append((child.process, time.monotonic() + LEAVING_SECONDS))
            self._succeed(child, heir)
            child.ready = True

    def _succeed(self, child: _Child, heir: _Child) -> None:
        _close_words(child)
        child.process, child.since, child.words = heir.process, heir.since, heir.words
        child.log_start, child.rolled, child.ready, child.heir = heir.log_start, heir.rolled, False, None

    def _log(self, child: _Child) -> Path:
        return self._log_dir / f"{child.program.name}.log"

    def _begin(self, child: _Child) -> None:
        program = child.program
        path = self._log(child)
        try:
            program.before()
        except ServiceError as error:
            self._retry(child, str(error), {"fix": error.mend, "code": error.code})
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        environ, pass_fds = dict(program.environ), list(program.pass_fds)
        if program.replaceable:
            child.words, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            environ["GLOTTIS_SUPERVISOR_FD"] = str(telling)
            pass_fds.append(telling)
        with os.fdopen(os.open(path, flags, 0o600), "ab") as log:
            roll(path, LARGEST_LOG)
            child.log_start, child.rolled = log.seek(0, os.SEEK_END), False
            child.process = start(
                program.argv,
                program.account,
                environ=environ,
                groups=program.groups,
                pass_fds=pass_fds,
                output=log,
                death_signal=program.death_signal,
            )
        if program.replaceable:
            os.close(telling)
        child.since, child.ready = time.monotonic(), False

    def _bury(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        _kill_group(process.pid)
        child.process = None
        _close_words(child)
        if child.heir is not None and child.heir.process is not None:  # it was to be replaced anyway
            self._succeed(child, child.heir)
            return
        if time.monotonic() - child.since > STEADY_SECONDS:
            child.tries = 0
        last = self._last_words(child)
        reason = last.get("event") or _ending(process.returncode)
        if last.get("code") in NEVER_AGAIN and child.program.vital:
            raise ProcessFailed(f"{child.program.name}: {reason}", fix=last.get("fix"), cause=last["code"])
        self._retry(child, reason, last)

    def _retry(self, child: _Child, reason: str, last: Mapping[str, str]) -> None:
        if child.tries >= len(BACKOFF_SECONDS) and not child.program.vital:
            if child.tries == len(BACKOFF_SECONDS):
                self._say(f"{child.program.name} will not stay up ({reason}); trying it again now and then")
            child.next_start = time.monotonic() + _SELDOM_SECONDS
            child.tries += 1
            return
        if child.tries >= len(BACKOFF_SECONDS):
            said = f"{child.program.name} ended {child.tries + 1} times: {reason}"
            raise ProcessFailed(said, fix=last.get("fix"), cause=last.get("code", "process_failed"))
        child.next_start = time.monotonic() + BACKOFF_SECONDS[child.tries]
        child.tries += 1
        self._say(f"{child.program.name} ended ({reason}); starting it again")

    def _last_words(self, child: _Child) -> dict[str, str]:
        """What this run of the program said last, if that was said as an ending."""
        path = self._log(child)
        said = tail(path, child.log_start)
        if child.rolled:  # its last line may have been said just before
            said = tail(path.with_suffix(".log.1"), 0) + said
        last = last_words(said)
        return last if "code" in last else {}


def _said(child: _Child) -> bytes:
    """What a child has said on its pipe since one looked last."""
    with contextlib.suppress(BlockingIOError):
        return os.read(child.words, 4096) if child.words is not None else b""
    return b""


def _close_words(child: _Child) -> None:
    if child.words is not None:
        os.close(child.words)
        child.words = None


def _left(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether a replaced process is gone; after its time it is ended."""
    if process.poll() is None and time.monotonic() < deadline:
        return False
    process.kill()
    process.wait()
    _kill_group(process.pid)
    return True


class Stopped(Exception):
    """A signal asked to stop."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keep SIGINT, SIGTERM, SIGHUP and SIGCHLD from interrupting: they are taken where the supervisor waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP | {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.sigtimedwait(_STOP, 0)  # a second Ctrl-C during the stop is answered by the stop itself
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pause(seconds: float) -> None:
    """Wait, at most until a child ends. Raises Stopped on a signal that asks for it."""
    taken = signal.sigtimedwait(_STOP | {signal.SIGCHLD}, seconds)
    if taken is not None and taken.si_signo in _STOP:
        raise Stopped


def _stop_together(children: Sequence[_Child]) -> None:
    for step in range(max((len(child.program.stop_signals) for child in children), default=0)):
        running = [child for child in children if child.process is not None and child.process.poll() is None]
        deadline = time.monotonic() + _asked(running, step)
        _wait([child.process for child in running if child.process is not None], deadline)
    _end(children)


def _asked(children: Sequence[_Child], step: int) -> float:
    """Ask each to stop by its signal of this step; how many seconds they are given for it."""
    longest = 0.0
    for child in children:
        if child.process is not None and step < len(child.program.stop_signals):
            how, seconds = child.program.stop_signals[step]
            child.process.send_signal(how)
            longest = max(longest, seconds)
    return longest


def _end(children: Sequence[_Child]) -> None:
    for child in children:
        if child.process is not None:
            child.process.kill()
            child.process.wait()
            _kill_group(child.process.pid)
            child.process = None


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _kill_group(leader: int) -> None:
    """End what a dead leader left behind: each program has a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
