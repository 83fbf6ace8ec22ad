"""Promise 2: after a measurement, done or failed, and after texts spoken, no run of a voice's numbers is in unlocked memory.

The process looks through its own memory: every writable anonymous mapping, for any eight consecutive numbers of the
conditioning, as float16, float32 or float64, at any place that is a multiple of four bytes (two for float16). A planted
copy is found in each format: the search can see a breach.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from synth_voices import Opened, utterances

from keyvault.locked import LockedBuffer
from synth.conditioning import SIZE

RUN = 8
KINDS = (np.float16, np.float32, np.float64)
CHUNK = 2 << 20
WORDS = ["harbor", "yellow", "window", "garden", "letter", "morning", "river", "silver", "kitchen", "table"]


class Search:
    """Looks for a vector in this process. Its own copies of the vector stand in locked memory, which is not searched."""

    def __init__(self, vector: np.ndarray) -> None:
        self._own = LockedBuffer(SIZE * 16 + CHUNK + 4096)
        self._block = self._own.array(CHUNK, np.uint8)
        self._known, self._places, self._tables = {}, {}, {}
        for kind in KINDS:
            known = self._own.array(SIZE, kind)
            np.copyto(known, vector, casting="same_kind")
            self._known[kind] = known.view(f"u{known.itemsize}")
            places: dict[int, list[int]] = {}
            table = np.zeros(1 << 16, bool)
            for index, word in enumerate(self._known[kind].tolist()):  # number by number: no run of them is copied
                if word:
                    places.setdefault(word, []).append(index)
                    table[word >> (8 * known.itemsize - 16)] = True
            self._places[kind], self._tables[kind] = places, table

    def found(self, *exempt: LockedBuffer) -> list[str]:
        hits = []
        spans = [(buffer.address, buffer.address + buffer.size) for buffer in (self._own, *exempt)]
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            for start, end in _writable_anonymous():
                for part_start, part_end in _without(start, end, spans):
                    hits += self._span(memory, part_start, part_end)
        finally:
            os.close(memory)
        return hits

    def _span(self, memory: int, start: int, end: int) -> list[str]:
        hits = []
        for at in range(start, end, CHUNK - 256):
            try:
                size = os.preadv(memory, [self._block[: min(CHUNK, end - at)]], at)
            except OSError:  # given back to the system since the list was read
                assert (at, end) not in _writable_anonymous()
                continue
            if not self._block[:size].any():
                continue
            for kind in KINDS:
                width = np.dtype(kind).itemsize
                for shift in range(0, width, min(width, 4)):
                    words = self._block[shift : shift + (size - shift) // width * width].view(f"u{width}")
                    hits += [f"{np.dtype(kind)} at {at + shift + place * width:#x}" for place in self._runs(words, kind)]
        return hits

    def _runs(self, words: np.ndarray, kind: type) -> list[int]:
        """Places in `words` inside a run of at least eight numbers that follow each other as they do in the vector.

        Such a run holds two words at multiples of four; their leading bits are looked up first.
        """
        halves = words.itemsize // 2
        known = self._tables[kind][words.view(np.uint16)[halves - 1 :: 4 * halves]]
        return [
            4 * place
            for place in np.flatnonzero(known[:-1] & known[1:]).tolist()
            if any(
                self._length(words, 4 * place, index, kind) >= RUN for index in self._places[kind].get(int(words[4 * place]), ())
            )
        ]

    def _length(self, words: np.ndarray, place: int, index: int, kind: type) -> int:
        known = self._known[kind]
        first = last = 0
        while min(place, index) > first and known[index - first - 1] == words[place - first - 1] != 0:
            first += 1
        while place + last < len(words) and index + last < SIZE and known[index + last] == words[place + last] != 0:
            last += 1
        return first + last


def _writable_anonymous() -> list[tuple[int, int]]:
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode.startswith("rw") and inode == "0" and not (name and name[0].startswith("[v")):
            start, end = (int(part, 16) for part in span.split("-"))
            spans.append((start, end))
    return spans


def _without(start: int, end: int, holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, end) less the holes."""
    parts = []
    for low, high in sorted(holes):
        if low < end and high > start:
            parts += [(start, low)] if low > start else []
            start = high
    return [*parts, (start, end)] if start < end else parts


class Interrupted(Exception):
    """The failure that comes when all numbers are measured."""


def _interrupt_after_the_last_number(frame: FrameType, event: str, _: object) -> None:
    if event == "return" and frame.f_code.co_name == "_timbre":
        sys.setprofile(None)
        raise Interrupted


@pytest.fixture
def measured_before(engine) -> tuple[np.ndarray, Opened, Search]:
    """Speech, its voice and a search that is ready: the next measurement is then searched for before memory is used anew."""
    speech = np.concatenate([clip[2345:] for clip in utterances("2033")[1:3]])
    voice = Opened(engine, speech)
    return speech, voice, Search(voice.conditioning)


def test_directly_after_a_measurement_no_number_stands_outside(engine, measured_before):
    speech, before, search = measured_before
    voice = Opened(engine, speech)
    hits = search.found(before.numbers, before.work, voice.numbers, voice.work)
    assert np.array_equal(voice.conditioning, before.conditioning)
    assert hits == []


def test_directly_after_a_measurement_that_fails_last_no_number_stands_anywhere(engine, measured_before):
    speech, before, search = measured_before
    voice = Opened(engine)
    sys.setprofile(_interrupt_after_the_last_number)
    try:
        with pytest.raises(Interrupted):
            engine.measure(speech, voice.conditioning, voice.scratch)
    finally:
        sys.setprofile(None)
    assert search.found(before.numbers, before.work) == []


@pytest.fixture(scope="module")
def used(engine) -> Opened:
    """A voice measured here and used for twenty texts. The cut of speech is no other test's, so neither are its numbers."""
    voice = Opened(engine, np.concatenate([clip[4321:] for clip in utterances("1998")[1:4]]))
    chance = np.random.default_rng(3)
    for length in chance.integers(1, 25, 20):
        script = engine.read(" ".join(chance.choice(WORDS, length)) + ". Then more.")
        for _ in engine.speak(script, voice.conditioning, voice.scratch):
            pass
    return voice


def test_no_number_of_the_voice_stands_outside_locked_memory(used):
    assert Search(used.conditioning).found(used.numbers, used.work) == []


def test_what_the_buffers_hold_is_seen_when_they_are_not_exempt(used):
    assert Search(used.conditioning).found()


def test_planted_copies_are_found_in_every_format(used):
    search = Search(used.conditioning)
    starts = (44, 4 + 40 * 17 + 3, SIZE - RUN)  # the first phone's bias, across two phones, the end of the shift
    planted = [used.conditioning[start : start + RUN].astype(kind) for start, kind in zip(starts, KINDS, strict=True)]
    hits = search.found(used.numbers, used.work)
    assert {hit.split()[0] for hit in hits} >= {"float16", "float32", "float64"}
    del planted
