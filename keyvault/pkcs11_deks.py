"""Keys that live for one `with` block: a voice's DEK, sealing or opening, and the canary that two sites compare.

Each is a session object of the token. Functions here work on a borrowed session; plaintext passes by pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from keyvault.errors import CallFailed, HsmUnavailable, SealBroken, SessionKeyGone, UnwrapRejected
from keyvault.hsm import Sealed
from keyvault.locked import LockedBuffer, move, wipe
from keyvault.pkcs11_names import LOST, LOST_KEY, Mechanism
from keyvault.pkcs11_pool import SessionPool
from keyvault.pkcs11_raw import GCM_NONCE, GCM_TAG, Template
from keyvault.pkcs11_start import TokenSession
from keyvault.pkcs11_structures import EncodedTemplate
from keyvault.templates import DEK_OPENING, DEK_REWRAPPING, DEK_SIGNING

Result = TypeVar("Result")

_OVERHEAD = GCM_NONCE + GCM_TAG

OPENING, SIGNING = EncodedTemplate(DEK_OPENING), EncodedTemplate(DEK_SIGNING)
_REWRAPPING = EncodedTemplate(DEK_REWRAPPING)


@dataclass(slots=True, eq=False)
class SessionKey:
    """A session object's handle, good while the session lives that made it: after that the number may mean another key."""

    pool: SessionPool
    handle: int
    home: TokenSession

    def run(self, operation: Callable[[TokenSession], Result]) -> Result:
        """Run an operation with this key. Raises HsmUnavailable where the key went with its session; that is never mended."""

        def with_key(session: TokenSession) -> Result:
            if not self.home.alive:
                raise SessionKeyGone
            try:
                return operation(session)
            except CallFailed as error:
                if error.answer in LOST_KEY:
                    raise SessionKeyGone from error
                raise

        return self.pool.run(with_key)

    def __enter__(self) -> SessionKey:
        return self

    def __exit__(self, *_: object) -> None:
        """Destroy it; that it is gone already is no fault. Where that fails, its session is closed before it is used again."""

        def destroy(session: TokenSession) -> None:
            if self.home.alive:
                try:
                    session.calls.destroy(session.handle, self.handle)
                except CallFailed as error:
                    if error.answer not in LOST_KEY:
                        raise

        try:
            self.pool.run(destroy)
        except HsmUnavailable:
            self.home.alive = False
            raise


class SealingDek:
    """`NewDek` over a session object's handle."""

    def __init__(self, key: SessionKey, wrapped: bytes) -> None:
        self._key = key
        self.wrapped = wrapped

    def seal(self, plaintext: LockedBuffer, length: int, aad: bytes) -> bytes:
        if not 0 < length <= plaintext.size:
            raise ValueError(f"cannot seal {length} bytes of {plaintext!r}")
        return self._key.run(lambda session: seal(session, self._key.handle, aad, plaintext.address, length))


class OpeningDek:
    """`OpenDek` over a session object's handle."""

    def __init__(self, key: SessionKey) -> None:
        self._key = key

    def open_into(self, sealed: bytes, aad: bytes, target: LockedBuffer, offset: int = 0) -> int:
        part = Sealed(sealed, aad, target, offset)
        require_room([part])
        length = len(sealed) - _OVERHEAD
        try:
            self._key.run(lambda session: open_sealed(session, self._key.handle, sealed, aad, target.address + offset, length))
        except BaseException:
            wipe_all([part])
            raise
        return length


class SessionCanary:
    """`Canary` over a session object's handle."""

    def __init__(self, key: SessionKey, blob: bytes) -> None:
        self._key = key
        self.blob = blob

    def mac(self, data: bytes) -> bytes:
        return self._key.run(lambda session: session.calls.sign(session.handle, self._key.handle, Mechanism.AES_CMAC, data))


def generate_wrapped(session: TokenSession, wrapping: int, template: Template) -> tuple[int, bytes]:
    """A new session key, and the same under `wrapping`; no key is left where that fails."""
    key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, template)
    try:
        return key, session.calls.wrap(session.handle, wrapping, key)
    except CallFailed:
        session.calls.destroy(session.handle, key)
        raise


