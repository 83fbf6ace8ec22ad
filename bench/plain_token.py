"""The same steps in the same token without our door: plain ctypes with everything made beforehand, and python-pkcs11.

What `bench/hsm.py` measures against. Neither checks anything, names an error, or bounds the sessions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_ubyte, c_ulong, c_void_p
from typing import Any

import pkcs11
from pkcs11 import Attribute as A

from keyvault.pkcs11_names import Mechanism
from keyvault.templates import DEK, DEK_REWRAPPING

TAG = 16
_USES = {A.ENCRYPT: False, A.DECRYPT: True, A.SIGN: False, A.VERIFY: False}


class _Attribute(ctypes.Structure):
    _fields_ = (("type", c_ulong), ("value", c_void_p), ("length", c_ulong))


class _Mechanism(ctypes.Structure):
    _fields_ = (("mechanism", c_ulong), ("parameter", c_void_p), ("length", c_ulong))


class _Gcm(ctypes.Structure):
    _fields_ = (
        ("nonce", c_char_p), ("nonce_length", c_ulong), ("nonce_bits", c_ulong),
        ("aad", c_char_p), ("aad_length", c_ulong), ("tag_bits", c_ulong),
    )  # fmt: skip


def _loaded(module: str) -> ctypes.CDLL:
    """The module's exported functions, their arguments declared once."""
    library, handle, how, length = ctypes.CDLL(module), c_ulong, POINTER(_Mechanism), POINTER(c_ulong)
    data = (c_ulong, c_char_p, c_ulong, c_void_p, length)
    library.C_SignInit.argtypes = library.C_DecryptInit.argtypes = (handle, how, c_ulong)
    library.C_Sign.argtypes = library.C_Decrypt.argtypes = data
    template = (POINTER(_Attribute), c_ulong, length)
    library.C_UnwrapKey.argtypes = (handle, how, c_ulong, c_char_p, c_ulong, *template)
    library.C_WrapKey.argtypes = (handle, how, c_ulong, c_ulong, c_void_p, length)
    library.C_DestroyObject.argtypes = (handle, c_ulong)
    for name in ("C_SignInit", "C_Sign", "C_DecryptInit", "C_Decrypt", "C_UnwrapKey", "C_WrapKey", "C_DestroyObject"):
        getattr(library, name).restype = c_ulong
    return library


def _array(template: Mapping[int, Any], kept: list[Any]) -> Any:
    """The template as C wants it; `kept` keeps alive what it points to."""
    array = (_Attribute * len(template))()
    for place, (name, value) in zip(array, template.items(), strict=True):
        buffer = (c_ubyte * 1)(value) if isinstance(value, bool) else (c_ulong * 1)(value)
        kept.append(buffer)
        place.type, place.value, place.length = name, ctypes.addressof(buffer), ctypes.sizeof(buffer)
    return array


class Opening:
    """What one thread opens again and again: a session of its own, the keys found, and one sealed row."""

    def __init__(self, session: Any, mac: Any, master: Any, row: Mapping[str, bytes]) -> None:
        self.session, self.mac, self.master, self.row = session, mac, master, row
        self.length = len(row["sealed"]) - 12 - TAG


