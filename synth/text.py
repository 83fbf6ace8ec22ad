"""Text to sentences of model tokens: what can be voiced is kept in order, what cannot is named, nothing is lost silently.

Text is text: markup, `[voice:x]` and `[word](/sounds/)` are read out like any other characters and change nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from synth.errors import EmptyInput, TextTooLong, Unspeakable

MAX_CHARACTERS = 4096
MAX_TOKENS = 400  # one run of the model; longer sentences are cut at clauses, else between words
_LONGEST_LETTERS = 24  # the spelling net hears no more of one word
_LONGEST_NUMBER = 24  # the front end has no words for more than 36 digits
_LONGEST_RUN = 48  # without a space
_MOST_PARTS = 16  # letters, digits and signs by turns without a space: reading takes the third power of them
_SYMBOLS = frozenset("%&+@=<>~°¢§¶±×÷©→½¼¾²³µ^#/$£€¥₹₩|№")
_TYPOGRAPHIC = frozenset("`´¨¸|_•·")
_APOSTROPHES = str.maketrans({"ʻ": "'", "ʼ": "'", "′": "'"})
_CLAUSE_ENDS = frozenset(",;:—.!?…")
_UNSOUNDED = frozenset(' ;:,.!?—…"()“”ˈˌː‿')
_CURRENCIES = frozenset("$£€")


@dataclass(frozen=True)
class Word:
    """What the front end made of one stretch of text: its sounds, and whether a space follows."""

    text: str
    sounds: str
    spaced: bool


@dataclass(frozen=True)
class Sentence:
    """Token ids of one run of the model, pads included."""

    ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Script:
    """A text made ready. `skipped` names, in order and once each, the parts that will not be heard."""

    characters: int
    sentences: tuple[Sentence, ...]
    skipped: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class FrontEnd:
    """A language's reader: `letters` it can sound, `sentences` of a text, `words` of a sentence, `ids` of the sounds."""

    letters: frozenset[str]
    sentences: Callable[[str], Sequence[str]]
    words: Callable[[str], Sequence[Word]]
    ids: Mapping[str, int]


def read(text: str, front: FrontEnd) -> Script:
    """Make `text` ready to be spoken. Raises EmptyInput, TextTooLong, Unspeakable."""
    if len(text) > MAX_CHARACTERS:
        raise TextTooLong(f"the text has {len(text)} characters; one request may hold {MAX_CHARACTERS}")
    visible = _visible(text)
    if not visible.strip():
        raise EmptyInput
    skipped: dict[str, None] = {}
    plain = _shorten_runs(_spell(visible, front.letters, skipped))
    sentences: list[Sentence] = []
    for sentence in front.sentences(plain):
        words = [_known(word, front.ids) for word in front.words(sentence)]
        skipped.update(dict.fromkeys(_silent(words)))
        for group in _runs(words):
            sounds = "".join(word.sounds + (" " if word.spaced else "") for word in group).strip()
            if any(sound not in _UNSOUNDED for sound in sounds):
                sentences.append(Sentence((0, *(front.ids[sound] for sound in sounds), 0)))
    if not sentences:
        raise Unspeakable
    return Script(len(text), tuple(sentences), tuple(skipped))


def _visible(text: str) -> str:
    """NFC; controls become spaces; characters without a shape (zero-width, direction marks, soft hyphens) go."""
    kept = []
    for char in unicodedata.normalize("NFC", text.translate(_APOSTROPHES)):
        kind = unicodedata.category(char)
        if char == "\n" or kind in ("Zl", "Zp"):
            kept.append("\n")
        elif kind == "Cc" or kind == "Zs":
            kept.append(" ")
        elif kind != "Cf" and not 0xFE00 <= ord(char) <= 0xFE0F:
            kept.append(char)
    # "[word](/sounds/)" would set a word's sounds by hand: what is heard must be what is read.
    return "".join(kept).replace("](", "] (")


def _spell(text: str, letters: frozenset[str], skipped: dict[str, None]) -> str:
    """Each character as itself, or by its plain parts (é: e, ２: 2), or as a space and a name in `skipped`."""
    kept: list[str] = []
    lost: list[str] = []
    for char in text:
        spelling = _spelling(char, letters)
        if spelling is None:
            lost.append(char)
            continue
        if lost:
            skipped["".join(lost)] = None
            kept.append(" ")
            lost.clear()
        kept.append(spelling)
    if lost:
        skipped["".join(lost)] = None
    return "".join(kept)


