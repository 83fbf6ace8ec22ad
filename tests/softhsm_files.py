"""A DEK's bytes computed outside any token, from SoftHSM's files and the user PIN: what a memory scan looks for.

This is also the proof of what SoftHSM is not: PIN and files give away every key (`docs/threat-model.md`). Formats read from
SoftHSM 2.6.1: object files are big-endian records; private values are IV | AES-256-CBC under the token's key, which lies in
`token.object` under a key derived from the PIN by RFC 4880's iterated hash (1500 + last salt byte rounds of SHA-256).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from cryptography.hazmat.primitives.padding import PKCS7

LABEL, VALUE, USER_PIN = 0x003, 0x011, 0x80000000 + 0x5348 + 5
_BOOLEAN, _NUMBER, _BYTES, _TEMPLATE, _MECHANISMS = 1, 2, 3, 4, 5
_MAGIC = b"RJR"


def dek_bytes(token_folder: Path, user_pin: str, wrapped_blob: bytes, master_label: str) -> bytes:
    """The 32 bytes of a wrapped DEK. Raises LookupError if the folder holds no such master or the PIN is another."""
    return aes_key_unwrap(master_bytes(token_folder, user_pin, master_label), wrapped_blob)


def master_bytes(token_folder: Path, user_pin: str, master_label: str) -> bytes:
    """The 32 bytes of a ring master. Raises LookupError as `dek_bytes` does."""
    key = _token_key(token_folder, user_pin)
    for path in sorted(token_folder.rglob("*.object")):
        found = dict(attributes(path.read_bytes()))
        if path.name == "token.object" or not found.get(LABEL) or not found.get(VALUE):
            continue
        if _decrypt(key, found[LABEL]) == master_label.encode():
            return _decrypt(key, found[VALUE])
    raise LookupError(f"no {master_label} in {token_folder}")


def _token_key(token_folder: Path, user_pin: str) -> bytes:
    token = next(token_folder.rglob("token.object"))
    blob = dict(attributes(token.read_bytes()))[USER_PIN]
    salt, sealed = blob[:8], blob[8:]
    derived = hashlib.sha256(salt + user_pin.encode()).digest()
    for _ in range(1500 + salt[-1] - 1):
        derived = hashlib.sha256(derived).digest()
    plain = _decrypt(derived, sealed)
    if not plain.startswith(_MAGIC):
        raise LookupError("the PIN does not open this token")
    return plain[len(_MAGIC) :]


def _decrypt(key: bytes, sealed: bytes) -> bytes:
    decryptor = Cipher(algorithms.AES(key), modes.CBC(sealed[:16])).decryptor()
    remover = PKCS7(128).unpadder()
    return remover.update(decryptor.update(sealed[16:]) + decryptor.finalize()) + remover.finalize()


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every byte-string attribute of an object file; the others are passed over."""
    at = 8  # the generation number

    def number() -> int:
        nonlocal at
        at += 8
        return int.from_bytes(data[at - 8 : at], "big")

    while at < len(data):
        name, kind = number(), number()
        if kind == _BOOLEAN:
            at += 1
        elif kind == _NUMBER:
            at += 8
        elif kind == _MECHANISMS:
            count = number()
            at += 8 * count
        elif kind in (_BYTES, _TEMPLATE):
            length = number()
            if kind == _BYTES:
                yield name, data[at : at + length]
            at += length
        else:
            raise LookupError(f"attribute kind {kind} is none of SoftHSM 2.6.1's")