class PlainCalls:
    """One open by six calls: C_SignInit, C_Sign, C_UnwrapKey, C_DecryptInit, C_Decrypt, C_DestroyObject. No allocation."""

    def __init__(self, module: str, what: Opening) -> None:
        self._library, self._what = _loaded(module), what
        self._session, self._mac, self._master = int(what.session.handle), int(what.mac.handle), int(what.master.handle)
        self._kept: list[Any] = []
        uses = {int(name): value for name, value in _USES.items()}
        self._template = _array({**uses, **{int(name): value for name, value in DEK.items()}}, self._kept)
        self._cmac, self._wrap = _Mechanism(Mechanism.AES_CMAC, None, 0), _Mechanism(Mechanism.AES_KEY_WRAP, None, 0)
        row = what.row
        self._parameters = _Gcm(row["sealed"][:12], 12, 96, row["aad"], len(row["aad"]), TAG * 8)
        self._gcm = _Mechanism(Mechanism.AES_GCM, ctypes.addressof(self._parameters), ctypes.sizeof(self._parameters))
        self._body = row["sealed"][12:]
        self._tag, self._room, self._key = (ctypes.c_char * 64)(), (c_ubyte * (what.length + TAG))(), c_ulong()
        self._tag_length, self._opened = c_ulong(64), c_ulong()

    def __call__(self) -> None:
        library, row, session, key = self._library, self._what.row, self._session, self._key
        self._tag_length.value = 64
        answers = library.C_SignInit(session, self._cmac, self._mac)
        answers |= library.C_Sign(session, row["record"], len(row["record"]), self._tag, byref(self._tag_length))
        if self._tag.raw[:16] != row["mac"]:
            raise ValueError("the record does not carry its MAC")
        answers |= library.C_UnwrapKey(
            session, self._wrap, self._master, row["blob"], 40, self._template, len(self._template), byref(key)
        )
        self._opened.value = len(self._room)
        answers |= library.C_DecryptInit(session, self._gcm, key)
        answers |= library.C_Decrypt(session, self._body, len(self._body), self._room, byref(self._opened))
        answers |= library.C_DestroyObject(session, key)
        if answers or self._opened.value != self._what.length:
            raise ValueError("a plain call failed")


class PlainMoves:
    """One re-wrap by three calls: C_UnwrapKey, C_WrapKey, C_DestroyObject. Nothing is allocated but the blob that comes out."""

    def __init__(self, module: str, session: Any, source: Any, target: Any) -> None:
        self._library, self._kept = _loaded(module), [session, source, target]
        self._session, self._source, self._target = (int(found.handle) for found in self._kept)
        self._template = _array({int(name): value for name, value in DEK_REWRAPPING.items()}, self._kept)
        self._wrap, self._key = _Mechanism(Mechanism.AES_KEY_WRAP, None, 0), c_ulong()
        self._out, self._length = (ctypes.c_char * 64)(), c_ulong()

    def __call__(self, blob: bytes) -> bytes:
        library, session, key = self._library, self._session, self._key
        answers = library.C_UnwrapKey(session, self._wrap, self._source, blob, 40, self._template, len(self._template), byref(key))
        self._length.value = 64
        answers |= library.C_WrapKey(session, self._wrap, self._target, key.value, self._out, byref(self._length))
        answers |= library.C_DestroyObject(session, key)
        if answers:
            raise ValueError("a plain call failed")
        return self._out.raw[: self._length.value]


class LibraryCalls:
    """The same open as python-pkcs11 offers it."""

    def __init__(self, what: Opening) -> None:
        self._what = what
        self._template = {A(int(name)): value for name, value in DEK.items()} | _USES
        self._template[A.CLASS], self._template[A.KEY_TYPE] = pkcs11.ObjectClass.SECRET_KEY, pkcs11.KeyType.AES
        self._parameters = pkcs11.GCMParams(what.row["sealed"][:12], what.row["aad"], TAG * 8)
        self._body = what.row["sealed"][12:]

    def __call__(self) -> None:
        what = self._what
        if what.mac.sign(what.row["record"], mechanism=pkcs11.Mechanism.AES_CMAC) != what.row["mac"]:
            raise ValueError("the record does not carry its MAC")
        key = what.master.unwrap_key(
            pkcs11.ObjectClass.SECRET_KEY,
            pkcs11.KeyType.AES,
            what.row["blob"],
            mechanism=pkcs11.Mechanism.AES_KEY_WRAP,
            template=self._template,
            capabilities=pkcs11.MechanismFlag.DECRYPT,
        )
        opened = key.decrypt(self._body, mechanism=pkcs11.Mechanism.AES_GCM, mechanism_param=self._parameters)
        key.destroy()
        if len(opened) != what.length:
            raise ValueError("a library call failed")
