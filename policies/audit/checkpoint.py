"""Signed tree heads: C2SP tlog-checkpoint in a C2SP signed-note, Ed25519 (signature type 0x01).

Reading and checking stand in `verify.py`; here is the signing, through a callable, so that the key stays in its token.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from policies.audit.errors import SigningFailed
from policies.audit.verify import MAX_LINE, Successor, VerifierKey, check_checkpoint, hand_over_text, is_key_name, successors

Sign = Callable[[bytes], bytes]
"""Ed25519 (RFC 8032) over exactly these bytes: 64 bytes."""

_ED25519_SPKI = bytes.fromhex("302a300506032b6570032100")


def verifier_key(origin: str, spki: bytes) -> VerifierKey:
    """The log's name and key, from SubjectPublicKeyInfo in DER (RFC 8410). Raises ValueError for another kind of key."""
    if not is_key_name(origin):
        raise ValueError("an origin holds no space, plus or control character, e.g. voice.example/audit")
    if len(spki) != 44 or not spki.startswith(_ED25519_SPKI):
        raise ValueError("the checkpoint key is not Ed25519")
    return VerifierKey(origin, spki[len(_ED25519_SPKI) :])


def sign_checkpoint(size: int, root: bytes, key: VerifierKey, sign: Sign, handed: Sequence[str] = ()) -> str:
    """A note over this tree head, checked before it is returned. Raises SigningFailed if the token signed wrongly.

    `key` is the log's first; `handed` are the lines of every hand-over since, after which `sign` is the last key's.
    """
    text = "".join(f"{line}\n" for line in (key.name, size, base64.b64encode(root).decode(), *handed))
    try:
        signer = newest_key(key, handed)
        signature = base64.b64encode(signer.id + sign(text.encode())).decode()
        note = f"{text}\n— {signer.name} {signature}\n"
        check_checkpoint(note, key)
    except ValueError as error:
        raise SigningFailed(str(error)) from error
    return note


def hand_over(key: VerifierKey, size: int, sign: Sign) -> str:
    """The line that hands over to `key`; `sign` is the key's before it, which signs nothing larger than `size` after that."""
    following = Successor(key, size)
    return f"hand-over {size} {key.text} {base64.b64encode(sign(hand_over_text(following))).decode()}"


def newest_key(first: VerifierKey, handed: Sequence[str]) -> VerifierKey:
    """The key that signs after these hand-overs. Raises ValueError where one does not hold."""
    lines = "".join(f"{line}\n" for line in (first.name, 0, "", *handed))
    chain = successors(lines.encode(), first)
    if len(chain) != len(handed):
        raise ValueError("a line is no hand-over")
    return chain[-1].key if chain else first


class HandOvers:
    """The lines of every hand-over, in a file of the log process's own beside its newest checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[str, ...]:
        """In order; none before the first. Raises OSError."""
        return tuple(self._path.read_text().splitlines()) if self._path.exists() else ()

    def add(self, line: str) -> None:
        """Durable on return, and whole after a crash at any moment. Raises OSError."""
        _replace(self._path, "".join(f"{one}\n" for one in (*self.read(), line)).encode())


class LastCheckpoint:
    """The newest checkpoint in a file of the log process's own, outside the database: a restored database is noticed by it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        """The note, or None before the first. Raises OSError."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            return file.read(MAX_LINE).decode("utf-8", "replace")

    def write(self, note: str) -> None:
        """Replace it; durable on return, and whole after a crash at any moment. Raises OSError."""
        _replace(self._path, note.encode())


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
