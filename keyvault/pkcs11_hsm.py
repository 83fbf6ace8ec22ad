"""`Hsm` over PKCS#11: keys are named, borrowed sessions do the work, plaintext passes by pointer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from keyvault.errors import CallFailed, HsmUnavailable, KeyNotFound, SealBroken, UnwrapRejected
from keyvault.hsm import KeyName, NewDek, OpenDek, RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_names import LOST_KEY, LOST_SESSION, Answer, Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_raw import GCM_NONCE, GCM_TAG, Template
from keyvault.pkcs11_start import Module, Token, TokenConfig, TokenSession, starting_alone
from keyvault.refusals import audit, probe
from keyvault.templates import DEK_OPENING, DEK_REWRAPPING, DEK_SEALING, KEYS, KeyPlan

# SubjectPublicKeyInfo up to the key itself: RFC 5480 (P-256, uncompressed point) and RFC 8410 (Ed25519).
_SPKI_P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")
_SPKI_ED25519 = bytes.fromhex("302a300506032b6570032100")
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Pkcs11Hsm:
    """One token behind the `Hsm` protocol. Made by `open`; methods may be called from any thread of this process."""

    def __init__(self, token: Token, masters: tuple[RingMaster, ...], names: frozenset[str]) -> None:
        self._token = token
        self._masters = masters
        self._names = names

    @classmethod
    def open(cls, config: TokenConfig, pin: str, *, expected_masters: Sequence[RingMaster]) -> Pkcs11Hsm:
        """Start the module, log in once, audit the token and probe what must be refused.

        Raises HsmUnavailable, PinRejected, and PromiseBroken where the token holds another TRUSTED object than
        `expected_masters`, two keys under one name, or allows what a template forbids. The module is stopped then.
        """
        with starting_alone(config.folder):
            module = Module(config.module, config.folder)
            try:
                token = Token(module, config, pin)
                masters = tuple(sorted(expected_masters))
                session = token.open_session()
                names = audit(session, masters)
                for master in masters:
                    probe(session, master)
                session.close()
            except BaseException:
                module.stop()
                raise
        return cls(token, masters, names)

    def masters(self) -> tuple[RingMaster, ...]:
        return self._masters

    @contextmanager
    def new_dek(self, master: RingMaster) -> Iterator[NewDek]:
        self._require(master)

        def make(session: TokenSession) -> tuple[int, bytes]:
            key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
            try:
                return key, session.calls.wrap(session.handle, _master(session, master), key)
            except CallFailed:
                session.calls.destroy(session.handle, key)
                raise

        key, wrapped = self._token.run(make)
        try:
            yield _NewDek(self._token, key, wrapped)
        finally:
            _destroy(self._token, key)

    @contextmanager
    def open_dek(self, master: RingMaster, wrapped: bytes, check: Callable[[], None] | None = None) -> Iterator[OpenDek]:
        self._require(master)

        def unwrap(session: TokenSession) -> int:
            wrapping = _master(session, master)
            if check is not None:
                check()
            return _unwrap(session, wrapping, wrapped, DEK_OPENING)

        key = self._token.run(unwrap)
        try:
            yield _OpenDek(self._token, key)
        finally:
            _destroy(self._token, key)

    def rewrap(self, wrapped: bytes, source: RingMaster, target: RingMaster) -> bytes:
        self._require(source)
        self._require(target)

        def move(session: TokenSession) -> bytes:
            key = _unwrap(session, _master(session, source), wrapped, DEK_REWRAPPING)
            try:
                return session.calls.wrap(session.handle, _master(session, target), key)
            finally:
                session.calls.destroy(session.handle, key)

        return self._token.run(move)

    def mac(self, key: KeyName, data: bytes) -> bytes:
        return self._sign(key, data, Mechanism.AES_CMAC, Mechanism.SHA256_HMAC)

    def sign(self, key: KeyName, data: bytes) -> bytes:
        if KEYS[key].mechanism is Mechanism.ECDSA:
            return _low_s(self._sign(key, hashlib.sha256(data).digest(), Mechanism.ECDSA))
        return self._sign(key, data, Mechanism.EDDSA)

    def _sign(self, name: KeyName, data: bytes, *mechanisms: Mechanism) -> bytes:
        plan = self._plan(name, *mechanisms)
        return self._token.run(
            lambda session: session.calls.sign(session.handle, _known(session, name.value, plan.kind), plan.mechanism, data)
        )

    def public_key(self, key: KeyName) -> bytes:
        self._plan(key, Mechanism.ECDSA, Mechanism.EDDSA)
        return self._token.run(lambda session: public_key(session, key))

    def seal(self, key: KeyName, plaintext: bytes, aad: bytes) -> bytes:
        self._plan(key, Mechanism.AES_GCM)
        if not plaintext:
            raise ValueError("nothing to seal")
        source = ctypes.c_char_p(plaintext)
        address = ctypes.cast(source, ctypes.c_void_p).value or 0
        return self._token.run(
            lambda session: _seal(session, _known(session, key.value), aad, address, len(plaintext)),
        )

    def unseal(self, key: KeyName, sealed: bytes, aad: bytes) -> bytes:
        self._plan(key, Mechanism.AES_GCM)
        length = len(sealed) - GCM_NONCE - GCM_TAG
        if length <= 0:
            raise SealBroken("sealed data is too short")
        target = (ctypes.c_ubyte * length)()
        address = ctypes.addressof(target)
        self._token.run(lambda session: _open(session, _known(session, key.value), sealed, aad, address, length))
        return bytes(target)

    def random(self, length: int) -> bytes:
        return self._token.run(lambda session: session.calls.random(session.handle, length))

    def close(self) -> None:
        self._token.close()

    def _plan(self, name: KeyName, *mechanisms: Mechanism) -> KeyPlan:
        plan = KEYS[name]
        if plan.mechanism not in mechanisms:
            raise KeyNotFound(f"{name} is not a key for this")
        if name.value not in self._names:
            raise KeyNotFound(f"this token holds no key {name}")
        return plan

    def _require(self, master: RingMaster) -> None:
        if master not in self._masters:
            raise KeyNotFound(f"this token does not serve {master.label}")


class _NewDek:
    """`NewDek` over a session object's handle."""

    def __init__(self, token: Token, key: int, wrapped: bytes) -> None:
        self._token = token
        self._key = key
        self.wrapped = wrapped

    def seal(self, plaintext: LockedBuffer, length: int, aad: bytes) -> bytes:
        if not 0 < length <= plaintext.size:
            raise ValueError(f"cannot seal {length} bytes of {plaintext!r}")
        return self._token.run(lambda session: _seal(session, self._key, aad, plaintext.address, length))


