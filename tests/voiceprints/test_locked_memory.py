"""The budget of locked memory: counted, waited for with patience, refused by name, never exceeded."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from voiceprints.errors import LockedMemoryExhausted
from voiceprints.memory import LockedMemory, default_limit

PAGE = resource.getpagesize()


def test_buffers_are_counted_in_whole_pages_and_given_back():
    memory = LockedMemory(4 * PAGE, patience_s=0)
    with memory.buffer(1) as one, memory.buffer(2 * PAGE + 1):
        assert one.size == PAGE
        assert memory.taken == 4 * PAGE
        with pytest.raises(LockedMemoryExhausted), memory.buffer(1):
            pytest.fail("handed out")
    assert memory.taken == 0


def test_a_buffer_is_wiped_and_given_back_when_the_block_raises():
    memory = LockedMemory(PAGE, patience_s=0)
    views: list[np.ndarray] = []

    def fail() -> None:
        with memory.buffer(PAGE) as buffer:
            views.append(buffer.array(8))
            views[0].fill(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not views[0].any()
    assert memory.taken == 0


def test_a_little_patience_lets_requests_take_turns():
    memory = LockedMemory(2 * PAGE, patience_s=5)
    most = []

    def use() -> None:
        with memory.buffer(PAGE):
            most.append(memory.taken)
            time.sleep(0.005)

    threads = [threading.Thread(target=use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 16
    assert max(most) <= 2 * PAGE


def test_more_than_the_whole_budget_is_refused():
    with pytest.raises(LockedMemoryExhausted), LockedMemory(PAGE, patience_s=0).buffer(PAGE + 1):
        pytest.fail("handed out")


def test_the_default_stays_below_the_operating_systems_limit():
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert 0 <= default_limit() <= 64 << 20
    assert allowed == resource.RLIM_INFINITY or default_limit() < allowed


def test_the_operating_systems_refusal_is_ours_by_name():
    # Without the right to lock at will (an ordinary user), more than RLIMIT_MEMLOCK is refused by mlock itself.
    program = """
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from voiceprints.errors import LockedMemoryExhausted
from voiceprints.memory import LockedMemory
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
memory = LockedMemory(1 << 20)
try:
    with memory.buffer(1 << 19):
        print("handed out")
except LockedMemoryExhausted as refusal:
    print(refusal.code, memory.taken)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["locked_memory_exhausted", "0"]
