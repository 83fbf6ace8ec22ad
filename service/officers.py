"""Officers' own signing keys: P-256 key files on the officer's console, and how people compare what they sign.

A key file is PKCS #8 in PEM, readable by its owner alone, with a passphrase or, for development, without one. It never
lies on a serving host: signatures are carried there as files. The roster says which person a public key belongs to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keyvault.sync.errors import StatementMalformed
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import low_s
from service.errors import OfficerKeyRefused, RosterUnreadable

Passphrase = Callable[[], str]
"""Asks for the passphrase when the key file turns out to need one."""


class OfficerKey:
    """One officer's key, in memory for the length of a command. Calling it signs, as `keyvault.sync.signatures.Sign` says."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path, passphrase: Passphrase) -> Self:
        """Read a key file. Raises OfficerKeyRefused where it is missing, open to others, another kind, or stays shut."""
        try:
            with path.open("rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise OfficerKeyRefused(f"{path} may be read by other users")
                data = file.read(1 << 16)
        except OSError as error:
            raise OfficerKeyRefused(f"{path} cannot be read: {error.strerror}") from error
        return cls(_p256(path, data, passphrase))

    @property
    def public(self) -> bytes:
        """SubjectPublicKeyInfo, DER: what the roster names."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self._key.public_key().public_bytes(serialization.Encoding.DER, form)

    def __call__(self, data: bytes) -> bytes:
        return low_s(self._key.sign(data, ec.ECDSA(hashes.SHA256())))


def new_key(path: Path, passphrase: str | None) -> OfficerKey:
    """Make a key file (0600), which must not exist yet. Raises OfficerKeyRefused."""
    key = ec.generate_private_key(ec.SECP256R1())
    sealing: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        sealing = serialization.BestAvailableEncryption(passphrase.encode())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealing)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise OfficerKeyRefused(f"{path} exists: a key is never replaced", fix="Name a new file.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(descriptor)
    return OfficerKey(key)


def fingerprint(data: bytes) -> str:
    """The first 128 bits of a SHA-256 in groups to read aloud: enough that nobody makes a second message to match."""
    return grouped(sha256(data).digest())


def grouped(digest: bytes) -> str:
    """The same of a digest that is known already."""
    return " ".join(digest.hex()[at : at + 4] for at in range(0, 32, 4))


def person_of(key: OfficerKey, roster: Roster) -> str:
    """Whose key this is. Raises OfficerKeyRefused where the roster names it for nobody."""
    for officer in roster.officers:
        if key.public in officer.keys:
            return officer.person
    raise OfficerKeyRefused(
        f"the roster names nobody with the key {fingerprint(key.public)}",
        fix="Use the key that the roster names for you; `glottis officers list` shows every fingerprint.",
    )


def read_roster(path: Path) -> Roster:
    """The roster of a file. Raises RosterUnreadable."""
    try:
        return Roster.decode(path.read_bytes())
    except OSError as error:
        raise RosterUnreadable(f"{path} cannot be read: {error.strerror}") from error
    except StatementMalformed as error:
        raise RosterUnreadable(f"{path} is no roster: {error}") from error


def _p256(path: Path, data: bytes, passphrase: Passphrase) -> ec.EllipticCurvePrivateKey:
    try:
        try:
            key = serialization.load_pem_private_key(data, None)
        except TypeError:  # the library's word for: it has a passphrase
            key = serialization.load_pem_private_key(data, passphrase().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise OfficerKeyRefused(f"{path} does not open as a private key: wrong passphrase, or no PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise OfficerKeyRefused(f"{path} holds another kind of key than P-256")
    return key
