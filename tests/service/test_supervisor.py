"""The supervisor: stages, readiness, backoff, one message at the end, and no process left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from service import demo
from service import supervisor as module
from service.errors import ProcessFailed
from service.isolation import Account
from service.supervisor import Program, Stopped, Supervisor, signals_held

ROOT = Path(__file__).parents[2]


def program(name: str, script: str, ready=lambda: True, **changes) -> Program:
    made = Program(name, ["/bin/sh", "-c", script], Account.current(), {"PATH": "/usr/bin:/bin"}, ready)
    return replace(made, **changes)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(holds, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


@pytest.fixture
def said():
    return []


@pytest.fixture
def supervisor(tmp_path, said):
    with signals_held():
        made = Supervisor(tmp_path, said.append)
        yield made
        made.stop()


def watch_for(supervisor: Supervisor, seconds: float) -> None:
    """Watch, and ask to stop after some seconds as a terminal would."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        supervisor.watch()
    finally:
        timer.cancel()
        timer.join()
        signal.sigtimedwait({signal.SIGTERM}, 0)


def test_a_stage_is_over_when_everything_in_it_serves(supervisor, tmp_path):
    mark = tmp_path / "mark"
    supervisor.start([program("slow", f"sleep 0.3; touch {mark}; sleep 60", ready=mark.exists)])
    assert mark.exists()
    supervisor.start([program("next", "sleep 60")])
    assert set(supervisor.pids()) == {"slow", "next"}


def test_a_dead_program_is_started_again(supervisor, said):
    supervisor.start([program("worker", "sleep 60")])
    first = supervisor.pids()["worker"]
    os.kill(first, signal.SIGKILL)
    watch_for(supervisor, 1.5)
    assert supervisor.pids()["worker"] != first
    assert said == ["worker ended (killed by SIGKILL); starting it again"]


def test_one_that_will_not_stay_up_fails_with_its_own_last_words(supervisor, monkeypatch):
    monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.01, 0.01))
    words = json.dumps({"event": "the token refused", "code": "hsm_unavailable", "fix": "plug it in"})
    with pytest.raises(ProcessFailed, match="worker ended 3 times: the token refused") as failed:
        supervisor.start([program("worker", f"echo '{words}'; exit 3", ready=lambda: False)])
    assert failed.value.mend == "plug it in"


def test_a_rejected_pin_is_never_tried_twice(supervisor, tmp_path):
    words = json.dumps({"event": "The token refused the PIN", "code": "pin_rejected", "fix": "mend the PIN file"})
    with pytest.raises(ProcessFailed, match="refused the PIN") as failed:
        supervisor.start([program("vault-0", f"echo x >> {tmp_path}/tries; echo '{words}'; exit 1", ready=lambda: False)])
    assert failed.value.mend == "mend the PIN file"
    assert (tmp_path / "tries").read_text() == "x\n"


def test_never_ready_is_an_error_that_names_the_program(supervisor, monkeypatch):
    monkeypatch.setattr(module, "READY_SECONDS", 0.2)
    with pytest.raises(ProcessFailed, match="edge-0 did not become ready"):
        supervisor.start([program("edge-0", "sleep 60", ready=lambda: False)])


def test_stop_ends_programs_their_children_and_those_that_ignore_it(supervisor, tmp_path):
    stubborn = f"trap '' TERM; sleep 61 & echo $! > {tmp_path}/child; wait; sleep 61"
    supervisor.start([program("stubborn", stubborn, stop_signals=((signal.SIGTERM, 0.3),))])
    assert eventually((tmp_path / "child").exists)
    pids = [supervisor.pids()["stubborn"], int((tmp_path / "child").read_text())]
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 3
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_later_stages_are_stopped_first(supervisor, tmp_path):
    for name in ("first", "second"):
        script = f"trap 'echo {name} >> {tmp_path}/order; exit' TERM; while :; do sleep 0.05; done"
        supervisor.start([program(name, script)])
    time.sleep(0.2)
    supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["second", "first"]


def test_a_signal_during_the_start_stops_it(supervisor):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Stopped):
        supervisor.start([program("never", "sleep 60", ready=lambda: False)])


def test_children_do_not_inherit_held_signals(supervisor, tmp_path):
    supervisor.start([program("worker", f"grep SigBlk /proc/self/status > {tmp_path}/mask; sleep 60")])
    assert eventually(lambda: (tmp_path / "mask").exists() and (tmp_path / "mask").read_text())
    assert int((tmp_path / "mask").read_text().split()[1], 16) == 0


