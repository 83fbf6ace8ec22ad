"""A readable, timed transcript of something that happens before the reader's eyes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Transcript:
    """Writes numbered steps with the time since the start, facts under them, and refusals beside what was accepted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._start = time.monotonic()
        self._number = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """One step: its title now, how long it took when it is done."""
        self._number += 1
        began = self.seconds
        self._say(f"\n[{began:5.1f} s] {self._number}. {title}")
        yield
        self._say(f"          done in {self.seconds - began:.2f} s")

    def fact(self, text: str) -> None:
        self._say(f"          {text}")

    def refused(self, attack: str, code: str, beside: str) -> None:
        """An attack that was refused, and the same request that was accepted, differing in that one thing."""
        self._say(f"          ✗ {attack}: refused, {code}")
        self._say(f"          ✓ {beside}: accepted")