class _OpenDek:
    """`OpenDek` over a session object's handle."""

    def __init__(self, token: Token, key: int) -> None:
        self._token = token
        self._key = key

    def open_into(self, sealed: bytes, aad: bytes, target: LockedBuffer, offset: int = 0) -> int:
        length = len(sealed) - GCM_NONCE - GCM_TAG
        if length <= 0:
            raise SealBroken("sealed data is too short")
        if offset < 0 or offset + length > target.size:
            raise ValueError(f"{length} bytes do not fit at {offset} of {target!r}")
        self._token.run(lambda session: _open(session, self._key, sealed, aad, target.address + offset, length))
        return length


def public_key(session: TokenSession, name: KeyName) -> bytes:
    """SubjectPublicKeyInfo (DER) of a signing key's public half. Raises KeyNotFound."""
    key = session.key(name.value, ObjectClass.PUBLIC_KEY)
    point = session.calls.read(session.handle, key, Attribute.EC_POINT)[2:]  # an OCTET STRING of under 128 bytes
    return (_SPKI_ED25519 if KEYS[name].mechanism is Mechanism.EDDSA else _SPKI_P256) + point


def _known(session: TokenSession, label: str, kind: ObjectClass = ObjectClass.SECRET_KEY, *, trusted: bool = False) -> int:
    """The key of this name, which was there at start: that it is gone is the token's fault, not the caller's."""
    try:
        return session.key(label, kind, trusted=trusted)
    except KeyNotFound as error:
        raise HsmUnavailable(f"{label} was in the token at start and is gone") from error


def _master(session: TokenSession, master: RingMaster) -> int:
    return _known(session, master.label, trusted=True)


def _unwrap(session: TokenSession, wrapping: int, wrapped: bytes, template: Template) -> int:
    try:
        return session.calls.unwrap(session.handle, wrapping, wrapped, template)
    except CallFailed as error:
        if error.answer in LOST_SESSION | LOST_KEY:
            raise
        raise UnwrapRejected(f"the token refused to unwrap: {error.answer}") from error


def _seal(session: TokenSession, key: int, aad: bytes, address: int, length: int) -> bytes:
    # Random nonces: one key seals few rows, far from the 2^32 of SP 800-38D section 8.3.
    nonce = session.calls.random(session.handle, GCM_NONCE)
    return nonce + session.calls.encrypt(session.handle, key, nonce, aad, address, length)


def _open(session: TokenSession, key: int, sealed: bytes, aad: bytes, address: int, length: int) -> None:
    """Decrypt `length` bytes to `address`; zeros stand there after any failure.

    Modules may want room for the tag too (SoftHSM does) and own all of the room they are given, so they get a locked page of
    their own, overwritten at once, and nothing is ever written beside the caller's range.
    """
    ctypes.memset(address, 0, length)
    nonce, body, room = sealed[:GCM_NONCE], sealed[GCM_NONCE:], length + GCM_TAG
    with LockedBuffer(room) as page:
        try:
            opened = session.calls.decrypt(session.handle, key, nonce, aad, body, page.address, room)
        except CallFailed as error:
            if error.function != "C_Decrypt" or error.answer in LOST_SESSION | LOST_KEY:
                raise
            # SoftHSM says GENERAL_ERROR for a wrong tag, so a module's fault here reads as broken data: closed either way.
            raise SealBroken() from error
        if opened != length:
            raise SealBroken(f"{opened} bytes came out of {length}")
        ctypes.memmove(address, page.address, length)


def _destroy(token: Token, key: int) -> None:
    def destroy(session: TokenSession) -> None:
        try:
            session.calls.destroy(session.handle, key)
        except CallFailed as error:
            if error.answer != Answer.OBJECT_HANDLE_INVALID.name:  # gone already, with the session that made it
                raise

    token.run(destroy)


def _low_s(signature: bytes) -> bytes:
    """The one of the two valid signatures whose s is in the lower half, so that a signature cannot be varied by others."""
    s = int.from_bytes(signature[32:], "big")
    return signature[:32] + min(s, _P256_ORDER - s).to_bytes(32, "big")
