"""`python -m service.rewrapping`: one worker of a re-wrap, under the vault's user; and `rewrap`, which runs several of them.

A worker reads one JSON request on standard input (ring, target version, its part of how many, rows a second) and writes one
JSON line a page on standard output, then `{"done": true}`. Where it fails, its last line says why, as every process of
Glottis does. Workers are processes and not threads because SoftHSM's own locks let two threads do no more than one; each has
a login of its own.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from keyvault.database import SITE_WIDE, Database
from keyvault.hsm import SiteHsm
from keyvault.key_uses import Place
from keyvault.records import RecordMac
from keyvault.rotation import Mover, Outcome, Part, Plan, Rewrapping
from keyvault.store import KeyStore
from policies.audit.store import AuditStore
from service.ceremony_steps import token_process
from service.errors import DatabaseUnavailable, StepFailed
from service.isolation import Isolation, establish, harden_process, start
from service.key_events import KeyEventRecorder
from service.log_files import last_words
from service.logs import configure_logging
from service.masters import serving_token
from service.rotation_link import mover_at
from service.secrets import Secret
from service.settings import Settings
from service.site import ROTATION, Site

MOST_WORKERS = 32
_REPORT = b'{"rewrap": '


@dataclass
class Total:
    """What all workers did together, so far. `bad` names each row that was passed over, with the code of the reason."""

    moved: int = 0
    left: int = 0
    bad: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What the workers of one re-wrap are given; `rate` is for all of them together."""

    ring: str
    target: int
    workers: int = 2
    rate: float | None = None

    def request(self, index: int, link: int | None) -> bytes:
        """One worker's share, and the descriptor at which it has keys moved, where its own token cannot."""
        rate = None if self.rate is None else self.rate / self.workers
        share = {"ring": self.ring, "target": self.target, "part": index, "parts": self.workers, "rate": rate, "link": link}
        return json.dumps(share).encode()


def rewrap(settings: Settings, job: Job, tell: Callable[[Total], None], rotation_pin: Callable[[], str] | None = None) -> Total:
    """Run the job to its end; `tell` hears of every page. Call it in the main thread.

    `rotation_pin` is asked for where masters are not TRUSTED; None reads it where the development installation keeps it.
    Raises StepFailed with the code of what stopped a worker (the others are then stopped too): what was told stands, and the
    next run goes on from there.
    """
    total, said = Total(), queue.SimpleQueue[tuple[int, Mapping[str, Any]]]()
    with ExitStack() as stack:
        pin = rotation_pin or Secret(settings.pin_file(ROTATION)).read
        children = [stack.enter_context(_worker(settings, job, index, pin)) for index in range(job.workers)]
        for index, child in enumerate(children):
            threading.Thread(target=_listen, args=(child, index, said), daemon=True).start()
        moved, left, working = [0] * job.workers, [0] * job.workers, job.workers
        while working:
            index, line = said.get()
            if "failed" in line:
                last = line["failed"]
                raise StepFailed(last["event"], fix=last.get("fix"), cause=last.get("code", "step_failed"))
            if "done" in line:
                working -= 1
                continue
            moved[index], left[index] = line["moved"], line["left"]
            total.moved, total.left = sum(moved), sum(left)
            total.bad |= line["bad"]
            tell(total)
    return total


@contextmanager
def _worker(settings: Settings, job: Job, index: int, pin: Callable[[], str]) -> Iterator[subprocess.Popen[bytes]]:
    """A started worker; it is ended with the block."""
    isolation = establish(settings.state_dir, settings.site)
    argv = [sys.executable, "-P", "-m", "service.rewrapping"]
    groups = isolation.database_groups(embedded=settings.embedded)
    environ = settings.environ(worker=f"rewrap-{index}")
    with _mover(settings, isolation, pin) as link:
        fds = () if link is None else (link,)
        child = start(
            argv, isolation.vault, environ=environ, groups=groups, stdin=subprocess.PIPE, output=subprocess.PIPE, pass_fds=fds
        )
        assert child.stdin is not None
        with child:
            try:
                with suppress(BrokenPipeError):  # it died: its last words say why
                    child.stdin.write(job.request(index, link))
                    child.stdin.close()
                child.stdin = None
                yield child
            finally:
                child.kill()