def test_no_child_outlives_a_supervisor_that_is_killed(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from service.isolation import Account; from service.supervisor import *\n"
        "with signals_held():\n"
        "  s = Supervisor(Path(sys.argv[1]), print)\n"
        "  s.start([Program('w', ['/bin/sleep', '60'], Account.current(), {}, lambda: True)])\n"
        "  print(s.pids()['w'], flush=True); s.watch()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: gone(pid))


def test_a_long_log_is_put_aside(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_LOG", 10)
    (tmp_path / "worker.log").write_text("x" * 11)
    supervisor.start([program("worker", "echo fresh; sleep 60")])
    assert (tmp_path / "worker.log.1").read_text() == "x" * 10
    assert eventually(lambda: (tmp_path / "worker.log").read_text() == "fresh\n")


def test_a_log_that_grows_too_large_is_rolled_while_its_program_runs(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_LOG", 1000)
    wait = f"while ! test -e {tmp_path}/go; do sleep 0.05; done"
    script = f"yes 'a line of words' | head -c 3000; echo last; {wait}; echo after; sleep 60"
    supervisor.start([program("worker", script)])
    pid, log, old = supervisor.pids()["worker"], tmp_path / "worker.log", tmp_path / "worker.log.1"
    assert eventually(lambda: log.stat().st_size > 1000)
    watch_for(supervisor, 0.8)
    (tmp_path / "go").touch()
    assert eventually(lambda: log.read_text() == "after\n")
    assert supervisor.pids()["worker"] == pid
    assert old.stat().st_size <= 1000
    assert old.read_text().endswith("last\n")
    assert old.stat().st_mode & 0o777 == 0o600


def test_last_words_said_just_before_a_log_was_rolled_still_count(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_LOG", 1000)
    words = json.dumps({"event": "The token refused the PIN", "code": "pin_rejected", "fix": "mend the PIN file"})
    script = f"echo x >> {tmp_path}/tries; yes | head -c 3000; echo '{words}'; sleep 1.2; exit 1"
    supervisor.start([program("vault-0", script)])
    with pytest.raises(ProcessFailed, match="refused the PIN"):
        watch_for(supervisor, 5)
    assert (tmp_path / "vault-0.log").read_text() == ""
    assert (tmp_path / "tries").read_text() == "x\n"


def replaceable(tmp_path: Path, asks: str, heirs: str = "echo serving > /proc/self/fd/$GLOTTIS_SUPERVISOR_FD") -> Program:
    """The first process asks once; later ones are heirs."""
    wait = "trap 'echo left; exit 0' USR1; while :; do sleep 0.05; done"
    script = f"if mkdir {tmp_path}/first 2>/dev/null; then {asks}; else {heirs}; fi; {wait}"
    return program("vault-0", script, replaceable=True)


def test_a_program_that_asks_is_replaced_once_its_successor_serves(supervisor, tmp_path, said):
    supervisor.start([replaceable(tmp_path, "echo replace > /proc/self/fd/$GLOTTIS_SUPERVISOR_FD")])
    first = supervisor.pids()["vault-0"]
    watch_for(supervisor, 2)
    assert supervisor.pids()["vault-0"] != first
    assert gone(first)
    assert "left" in (tmp_path / "vault-0.log").read_text()
    assert said == ["vault-0 has done its share; its successor starts"]


def test_a_successor_that_dies_costs_nothing(supervisor, tmp_path, said):
    supervisor.start([replaceable(tmp_path, "echo replace > /proc/self/fd/$GLOTTIS_SUPERVISOR_FD", heirs="exit 1")])
    first = supervisor.pids()["vault-0"]
    watch_for(supervisor, 2)
    assert supervisor.pids()["vault-0"] == first
    assert "vault-0 goes on" in said[-1]


def test_a_program_that_dies_while_its_successor_starts_leaves_its_place_to_it(supervisor, tmp_path):
    asks = "echo replace > /proc/self/fd/$GLOTTIS_SUPERVISOR_FD; sleep 0.5; exit 3"
    supervisor.start([replaceable(tmp_path, asks, heirs=":")])
    first = supervisor.pids()["vault-0"]
    watch_for(supervisor, 2)
    assert supervisor.pids()["vault-0"] != first
    supervisor.stop()
    assert gone(first)


def test_one_that_is_not_vital_ends_nothing_and_is_tried_again(supervisor, tmp_path, said, monkeypatch):
    monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(module, "_SELDOM_SECONDS", 0.1)
    tries = tmp_path / "tries"
    words = json.dumps({"event": "wrong PIN", "code": "pin_rejected"})
    supervisor.begin([program("other", f"echo x >> {tries}; echo '{words}'; exit 1", vital=False)])
    supervisor.start([program("main", "sleep 60")])
    watch_for(supervisor, 3.5)
    assert len(tries.read_text().split()) > 3  # three waits are short ones
    assert [line for line in said if "will not stay up" in line] == [
        "other will not stay up (wrong PIN); trying it again now and then"
    ]
    assert "main" in supervisor.pids()


def test_what_is_not_vital_stops_beside_the_others(supervisor, tmp_path):
    mark, slow = tmp_path / "mark", "trap 'sleep 0.6; exit 0' TERM; "
    second = program("site-b", slow + "while :; do sleep 0.05; done", vital=False, stop_signals=((signal.SIGTERM, 5.0),))
    supervisor.begin([second])
    supervisor.start([program("worker", f"trap 'sleep 0.6; exit 0' TERM; touch {mark}; while :; do sleep 0.05; done", mark.exists)])
    time.sleep(0.1)
    pids, began = supervisor.pids(), time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 1.1, "one after the other takes 1.2 s"
    assert all(gone(pid) for pid in pids.values())


def test_one_that_is_not_vital_is_killed_after_its_time(supervisor):
    supervisor.start(
        [program("site-b", "trap '' TERM; while :; do sleep 0.05; done", vital=False, stop_signals=((signal.SIGTERM, 0.2),))]
    )
    time.sleep(0.1)
    pids = supervisor.pids()
    supervisor.stop()
    assert gone(pids["site-b"])


def test_the_demo_waits_for_a_start_no_longer_than_it_says(monkeypatch):
    monkeypatch.setattr(demo, "_START_S", 0.2)
    up = subprocess.Popen(["/bin/sleep", "60"], stdout=subprocess.PIPE)
    with pytest.raises(demo.DemoFailed, match="did not serve within"):
        demo._await_ready(up)
    assert up.wait(5) == -signal.SIGKILL
    up.stdout.close()