def unwrap(session: TokenSession, wrapping: int, wrapped: bytes, template: EncodedTemplate) -> int:
    """The handle of the key in `wrapped`. Raises UnwrapRejected, and CallFailed for what is no verdict on the blob."""
    try:
        return session.calls.unwrap(session.handle, wrapping, wrapped, template)
    except CallFailed as error:
        if error.answer in LOST:
            raise
        raise UnwrapRejected(f"the token refused to unwrap: {error.answer}") from error


def rewrapped(
    session: TokenSession, source: int, target: int, blobs: Sequence[bytes], template: EncodedTemplate = _REWRAPPING
) -> list[bytes | UnwrapRejected]:
    """Each key under `target` instead of `source`, in order, or why the token refused it. One key at a time is in the token."""
    moved: list[bytes | UnwrapRejected] = []
    for blob in blobs:
        try:
            key = unwrap(session, source, blob, template)
        except UnwrapRejected as error:
            moved.append(error)
            continue
        try:
            moved.append(session.calls.wrap(session.handle, target, key))
        finally:
            session.calls.destroy(session.handle, key)
    return moved


def require_room(sealed: Sequence[Sealed]) -> None:
    """Raise SealBroken for data too short to hold anything, ValueError for a plaintext that does not fit in its place."""
    for part in sealed:
        length = len(part.data) - _OVERHEAD
        if length <= 0:
            raise SealBroken("sealed data is too short")
        if part.offset < 0 or part.offset + length > part.target.size:
            raise ValueError(f"{length} bytes do not fit at {part.offset} of {part.target!r}")


def open_all(session: TokenSession, key: int, sealed: Sequence[Sealed]) -> None:
    """Decrypt each to its place, and destroy the key, whatever comes of it."""
    try:
        for part in sealed:
            address, length = part.target.address + part.offset, len(part.data) - _OVERHEAD
            open_sealed(session, key, part.data, part.aad, address, length)
    finally:
        try:
            session.calls.destroy(session.handle, key)
        except CallFailed as error:
            if error.answer not in LOST_KEY:
                session.alive = False  # the key goes with its session, which is closed before it is used again
                raise


def wipe_all(sealed: Sequence[Sealed]) -> None:
    """Zeros in every place."""
    for part in sealed:
        wipe(part.target.address + part.offset, len(part.data) - _OVERHEAD)


def seal(session: TokenSession, key: int, aad: bytes, address: int, length: int) -> bytes:
    """AES-256-GCM of `length` bytes at `address`: nonce(12) | ciphertext | tag(16)."""
    # Random nonces: one key seals few rows, far from the 2^32 of SP 800-38D section 8.3.
    nonce = session.calls.random(session.handle, GCM_NONCE)
    return nonce + session.calls.encrypt(session.handle, key, nonce, aad, address, length)


def open_sealed(session: TokenSession, key: int, sealed: bytes, aad: bytes, address: int, length: int) -> None:
    """Decrypt `length` bytes to `address`; nothing is written there before all of it is seen to be whole.

    Modules may want room for the tag too (SoftHSM does) and own all of the room they are given, so they get a locked page of
    the session's own, overwritten at once, and nothing is ever written beside the caller's range.
    """
    room = length + GCM_TAG
    page = session.page(room).address
    try:
        opened = session.calls.decrypt(session.handle, key, sealed[:GCM_NONCE], aad, sealed[GCM_NONCE:], page, room)
        if opened != length:
            raise SealBroken(f"{opened} bytes came out of {length}")
        move(address, page, length)
    except CallFailed as error:
        if error.function != "C_Decrypt" or error.answer in LOST:
            raise
        # SoftHSM says GENERAL_ERROR for a wrong tag, so a module's fault here reads as broken data: closed either way.
        raise SealBroken() from error
    finally:
        wipe(page, room)
