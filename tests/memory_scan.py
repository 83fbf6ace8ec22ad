"""Looks for secrets in the memory of running processes, from outside, as root: every readable mapping, byte for byte.

A needle is a run of eight consecutive numbers of a vector (or a key's 32 bytes). Runs from all over a vector are sought, in
float16, float32 and float64, so that a copy of a part is found too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

RUN = 8
PAGE = os.sysconf("SC_PAGE_SIZE")
_CHUNK = 4 * 1024 * 1024
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
        memory, pages = (os.open(f"/proc/{pid}/{name}", os.O_RDONLY) for name in ("mem", "pagemap"))
    except (FileNotFoundError, ProcessLookupError):
        return []
    sought, out = Sought(needles), []
    try:
        for line in maps:
            span, mode, *rest = line.split(maxsplit=5)
            mapping = rest[3] if len(rest) > 3 else ""
            # A file mapped read-only holds what the file holds: no secret was ever written there.
            if "r" not in mode or mapping in _SKIPPED or ("w" not in mode and mapping.startswith("/")):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            hits = {hit for run in _written(pages, start, end) for hit in _scan_run(memory, *run, sought)}
            out += [Found(name, pid, program, address, mapping) for name, address in sorted(hits, key=lambda hit: hit[1])]
    finally:
        os.close(memory)
        os.close(pages)
    return out


def _written(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The runs of pages that exist, in memory or swapped out: a page that nobody touched holds nothing."""
    first, count = start // PAGE, (end - start) // PAGE
    entries = np.frombuffer(os.pread(pagemap, count * 8, first * 8), np.uint64)
    exists = (entries >> np.uint64(62)) != 0  # bit 63: present, bit 62: swapped
    edges = np.flatnonzero(np.diff(np.concatenate(([False], exists, [False])).astype(np.int8)))
    for begins, ends in edges.reshape(-1, 2).tolist():
        yield start + begins * PAGE, start + ends * PAGE


def _scan_run(memory: int, start: int, end: int, sought: Sought) -> Iterator[tuple[str, int]]:
    for at in range(start, end, _CHUNK):
        try:
            block = os.pread(memory, min(_CHUNK + sought.longest, end - at), at)
        except OSError:
            continue  # a page that is gone meanwhile
        for name, where in sought.within(block):
            yield name, at + where


class Sought:
    """Many needles sought at once: bytes that stand where four of a needle's do are found by table, then compared whole."""

    def __init__(self, needles: Mapping[str, bytes]) -> None:
        self.longest = max(len(value) for value in needles.values())
        self._begins = np.zeros(1 << 16, bool)
        self._by_mark: dict[int, list[tuple[str, bytes, int]]] = {}
        for name, value in needles.items():
            # Four bytes that say something: a float64 made from a float32 begins with zeros, as most memory does.
            offset = next(i for i in range(len(value) - 3) if value[i] and value[i + 1])
            mark = int.from_bytes(value[offset : offset + 4], "little")
            self._begins[mark & 0xFFFF] = True
            self._by_mark.setdefault(mark, []).append((name, value, offset))
        self._marks = np.array(sorted(self._by_mark), np.uint32)

    def within(self, block: bytes) -> Iterator[tuple[str, int]]:
        """Every needle that stands in the block, and where."""
        octets = np.frombuffer(block, np.uint8)
        for odd in (0, 1):
            pairs = np.frombuffer(block, "<u2", count=(len(block) - odd) // 2, offset=odd)
            at = np.flatnonzero(self._begins.take(pairs, mode="clip")) * 2 + odd
            at = at[at <= len(block) - 4]
            words = pairs[(at - odd) // 2] | (octets[at + 2].astype(np.uint32) << 16) | (octets[at + 3].astype(np.uint32) << 24)
            chosen = np.isin(words, self._marks)
            for where, word in zip(at[chosen].tolist(), words[chosen].tolist(), strict=True):
                for name, value, offset in self._by_mark[word]:
                    if block.startswith(value, where - offset) and where >= offset:
                        yield name, where - offset