@contextmanager
def _mover(settings: Settings, isolation: Isolation, pin: Callable[[], str]) -> Iterator[int | None]:
    """Where masters are not TRUSTED: a process with the rotation token, and a worker's end of the way to it."""
    if not Site.load(settings.site_file).split:
        yield None
        return
    here, there = socket.socketpair()
    with here, there, token_process(settings, isolation.owner(ROTATION), "move", pass_fds=(here.fileno(),)) as token:
        token.ask(user_pin=pin(), link=here.fileno())
        here.close()  # or neither of the two would see the other end
        yield there.fileno()


def _listen(child: subprocess.Popen[bytes], index: int, said: queue.SimpleQueue[tuple[int, Mapping[str, Any]]]) -> None:
    """Pass a worker's lines on; at its end, whether it was one. A line that a killed worker left half is passed over."""
    assert child.stdout is not None
    last, done = b"", False
    for line in child.stdout:
        if line.startswith(_REPORT):
            with suppress(ValueError):
                report = json.loads(line)["rewrap"]
                done = "done" in report
                said.put((index, report))
        elif line.strip():
            last = line
    if not done:
        words = last_words(last)
        said.put((index, {"failed": {"event": f"worker {index} ended with {child.wait()}", **words}}))


@contextmanager
def serving(settings: Settings) -> Iterator[tuple[Database, SiteHsm]]:
    """The vault's database role, a connection a thread, and the serving token. Raises what `serving_token` raises, and
    DatabaseUnavailable."""
    database = create_engine(
        settings.role_url("vault"), pool_size=2, hide_parameters=True, connect_args={"connect_timeout": 5, "options": SITE_WIDE}
    )
    try:
        with serving_token(settings, database, Place.REWRAP) as hsm:
            yield database, hsm
    except OperationalError as error:
        raise DatabaseUnavailable(type(error.orig).__name__) from None
    finally:
        database.dispose()


def rewrapping(database: Database, hsm: SiteHsm, mover: Mover | None = None) -> Rewrapping:
    """The re-wrap of this site, with its events in the audit log."""
    return Rewrapping(database, hsm, KeyStore(), KeyEventRecorder(AuditStore(database, hsm)), RecordMac(hsm), mover=mover)


def plan_facts(found: Plan) -> dict[str, Any]:
    """A plan as JSON: counts by version, no row."""
    sources = [
        {
            "version": source.version,
            "state": None if source.state is None else source.state.value,
            "keys": source.keys,
            "refused": None if source.refusal is None else {"code": source.refusal.code, "said": str(source.refusal)},
        }
        for source in found.sources
    ]
    return {"ring": found.target.ring, "target": found.target.version, "keys": found.keys, "sources": sources}


def _run(settings: Settings, request: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
    told: set[UUID] = set()

    def tell(outcome: Outcome) -> None:
        new = {str(dek_id): code for dek_id, code in outcome.bad.items() if dek_id not in told}
        told.update(outcome.bad)
        say({"moved": outcome.moved, "left": outcome.left, "bad": new})

    with mover_at(request["link"]) as mover, serving(settings) as (database, hsm):
        work = rewrapping(database, hsm, mover)
        wanted = work.plan(str(request["ring"]), target=int(request["target"]))
        part = Part(int(request["part"]), int(request["parts"]))
        tell(work.run(wanted, part, rate=request["rate"], tell=tell))
    say({"done": True})


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging(settings.worker, settings.log_level)
    harden_process()

    def say(report: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps({"rewrap": report}) + "\n")
        sys.stdout.flush()

    _run(settings, json.load(sys.stdin), say)


if __name__ == "__main__":
    main()
