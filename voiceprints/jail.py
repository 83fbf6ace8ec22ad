"""Confinement of a process that is about to read hostile bytes: it may compute, read its pipe, write its pipe, and end.

Imports only what a small child needs. Order in `confine`: die with the parent, no new privileges, own user and network
namespace where the kernel lets us, resource limits, and last a seccomp filter (seccomp(2), an allow-list) that answers
EPERM to every other system call: no open, socket, connect, execve, fork, clone, ptrace, kill, and no executable memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO_EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD_WORD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF opcodes (linux/bpf_common.h)
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32  # offsets in struct seccomp_data
_PROT_EXEC = 4

# Machine → (AUDIT_ARCH_*, calls allowed, calls allowed unless their third argument asks for executable memory).
# The names, in order: read write close fstat lseek munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sched_yield mremap
# madvise nanosleep getpid exit gettid futex sched_getaffinity clock_gettime clock_nanosleep exit_group getrandom sigaltstack;
# then mmap mprotect.
_CALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 186, 202, 204, 228, 230, 231, 318, 131),
        (9, 10),
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 80, 62, 215, 214, 134, 135, 139, 124, 216, 233, 101, 172, 93, 178, 98, 123, 113, 115, 94, 278, 132),
        (222, 226),
    ),
}


class JailUnavailable(OSError):
    """The kernel would not confine this process; it must not go on."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine(*, memory_bytes: int, cpu_seconds: int) -> bool:
    """Confine this process for good. Returns whether it also has a network namespace of its own (seccomp holds without).

    Raises JailUnavailable where no-new-privileges or the filter cannot be set: the caller must then end.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # A user namespace without a mapping also takes away root's rights outside it.
    own_network = any(_libc.unshare(flags) == 0 for flags in (_CLONE_NEWUSER | _CLONE_NEWNET, _CLONE_NEWNET))
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    _install_filter()
    return own_network


def _install_filter() -> None:
    code = filter_program(platform.machine())
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(held))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def filter_program(machine: str) -> bytes:
    """The BPF program for `machine`: struct sock_filter, eight bytes each. Raises JailUnavailable for an unknown machine."""
    if machine not in _CALLS:
        raise JailUnavailable(f"no system call table for {machine}")
    architecture, allowed, unless_executable = _CALLS[machine]
    lines = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    for number in allowed:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in unless_executable:
        lines += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD_WORD, 0, 0, _THIRD_ARGUMENT),
            (_JUMP_ANY_BIT, 1, 0, _PROT_EXEC),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO_EPERM),
        ]
    lines.append((_RETURN, 0, 0, _ERRNO_EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _prctl(option: int, value: object, argument: object = 0) -> None:
    if _libc.prctl(option, value, argument, 0, 0) != 0:
        number = ctypes.get_errno()
        raise JailUnavailable(number, f"prctl({option}): {os.strerror(number)}")
