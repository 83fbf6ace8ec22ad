"""What the vault does while its HSM hangs or fails: requests are answered in time, and the audit log hears of it later."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest

from keyvault.errors import HsmTimeout, HsmUnavailable
from keyvault.events import KeyEvent
from policies.errors import AuditUnavailable
from service.vault import hsm_events
from service.vault.hsm_events import HsmEvents
from service.vault.leaving import REPLACE, Leaving
from service.vault.readiness import Readiness
from service.vault.threads import Threads


def test_a_request_whose_thread_hangs_is_answered_and_the_loop_goes_on():
    """A6: the event loop is never blocked; the caller hears HsmTimeout; the thread is left to itself."""
    leave, known = threading.Event(), []

    def hangs() -> None:
        known.append(threading.get_ident())
        leave.wait(10)

    async def scene() -> tuple[float, int, list[int]]:
        threads, ticks = Threads(4), 0
        waiting = asyncio.create_task(threads.run(hangs))
        while not known:
            ticks += 1
            await asyncio.sleep(0.001)
        began = time.monotonic()
        threading.Thread(target=threads.abandon, args=(known[0],)).start()
        with pytest.raises(HsmTimeout):
            await waiting
        answered = time.monotonic() - began
        others = await asyncio.gather(*(threads.run(abs, -number) for number in range(20)))
        leave.set()
        await asyncio.sleep(0.05)
        threads.abandon(known[0])  # it came back: nobody awaits it, and that is no error
        return answered, ticks, list(others)

    answered, ticks, others = asyncio.run(scene())
    assert answered < 1
    assert ticks >= 1
    assert others == list(range(20))


def test_what_work_raises_reaches_who_awaits_it():
    async def scene() -> None:
        await Threads(1).run(int, "no number")

    with pytest.raises(ValueError, match="no number"):
        asyncio.run(scene())


def test_a_probe_that_hangs_makes_unready_for_everybody_else(monkeypatch):
    monkeypatch.setattr("service.vault.readiness.PROBE_S", 0.1)
    leave = threading.Event()
    ready = Readiness({"database": lambda: None, "hsm": lambda: leave.wait(10) and None})
    first = threading.Thread(target=ready.broken)
    first.start()
    time.sleep(0.1)
    assert ready.broken() == ["hsm"]
    leave.set()
    first.join()
    assert ready.broken() == []


class Recorder:
    """Refuses as long as it is told to, as an HSM without answers and a database that is away do."""

    def __init__(self, refusals: list[Exception]) -> None:
        self.refusals, self.written = refusals, []

    def record(self, transaction, event: KeyEvent) -> None:
        if self.refusals:
            raise self.refusals.pop()
        self.written.append((event.action, event.facts["happened_at"]))


def test_events_wait_for_hsm_and_database_and_keep_order_and_time(monkeypatch):
    @contextmanager
    def transaction(_):
        yield None

    monkeypatch.setattr(hsm_events, "durable", transaction)
    times = iter((100.0, 160.0))
    recorder = Recorder([AuditUnavailable(), HsmUnavailable(), HsmUnavailable()])
    events = HsmEvents(lambda: next(times))
    events.hear(KeyEvent("hsm.breaker_opened", {"failures": 5}))
    with events.writing(None, recorder, again_s=0.01):
        events.hear(KeyEvent("hsm.breaker_closed", {"failures": 5}))
        deadline = time.monotonic() + 5
        while len(recorder.written) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert recorder.written == [("hsm.breaker_opened", 100), ("hsm.breaker_closed", 160)]


def test_a_process_ends_though_its_events_cannot_be_written(monkeypatch):
    @contextmanager
    def away(_):
        raise AuditUnavailable
        yield

    monkeypatch.setattr(hsm_events, "durable", away)
    events = HsmEvents()
    began = time.monotonic()
    with events.writing(None, Recorder([]), again_s=30):
        events.hear(KeyEvent("hsm.breaker_opened", {"failures": 5}))
        time.sleep(0.05)
    assert time.monotonic() - began < 5


def test_a_worn_worker_asks_until_it_is_heard(tmp_path):
    import os

    reading, writing = os.pipe()
    leaving = Leaving(writing, again_s=0.05)
    leaving.ask(None)
    leaving.ask(HsmTimeout())
    time.sleep(0.3)
    said = os.read(reading, 4096)
    assert said.count(REPLACE) >= 2
    assert set(said.split(b"\n")) == {b"replace", b""}
    os.close(reading)
    assert not Leaving(None).say(REPLACE)
