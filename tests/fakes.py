"""Working fakes: each passes the contract tests of the real part (`tests/contract/`)."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.cmac import CMAC
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from keyvault.errors import CeremonyRefused, HsmUnavailable, KeyNotFound, MasterMissing, PromiseBroken, SealBroken, UnwrapRejected
from keyvault.hsm import VERSIONED, Canary, Figures, KeyName, NewDek, OpenDek, RingMaster, Sealed
from keyvault.locked import LockedBuffer

_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ATTRIBUTES = ("EXTRACTABLE=0", "MODIFIABLE=0", "SENSITIVE=1", "TRUSTED=1")
_SIGNERS = (
    *(KeyName.TOKEN_SIGNER, KeyName.PROVENANCE_SIGNER, KeyName.SITE_IDENTITY),
    *(KeyName.CERTIFICATE_AUTHORITY, KeyName.CHECKPOINT_SIGNER),
)


class FakeHsm:
    """A `SiteHsm` in software, for faults that a real token cannot be made to show: set `fault`, and every call raises it."""

    def __init__(self, masters: Sequence[RingMaster] = (RingMaster("main", 1),)) -> None:
        self._token = {master: os.urandom(32) for master in sorted(masters)}
        self._serving = tuple(sorted(masters))
        self._anchors: tuple[bytes, ...] = ()
        self._secrets = {name: os.urandom(32) for name in (KeyName.RECORD_MAC, KeyName.AUDIT_PSEUDONYM, KeyName.AUDIT_DETAIL)}
        self._signers: dict[tuple[KeyName, int], ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey] = {
            (name, 1): _new_pair(name) for name in _SIGNERS
        }
        self._closed = False
        self.fault: Exception | None = None
        self.figures = Figures()
        self.unwraps = 0

    def masters(self) -> tuple[RingMaster, ...]:
        return self._serving

    @contextmanager
    def new_dek(self, master: RingMaster) -> Iterator[NewDek]:
        key = AESGCM.generate_key(256)
        yield _FakeNewDek(key, aes_key_wrap(self._master(master), key))

    @contextmanager
    def open_dek(self, master: RingMaster, wrapped: bytes) -> Iterator[OpenDek]:
        yield _FakeOpenDek(self._unwrap(self._master(master), wrapped))

    def open_recorded(
        self, master: RingMaster, wrapped: bytes, sealed: Sequence[Sealed], record: bytes, permit: Callable[[bytes], None]
    ) -> None:
        places = [part.target.view(part.offset, part.offset + _length_of(part)) for part in sealed]
        try:
            permit(self.mac(KeyName.RECORD_MAC, record))
            dek = _FakeOpenDek(self._unwrap(self._master(master), wrapped))
            for part in sealed:
                dek.open_into(part.data, part.aad, part.target, part.offset)
        except BaseException:
            for place in places:
                place.fill(0)
            raise

    def rewrap(self, wrapped: bytes, source: RingMaster, target: RingMaster) -> bytes:
        return aes_key_wrap(self._master(target), self._unwrap(self._master(source), wrapped))

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        moved: list[bytes | UnwrapRejected] = []
        for blob in wrapped:
            try:
                moved.append(self.rewrap(blob, source, target))
            except UnwrapRejected as error:
                moved.append(error)
        return moved

    def mac(self, key: KeyName, data: bytes) -> bytes:
        self._answer()
        if key is KeyName.RECORD_MAC:
            return _cmac(self._secrets[key], data)
        if key is KeyName.AUDIT_PSEUDONYM:
            return hmac.new(self._secrets[key], data, hashlib.sha256).digest()
        raise KeyNotFound(f"{key} is not a key for this")

    def mac_many(self, key: KeyName, data: Sequence[bytes]) -> list[bytes]:
        return [self.mac(key, one) for one in data]

    def sign(self, key: KeyName, data: bytes, version: int = 1) -> bytes:
        self._answer()
        pair = self._signers.get((key, version))
        if pair is None:
            raise KeyNotFound(f"{key} is not a key for this")
        if isinstance(pair, ed25519.Ed25519PrivateKey):
            return pair.sign(data)
        r, s = decode_dss_signature(pair.sign(data, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + min(s, _P256_ORDER - s).to_bytes(32, "big")

    def public_key(self, key: KeyName, version: int = 1) -> bytes:
        self._answer()
        if (key, version) not in self._signers:
            raise KeyNotFound(f"{key} has no public half")
        return self._signers[key, version].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def seal(self, key: KeyName, plaintext: bytes, aad: bytes) -> bytes:
        if not plaintext:
            raise ValueError("nothing to seal")
        nonce = os.urandom(12)
        return nonce + AESGCM(self._sealing(key)).encrypt(nonce, plaintext, aad)

    def unseal(self, key: KeyName, sealed: bytes, aad: bytes) -> bytes:
        return _decrypt(self._sealing(key), sealed, aad)

    def random(self, length: int) -> bytes:
        self._answer()
        return os.urandom(length)

    def held(self) -> dict[str, tuple[str, ...]]:
        self._answer()
        return {master.label: ATTRIBUTES for master in self._token}

    def refresh(self, allowed: Sequence[RingMaster], required: Sequence[RingMaster]) -> None:
        self._answer()
        beyond, missing = set(self._token) - set(allowed), set(required) - set(self._token)
        if beyond:
            raise PromiseBroken(f"TRUSTED objects that nobody allowed: {sorted(master.label for master in beyond)}")
        if missing:
            raise MasterMissing(f"the token does not hold {sorted(master.label for master in missing)}")
        self._serving = tuple(sorted(self._token))

    @contextmanager
    def new_canary(self, master: RingMaster) -> Iterator[Canary]:
        key = AESGCM.generate_key(256)
        yield _FakeCanary(self, key, aes_key_wrap(self._master(master), key))

    @contextmanager
    def open_canary(self, master: RingMaster, blob: bytes) -> Iterator[Canary]:
        yield _FakeCanary(self, self._unwrap(self._master(master), blob), blob)

    def dek_mac(self, master: RingMaster, wrapped: bytes, data: bytes) -> bytes:
        return _cmac(self._unwrap(self._master(master), wrapped), data)

    def anchors(self) -> tuple[bytes, ...]:
        self._answer()
        return self._anchors

    def replace_anchors(self, anchor: bytes) -> None:
        self._answer()
        self._anchors = (anchor,)

    def signer_versions(self, key: KeyName) -> tuple[int, ...]:
        self._answer()
        return tuple(sorted(version for name, version in self._signers if name is key))

    def make_signer(self, key: KeyName, version: int) -> bytes:
        self._answer()
        if key not in VERSIONED or version < 2:
            raise ValueError(f"{key} has no version {version} to be made")
        if (key, version) in self._signers:
            raise CeremonyRefused(f"the token already holds {key} {version}")
        self._signers[key, version] = _new_pair(key)
        return self.public_key(key, version)

    def destroy_signer(self, key: KeyName, version: int) -> None:
        self._answer()
        self._signers.pop((key, version), None)

    def destroy_master(self, master: RingMaster) -> None:
        self._answer()
        self.forget(master)

    def close(self) -> None:
        self._closed = True

    def install(self, master: RingMaster, key: bytes | None = None) -> bytes:
        """Put a master into the token, as officers do; it serves after `refresh`. Returns its key, for the other site's fake."""
        self._token[master] = key or os.urandom(32)
        return self._token[master]

    def twin(self) -> FakeHsm:
        """Another site's token: the same masters, every other key its own."""
        other = FakeHsm(self._serving)
        other._token = dict(self._token)
        return other

    def forget(self, master: RingMaster) -> None:
        """Lose a master, as a token that was restored from an older state does."""
        self._token.pop(master, None)
        self._serving = tuple(served for served in self._serving if served != master)

    def plant_anchor(self, anchor: bytes) -> None:
        """One more anchor object, as a crash between writing the new one and destroying the old one leaves it."""
        self._anchors += (anchor,)

    def _answer(self) -> None:
        if self.fault is not None:
            raise self.fault
        if self._closed:
            raise HsmUnavailable("closed")

    def _master(self, master: RingMaster) -> bytes:
        self._answer()
        if master not in self._serving:
            raise KeyNotFound(f"this token does not serve {master.label}")
        return self._token[master]

    def _unwrap(self, wrapping: bytes, wrapped: bytes) -> bytes:
        self.unwraps += 1
        try:
            return aes_key_unwrap(wrapping, wrapped)
        except (InvalidUnwrap, ValueError) as error:
            raise UnwrapRejected() from error

    def _sealing(self, key: KeyName) -> bytes:
        self._answer()
        if key is not KeyName.AUDIT_DETAIL:
            raise KeyNotFound(f"{key} is not a key for this")
        return self._secrets[key]


