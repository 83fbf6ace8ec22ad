"""Signed tree heads: C2SP tlog-checkpoint in a C2SP signed-note, Ed25519 (signature type 0x01).

Reading and checking stand in `verify.py`; here is the signing, through a callable, so that the key stays in its token.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path

from policies.audit.errors import SigningFailed
from policies.audit.verify import MAX_LINE, VerifierKey, check_checkpoint, is_key_name

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


def sign_checkpoint(size: int, root: bytes, key: VerifierKey, sign: Sign) -> str:
    """A note over this tree head, checked before it is returned. Raises SigningFailed if the token signed wrongly."""
    text = f"{key.name}\n{size}\n{base64.b64encode(root).decode()}\n"
    signature = base64.b64encode(key.id + sign(text.encode())).decode()
    note = f"{text}\n— {key.name} {signature}\n"
    try:
        check_checkpoint(note, key)
    except ValueError as error:
        raise SigningFailed(str(error)) from error
    return note


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
        fresh = self._path.with_name(self._path.name + ".new")
        with fresh.open("wb") as file:
            file.write(note.encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
