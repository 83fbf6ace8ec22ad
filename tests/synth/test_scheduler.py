"""Turns: bounded, in order of arrival, refused at once when the line is full, given back whatever happens."""

from __future__ import annotations

import threading
import time

import pytest

from synth.errors import Busy, Cancelled, TurnLate
from synth.scheduler import Scheduler


def test_a_full_line_is_refused_at_once_with_a_hint():
    scheduler = Scheduler(at_once=1, waiting=1, patience_s=30)
    with scheduler.reserve() as first:
        first.wait()
        with scheduler.reserve():
            started = time.monotonic()
            with pytest.raises(Busy) as caught, scheduler.reserve():
                pass
            assert time.monotonic() - started < 0.5
            assert caught.value.code == "busy"
            assert caught.value.retry_after_s > 0
    with scheduler.reserve() as again:
        again.wait()


def test_no_more_than_the_set_number_speak_at_once_and_all_are_served():
    scheduler = Scheduler(at_once=2, waiting=30)
    now = most = 0
    lock = threading.Lock()

    def work():
        nonlocal now, most
        with scheduler.reserve() as turn:
            turn.wait()
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.005)
            with lock:
                now -= 1

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (now, most) == (0, 2)


def test_first_come_first_served():
    scheduler = Scheduler(at_once=1, waiting=10)
    order: list[int] = []

    def work(number: int, placed: threading.Event):
        with scheduler.reserve() as turn:
            placed.set()
            turn.wait()
            order.append(number)

    with scheduler.reserve() as held:
        held.wait()
        threads = []
        for number in range(8):
            placed = threading.Event()
            threads.append(threading.Thread(target=work, args=(number, placed)))
            threads[-1].start()
            placed.wait(5)
    for thread in threads:
        thread.join(5)
    assert order == list(range(8))


def test_patience_ends_and_the_place_is_free_again():
    scheduler = Scheduler(at_once=1, waiting=1, patience_s=0.05)
    with scheduler.reserve() as first:
        first.wait()
        with scheduler.reserve() as late, pytest.raises(TurnLate) as caught:
            late.wait()
        assert isinstance(caught.value, Busy)
        with scheduler.reserve():
            pass
    with scheduler.reserve() as turn:
        turn.wait()


def test_a_turn_goes_on_to_the_next_when_its_holder_fails():
    scheduler = Scheduler(at_once=1, waiting=0)

    def fail():
        with scheduler.reserve() as turn:
            turn.wait()
            raise RuntimeError

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fail()
    with scheduler.reserve() as turn:
        turn.wait()


def test_cancelling_ends_the_wait_in_line():
    scheduler = Scheduler(at_once=1, waiting=1, patience_s=30)
    with scheduler.reserve() as first:
        first.wait()
        with scheduler.reserve() as second:
            threading.Timer(0.05, second.cancel).start()
            started = time.monotonic()
            with pytest.raises(Cancelled):
                second.wait()
            assert time.monotonic() - started < 5


def test_the_hint_follows_how_long_turns_take():
    now = [0.0]
    scheduler = Scheduler(at_once=1, waiting=0, clock=lambda: now[0])
    for _ in range(40):
        with scheduler.reserve() as turn:
            turn.wait()
            now[0] += 20
    with scheduler.reserve(), pytest.raises(Busy) as caught, scheduler.reserve():
        pass
    assert 15 < caught.value.retry_after_s <= 21


@pytest.mark.parametrize(("at_once", "waiting"), [(0, 1), (1, -1)])
def test_limits_must_make_sense(at_once, waiting):
    with pytest.raises(ValueError):
        Scheduler(at_once=at_once, waiting=waiting)
