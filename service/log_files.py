"""The log files of processes, from outside: kept from growing without end, and read for what ended a process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

LAST_BYTES = 16384
"""What is read of a log for its last line."""


def roll(path: Path, largest: int) -> bool:
    """Move a log that passed `largest` bytes to `NAME.log.1`, at most that many of its newest; returns whether it did.

    Its writer may be running: the file stays, emptied, and whoever writes it must append. Lines said between the copy and the
    emptying are lost. A copy that fails is given up: a full disk would end more than a log.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody tidied up
        return False
    with os.fdopen(descriptor, "rb") as log:
        size = os.fstat(descriptor).st_size
        if size <= largest:
            return False
        with contextlib.suppress(OSError):
            kept = os.open(path.with_suffix(".log.1"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(kept, "wb") as old:
                log.seek(size - largest)
                shutil.copyfileobj(log, old)
        os.truncate(descriptor, 0)
    return True


def last_words(log: bytes) -> dict[str, str]:
    """From a process's log: `event`, `code` and `fix` of its last line, as far as it has them."""
    for line in reversed(log.decode(errors="replace").splitlines()):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except ValueError:
            return {"event": line.strip()[:300]}
        if isinstance(said, dict):
            return {name: str(said[name]) for name in ("event", "code", "fix") if name in said}
    return {}


def tail(path: Path, start: int) -> bytes:
    """The newest bytes of a log from `start` on, at most LAST_BYTES; none where there is no log."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - LAST_BYTES))
        return log.read()
    return b""
