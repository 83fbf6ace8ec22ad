"""Keys that live for one `with` block: a voice's DEK, sealing or opening, and the canary that two sites compare.

Each is a session object of the token. Functions here work on a borrowed session; plaintext passes by pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from keyvault.errors import CallFailed, SealBroken, UnwrapRejected
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_names import LOST_KEY, LOST_SESSION, Answer, Mechanism
from keyvault.pkcs11_raw import GCM_NONCE, GCM_TAG, Template
from keyvault.pkcs11_start import Token, TokenSession
from keyvault.templates import DEK_REWRAPPING


class SealingDek:
    """`NewDek` over a session object's handle."""

    def __init__(self, token: Token, key: int, wrapped: bytes) -> None:
        self._token = token
        self._key = key
        self.wrapped = wrapped

    def seal(self, plaintext: LockedBuffer, length: int, aad: bytes) -> bytes:
        if not 0 < length <= plaintext.size:
            raise ValueError(f"cannot seal {length} bytes of {plaintext!r}")
        return self._token.run(lambda session: seal(session, self._key, aad, plaintext.address, length))


class OpeningDek:
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
        self._token.run(lambda session: open_sealed(session, self._key, sealed, aad, target.address + offset, length))
        return length


class SessionCanary:
    """`Canary` over a session object's handle."""

    def __init__(self, token: Token, key: int, blob: bytes) -> None:
        self._token = token
        self._key = key
        self.blob = blob

    def mac(self, data: bytes) -> bytes:
        return self._token.run(lambda session: session.calls.sign(session.handle, self._key, Mechanism.AES_CMAC, data))


def generate_wrapped(session: TokenSession, wrapping: int, template: Template) -> tuple[int, bytes]:
    """A new session key, and the same under `wrapping`; no key is left where that fails."""
    key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, template)
    try:
        return key, session.calls.wrap(session.handle, wrapping, key)
    except CallFailed:
        session.calls.destroy(session.handle, key)
        raise


def unwrap(session: TokenSession, wrapping: int, wrapped: bytes, template: Template) -> int:
    """The handle of the key in `wrapped`. Raises UnwrapRejected, and CallFailed for what is no verdict on the blob."""
    try:
        return session.calls.unwrap(session.handle, wrapping, wrapped, template)
    except CallFailed as error:
        if error.answer in LOST_SESSION | LOST_KEY:
            raise
        raise UnwrapRejected(f"the token refused to unwrap: {error.answer}") from error


def rewrapped(session: TokenSession, source: int, target: int, blobs: Sequence[bytes]) -> list[bytes | UnwrapRejected]:
    """Each key under `target` instead of `source`, in order, or why the token refused it. One key at a time is in the token."""
    moved: list[bytes | UnwrapRejected] = []
    for blob in blobs:
        try:
            key = unwrap(session, source, blob, DEK_REWRAPPING)
        except UnwrapRejected as error:
            moved.append(error)
            continue
        try:
            moved.append(session.calls.wrap(session.handle, target, key))
        finally:
            session.calls.destroy(session.handle, key)
    return moved


def seal(session: TokenSession, key: int, aad: bytes, address: int, length: int) -> bytes:
    """AES-256-GCM of `length` bytes at `address`: nonce(12) | ciphertext | tag(16)."""
    # Random nonces: one key seals few rows, far from the 2^32 of SP 800-38D section 8.3.
    nonce = session.calls.random(session.handle, GCM_NONCE)
    return nonce + session.calls.encrypt(session.handle, key, nonce, aad, address, length)


def open_sealed(session: TokenSession, key: int, sealed: bytes, aad: bytes, address: int, length: int) -> None:
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


def destroy_key(token: Token, key: int) -> None:
    """Destroy a session key; that it is gone already is no fault."""

    def destroy(session: TokenSession) -> None:
        try:
            session.calls.destroy(session.handle, key)
        except CallFailed as error:
            if error.answer != Answer.OBJECT_HANDLE_INVALID.name:  # gone already, with the session that made it
                raise

    token.run(destroy)
