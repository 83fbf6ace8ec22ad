"""Start a jailed child for hostile bytes, feed it, read a bounded answer until a deadline, and always end and reap it.

The child gets an empty environment and three descriptors (two pipes and /dev/null), and confines itself (`jail.py`) before it
reads the first byte. This side never parses what it passes on.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO


class ChildUnavailable(Exception):
    """The child could not be started."""


class ChildTimeout(Exception):
    """The child was still at work at its deadline."""


class AnswerEndless(Exception):
    """The child answered more than it may."""


def command(start: str, library: str) -> list[str]:
    """The interpreter's command line: isolated (-I), without site (-S), with two folders to import from: ours and the library's.

    `start`: what it runs. Raises ChildUnavailable where the library is not installed.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise ChildUnavailable(f"the library {library} is not installed")
    return [sys.executable, "-I", "-S", "-c", start, str(Path(__file__).parent.parent), str(Path(spec.origin).parent.parent)]


def answer(argv: Sequence[str], given: bytes, *, most_bytes: int, wall_seconds: float) -> bytes:
    """What a fresh child answers to these bytes. Raises ChildUnavailable, ChildTimeout, AnswerEndless."""
    deadline = time.monotonic() + wall_seconds
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            close_fds=True,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise ChildUnavailable(error.strerror) from error
    try:
        return _exchange(child, given, most_bytes, deadline)
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        child.wait()


def _exchange(child: subprocess.Popen[bytes], given: bytes, most_bytes: int, deadline: float) -> bytes:
    """Feed and collect, both at once."""
    source, sink = child.stdin, child.stdout
    assert source is not None
    assert sink is not None
    collected, rest = bytearray(), memoryview(given)
    os.set_blocking(source.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_WRITE)
        selector.register(sink, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildTimeout
            for key, _ in ready:
                if key.fileobj is source:
                    rest = _fed(source, rest)
                    if not rest:
                        selector.unregister(source)
                        source.close()
                elif part := sink.read(1 << 20):
                    collected += part
                    if len(collected) > most_bytes:
                        raise AnswerEndless
                else:
                    return bytes(collected)


def _fed(pipe: IO[bytes], rest: memoryview) -> memoryview:
    try:
        return rest[os.write(pipe.fileno(), rest[: 1 << 20]) :]
    except BrokenPipeError:
        return rest[:0]
