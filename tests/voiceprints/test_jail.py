"""The jail refuses what a broken media library would be made to try; without it the same attempts succeed."""

from __future__ import annotations

import json
import platform
import signal
import struct
import subprocess

import pytest

from voiceprints.decoding import child_command
from voiceprints.jail import JailUnavailable, filter_program

# One child, told whether to confine itself. It imports what the real child imports, and only then tries each thing.
PROBE = """
import sys; sys.path += sys.argv[1:3]
import ctypes, json, mmap, os, resource, signal, socket, threading
from voiceprints.decoding_child import rehearse
from voiceprints.jail import confine
rehearse()
if sys.argv[3] == "confined":
    confine(memory_bytes=1 << 30, cpu_seconds=5)
libc = ctypes.CDLL(None, use_errno=True)
def forked():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def executed():
    # A path that cannot be: past the filter the kernel looks for it and answers ENOTDIR, the sign that it would have run.
    try:
        os.execv("/dev/null/x", ["x"])
    except NotADirectoryError:
        pass
def traced():
    if libc.ptrace(0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
def threaded():
    thread = threading.Thread(target=int); thread.start(); thread.join()
attempts = {
    "open": lambda: open("/etc/passwd").close(),
    "create": lambda: os.close(os.open("/tmp", os.O_TMPFILE | os.O_WRONLY)),
    "list": lambda: os.listdir("/"),
    "tcp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "unix": lambda: socket.socket(socket.AF_UNIX).close(),
    "socketpair": lambda: [s.close() for s in socket.socketpair()],
    "fork": forked,
    "thread": threaded,
    "exec": executed,
    "ptrace": traced,
    "kill": lambda: os.kill(os.getpid(), 0),
    "pipe": lambda: [os.close(fd) for fd in os.pipe()],
    "executable_memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close(),
    "raise_limit": lambda: resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU)),
}
outcome = {}
for name, attempt in attempts.items():
    try:
        attempt()
        outcome[name] = "done"
    except (OSError, RuntimeError, ValueError) as error:
        outcome[name] = type(error).__name__
outcome["environment"] = sorted(set(os.environ) - {"LC_CTYPE"})  # the interpreter sets that one itself (PEP 538)
os.write(1, json.dumps(outcome).encode())
os._exit(0)
"""


def outcome(how: str) -> dict[str, object]:
    done = subprocess.run([*child_command(PROBE), how], env={}, cwd="/", capture_output=True, timeout=30, check=True)
    return json.loads(done.stdout)


def test_without_the_jail_each_attempt_succeeds():
    free = outcome("free")
    assert free.pop("environment") == []
    assert set(free.values()) == {"done"}, free


def test_within_the_jail_each_attempt_is_refused():
    held = outcome("confined")
    held.pop("environment")
    assert "done" not in held.values(), held


def test_the_child_dies_with_its_parent():
    start = (
        "import sys; sys.path += sys.argv[1:3]; import os; from voiceprints.jail import confine;"
        "confine(memory_bytes=1 << 30, cpu_seconds=5); os.write(1, b'x'); os.read(0, 1)"
    )
    program = (
        f"import subprocess, sys; c = subprocess.Popen({child_command(start)!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
    )
    program += "c.stdout.read(1); print(c.pid, flush=True); sys.stdin.read(1)"
    parent = subprocess.Popen([child_command()[0], "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    assert _gone(child)


def _gone(pid: int) -> bool:
    import time
    from pathlib import Path

    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_whole_and_ends_in_refusal(machine):
    code = filter_program(machine)
    lines = [struct.unpack("=HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    assert lines[0] == (0x20, 0, 0, 4)  # the architecture is looked at first
    assert lines[2] == (0x06, 0, 0, 0x80000000)
    assert lines[-1] == (0x06, 0, 0, 0x00050001)
    for number, (_, true, false, _) in enumerate(lines):
        assert number + 1 + max(true, false) < len(lines) or (true, false) == (0, 0)


def run_filter(machine: str, call: int, third: int = 0, arch: int | None = None) -> int:
    """A small interpreter of classic BPF, so that the other machine's filter is executed too."""
    code = filter_program(machine)
    lines = [struct.unpack("=HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    data = {0: call, 4: lines[1][3] if arch is None else arch, 32: third}
    at = value = 0
    while True:
        operation, true, false, constant = lines[at]
        at += 1
        if operation == 0x20:
            value = data[constant]
        elif operation == 0x15:
            at += true if value == constant else false
        elif operation == 0x45:
            at += true if value & constant else false
        else:
            return constant


ALLOWED, KILLED, REFUSED = 0x7FFF0000, 0x80000000, 0x00050001
CALLS = {
    "x86_64": {
        "read": 0,
        "mmap": 9,
        "mprotect": 10,
        "open": 2,
        "openat": 257,
        "socket": 41,
        "execve": 59,
        "clone": 56,
        "ptrace": 101,
    },
    "aarch64": {"read": 63, "mmap": 222, "mprotect": 226, "openat": 56, "socket": 198, "execve": 221, "clone": 220, "ptrace": 117},
}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_decides_on_both_machines(machine):
    calls = dict(CALLS[machine])
    assert run_filter(machine, calls.pop("read")) == ALLOWED
    for name in ("mmap", "mprotect"):
        call = calls.pop(name)
        assert run_filter(machine, call, third=3) == ALLOWED
        assert run_filter(machine, call, third=7) == REFUSED
    for call in calls.values():
        assert run_filter(machine, call) == REFUSED
        assert run_filter(machine, call + 0x40000000) == REFUSED  # the x32 numbers
    assert run_filter(machine, 0, arch=0x40000003) == KILLED  # 32-bit calls have other numbers


def test_an_unknown_machine_is_refused():
    with pytest.raises(JailUnavailable):
        filter_program("sparc64")


def test_this_machine_is_known():
    assert filter_program(platform.machine())