@dataclass(frozen=True)
class _FakeNewDek:
    _key: bytes
    wrapped: bytes

    def seal(self, plaintext: LockedBuffer, length: int, aad: bytes) -> bytes:
        if not 0 < length <= plaintext.size:
            raise ValueError(f"cannot seal {length} bytes of {plaintext!r}")
        nonce = os.urandom(12)
        return nonce + AESGCM(self._key).encrypt(nonce, plaintext.view(0, length).tobytes(), aad)


@dataclass(frozen=True)
class _FakeCanary:
    _hsm: FakeHsm
    _key: bytes
    blob: bytes

    def mac(self, data: bytes) -> bytes:
        self._hsm._answer()
        return _cmac(self._key, data)


@dataclass(frozen=True)
class _FakeOpenDek:
    _key: bytes

    def open_into(self, sealed: bytes, aad: bytes, target: LockedBuffer, offset: int = 0) -> int:
        length = _length_of(Sealed(sealed, aad, target, offset))
        ctypes.memset(target.address + offset, 0, length)
        plain = _decrypt(self._key, sealed, aad)
        ctypes.memmove(target.address + offset, plain, length)
        return length


def _length_of(part: Sealed) -> int:
    length = len(part.data) - 28
    if length <= 0:
        raise SealBroken("sealed data is too short")
    if part.offset < 0 or part.offset + length > part.target.size:
        raise ValueError(f"{length} bytes do not fit at {part.offset} of {part.target!r}")
    return length


def _new_pair(name: KeyName) -> ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate() if name is KeyName.CHECKPOINT_SIGNER else ec.generate_private_key(ec.SECP256R1())


def _cmac(key: bytes, data: bytes) -> bytes:
    cmac = CMAC(AES(key))
    cmac.update(data)
    return cmac.finalize()


def _decrypt(key: bytes, sealed: bytes, aad: bytes) -> bytes:
    if len(sealed) <= 28:
        raise SealBroken("sealed data is too short")
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], aad)
    except InvalidTag as error:
        raise SealBroken() from error