def _spelling(char: str, letters: frozenset[str]) -> str | None:
    if _voiceable(char, letters):
        return char
    digit = unicodedata.digit(char, None)
    if digit is not None:
        return str(digit)
    parts = "".join(part for part in unicodedata.normalize("NFKD", char) if not unicodedata.combining(part))
    return parts if parts.strip() and all(_voiceable(part, letters) for part in parts) else None


def _voiceable(char: str, letters: frozenset[str]) -> bool:
    if char.isascii() and (char.isalnum() or char.isspace()):
        return True
    if char in _SYMBOLS or char in _TYPOGRAPHIC:
        return True
    if char in letters:
        # The net has met letters of other scripts, but does not read their words; one that is two in lower case upsets it.
        return unicodedata.name(char, "").startswith("LATIN") and len(char.lower()) == 1
    return unicodedata.category(char) in ("Ps", "Pe", "Pi", "Pf", "Pd", "Pc") or (
        unicodedata.category(char) == "Po" and char not in "*\\"
    )


def _shorten_runs(text: str) -> str:
    """Put a space into runs that the front end would cut off (letters), not know (digits) or take long over (anything)."""
    text = re.sub(rf"([^\W\d_]{{{_LONGEST_LETTERS}}})(?=[^\W\d_])", r"\1 ", text)
    text = re.sub(rf"((?:\d[,.]?){{{_LONGEST_NUMBER}}})(?=\d)", r"\1 ", text)
    text = re.sub(rf"((?:[^\W\d_]++|\d++|[^\w\s]|_){{{_MOST_PARTS}}})(?=\S)", r"\1 ", text)
    return re.sub(rf"(\S{{{_LONGEST_RUN}}})(?=\S)", _break_run, text)


def _break_run(run: re.Match[str]) -> str:
    chunk = run.group(1)
    safe = max((place for place, char in enumerate(chunk[:-1], 1) if not char.isalnum()), default=len(chunk))
    return f"{chunk[:safe]} {chunk[safe:]}"


def _known(word: Word, ids: Mapping[str, int]) -> Word:
    """The word with the sounds that the model has."""
    return Word(word.text, "".join(sound for sound in word.sounds if sound in ids), word.spaced)


def _silent(words: Sequence[Word]) -> Iterable[str]:
    """Words with letters, digits or signs in them of which nothing will be heard."""
    for place, word in enumerate(words):
        if any(sound not in _UNSOUNDED for sound in word.sounds):
            continue
        following = words[place + 1].text[:1] if place + 1 < len(words) and not word.spaced else ""
        if word.text in _CURRENCIES and following.isdigit():
            continue  # read with the amount after it
        if any(
            char.isalnum() or unicodedata.category(char) in ("Sc", "Sm", "So") for char in word.text if char not in _TYPOGRAPHIC
        ):
            yield word.text


def _runs(words: Sequence[Word]) -> Iterable[list[Word]]:
    """Cut a sentence into runs of at most 400 tokens: after a clause if it is past the middle, else between words."""
    run: list[Word] = []
    size = 0
    for word in _pieces(words):
        length = len(word.sounds) + word.spaced
        if run and size + length > MAX_TOKENS:
            cut = _cut(run)
            yield run[:cut]
            run = run[cut:]
            size = sum(len(kept.sounds) + kept.spaced for kept in run)
        run.append(word)
        size += length
    if run:
        yield run


def _pieces(words: Sequence[Word]) -> Iterable[Word]:
    """Words longer than a whole run, cut."""
    for word in words:
        for start in range(0, max(len(word.sounds), 1), MAX_TOKENS - 1):
            sounds = word.sounds[start : start + MAX_TOKENS - 1]
            yield Word(word.text, sounds, word.spaced and start + MAX_TOKENS - 1 >= len(word.sounds))


def _cut(run: Sequence[Word]) -> int:
    clauses = [place for place, word in enumerate(run, 1) if word.sounds[-1:] in _CLAUSE_ENDS]
    if clauses and clauses[-1] > len(run) // 2:
        return clauses[-1]
    spaces = [place for place, word in enumerate(run, 1) if word.spaced]
    return spaces[-1] if spaces and spaces[-1] > len(run) // 2 else len(run)
