"""What hears digits, inside the jail: samples in, digits out. The only file that loads the recogniser (`pocketsphinx`).

Started fresh for each recording by `digits.py`, reads 16-bit samples (little-endian, mono, 16 kHz) from standard input and
answers one line on standard output: `ok DIGITS`, or `refused jail`. The acoustic model ships with the recogniser and is loaded
before the jail closes; nothing is written anywhere, and nothing is logged. The grammar is so many digits and nothing else, so it
hears that many in anything: whoever asks compares what was heard with what had to be said. To know how many there must be keeps
a breath at the end from becoming one more.
"""

from __future__ import annotations

import os
import sys

from pocketsphinx import Decoder, get_model_path

from voiceprints.jail import JailUnavailable, confine

_RATE = 16_000
# The words in the phones (ARPAbet) of the model. Who reads 0 says "zero" or "oh".
_WORDS = {
    "zero": ("0", ("Z IH R OW", "Z IY R OW")),
    "oh": ("0", ("OW",)),
    "one": ("1", ("W AH N", "HH W AH N")),
    "two": ("2", ("T UW",)),
    "three": ("3", ("TH R IY",)),
    "four": ("4", ("F AO R",)),
    "five": ("5", ("F AY V",)),
    "six": ("6", ("S IH K S",)),
    "seven": ("7", ("S EH V AH N",)),
    "eight": ("8", ("EY T",)),
    "nine": ("9", ("N AY N",)),
}


def main() -> None:
    """Load the model, confine this process, then listen to standard input. Ends through `os._exit`."""
    count, memory_bytes, cpu_seconds = (int(argument) for argument in sys.argv[-3:])
    decoder = recogniser(count)
    heard(decoder, bytes(_RATE))  # half a second of silence: what is loaded late is loaded now
    try:
        confine(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds)
        answer = f"ok {heard(decoder, _read_all())}\n"
    except JailUnavailable:
        answer = "refused jail\n"
    os.write(1, answer.encode())
    os._exit(0)


def recogniser(count: int) -> Decoder:
    """A decoder that hears `count` digits."""
    decoder = Decoder(hmm=get_model_path("en-us/en-us"), lm=None, dict=None, loglevel="FATAL")
    for word, (_, pronunciations) in _WORDS.items():
        for number, phones in enumerate(pronunciations, 1):
            decoder.add_word(word if number == 1 else f"{word}({number})", phones, number == len(pronunciations))
    digits = " ".join(["<digit>"] * count)
    decoder.add_jsgf_string("digits", f"#JSGF V1.0; grammar d; public <digits> = {digits}; <digit> = {' | '.join(_WORDS)};")
    decoder.activate_search("digits")
    return decoder


def heard(decoder: Decoder, pcm: bytes) -> str:
    """The digits heard in these samples, in order; empty where the grammar fits nothing."""
    decoder.start_utt()
    decoder.process_raw(pcm, full_utt=True)
    decoder.end_utt()
    found = decoder.hyp()
    return "" if found is None else "".join(_WORDS[word][0] for word in found.hypstr.split())


def _read_all() -> bytes:
    parts = []
    while part := os.read(0, 1 << 20):
        parts.append(part)
    return b"".join(parts)
