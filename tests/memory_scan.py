"""Looks for secrets in the memory of running processes, from outside, as root: every readable mapping, byte for byte.

A needle is a run of eight consecutive numbers of a vector (or a key's 32 bytes). Runs from all over a vector are sought, in
float16, float32 and float64, so that a copy of a part is found too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

RUN = 8
_CHUNK = 16 * 1024 * 1024
_SKIPPED = ("[vvar]", "[vvar_vclock]", "[vsyscall]", "[vdso]")


@dataclass(frozen=True)
class Found:
    """One copy: which needle, in which process, in which mapping."""

    needle: str
    pid: int
    program: str
    address: int
    mapping: str


def needles_of(name: str, vector: npt.NDArray[np.float32], count: int = 6) -> dict[str, bytes]:
    """`count` runs of eight numbers from all over the vector, in three number formats; constant runs say nothing."""
    found: dict[str, bytes] = {}
    starts = [s for s in range(0, len(vector) - RUN + 1, RUN) if len(np.unique(vector[s : s + RUN])) == RUN]
    chosen = [starts[i] for i in np.linspace(0, len(starts) - 1, min(count, len(starts))).astype(int)]
    # The numbers are float32; a copy in another format would be one of the whole vector, so two runs tell as much as six.
    for kind, runs in (("<f4", chosen), ("<f2", chosen[1::3]), ("<f8", chosen[1::3])):
        for start in runs:
            found[f"{name}[{start}:{start + RUN}] {kind}"] = vector[start : start + RUN].astype(kind).tobytes()
    return found


def family(pid: int) -> list[int]:
    """The process and all its descendants, living now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        current = todo.pop()
        out.append(current)
        todo += children.get(current, [])
    return out


def scan(pids: Iterable[int], needles: Mapping[str, bytes]) -> list[Found]:
    """Every place where a needle stands in the memory of these processes. A process that has just ended is passed over."""
    return [found for pid in pids for found in _scan_one(pid, needles)]


def _scan_one(pid: int, needles: Mapping[str, bytes]) -> list[Found]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        program = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError):
        return []
    longest = max(len(value) for value in needles.values())
    out = []
    try:
        for line in maps:
            span, mode, *rest = line.split(maxsplit=5)
            mapping = rest[3] if len(rest) > 3 else ""
            # A file mapped read-only holds what the file holds: no secret was ever written there.
            if "r" not in mode or mapping in _SKIPPED or ("w" not in mode and mapping.startswith("/")):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            out += _scan_span(memory, start, end, longest, needles, pid, program, mapping)
    finally:
        os.close(memory)
    return out


def _scan_span(
    memory: int, start: int, end: int, longest: int, needles: Mapping[str, bytes], pid: int, program: str, mapping: str
) -> list[Found]:
    hits: set[tuple[str, int]] = set()
    at = start
    while at < end:
        try:
            block = os.pread(memory, min(_CHUNK + longest, end - at), at)
        except OSError:
            block = b""  # a page that is not there, e.g. past the end of a mapped file
        if block.count(0) == len(block):
            at += _CHUNK  # untouched pages: quick to see, slow to search
            continue
        for name, value in needles.items():
            where = block.find(value)
            while where >= 0:
                hits.add((name, at + where))
                where = block.find(value, where + 1)
        at += _CHUNK
    return [Found(name, pid, program, address, mapping) for name, address in sorted(hits, key=lambda hit: hit[1])]
