"""PKCS#11's C structures, and templates as arrays of them. Source: OASIS PKCS#11 v2.40 base specification, chapter 3."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_char_p, c_ubyte, c_ulong, c_void_p
from typing import Any

from keyvault.pkcs11_names import Attribute, Mechanism

Value = bool | int | str | bytes | Sequence[int] | Mapping[Attribute, Any]
Template = Mapping[Attribute, Value]
"""Attributes in the order in which they are sent: MODIFIABLE stands last, for nothing can follow it."""

GCM_NONCE, GCM_TAG = 12, 16
_MGF1 = {Mechanism.SHA_1: 1, Mechanism.SHA256: 2}  # CKG_MGF1_*
_LABEL_GIVEN = 1  # CKZ_DATA_SPECIFIED


class CkMechanism(Structure):
    _fields_ = (("mechanism", c_ulong), ("parameter", c_void_p), ("length", c_ulong))
    kept: Any = None
    """Keeps alive what `parameter` points to."""


class CkGcmParameters(Structure):
    _fields_ = (
        ("nonce", c_char_p),
        ("nonce_length", c_ulong),
        ("nonce_bits", c_ulong),
        ("aad", c_char_p),
        ("aad_length", c_ulong),
        ("tag_bits", c_ulong),
    )


class CkOaepParameters(Structure):
    _fields_ = (("hash", c_ulong), ("mgf", c_ulong), ("source", c_ulong), ("data", c_void_p), ("data_length", c_ulong))


class CkAttribute(Structure):
    _fields_ = (("type", c_ulong), ("value", c_void_p), ("length", c_ulong))


class CkSessionInfo(Structure):
    _fields_ = (("slot", c_ulong), ("state", c_ulong), ("flags", c_ulong), ("device_error", c_ulong))


class CkInitializeArguments(Structure):
    _fields_ = (
        ("create_mutex", c_void_p),
        ("destroy_mutex", c_void_p),
        ("lock_mutex", c_void_p),
        ("unlock_mutex", c_void_p),
        ("flags", c_ulong),
        ("reserved", c_void_p),
    )


class EncodedTemplate:
    """A template as a CK_ATTRIBUTE array; keeps alive every buffer that the array points to.

    Modules only read it, so that one made beforehand serves every thread.
    """

    def __init__(self, template: Template) -> None:
        self.count = len(template)
        self.array = (CkAttribute * self.count)()
        self._kept: list[Any] = []
        for place, (attribute, value) in zip(self.array, template.items(), strict=True):
            place.type = attribute
            place.value, place.length = self._encode(value)

    def _encode(self, value: Value) -> tuple[int, int]:
        buffer: Any
        match value:
            case bool():
                buffer = (c_ubyte * 1)(int(value))
            case int():
                buffer = (c_ulong * 1)(value)
            case str() | bytes():
                data = value.encode() if isinstance(value, str) else value
                buffer = (c_ubyte * len(data)).from_buffer_copy(data)
            case Mapping():
                inner = EncodedTemplate(value)
                self._kept.append(inner)
                buffer = inner.array
            case _:
                buffer = (c_ulong * len(value))(*value)
        self._kept.append(buffer)
        return ctypes.addressof(buffer), ctypes.sizeof(buffer)


class GcmMechanism:
    """AES-GCM with a tag of 16 bytes, for one operation after another of one thread."""

    def __init__(self) -> None:
        self._parameters = CkGcmParameters(tag_bits=GCM_TAG * 8)
        address, size = ctypes.addressof(self._parameters), ctypes.sizeof(self._parameters)
        self._mechanism = CkMechanism(Mechanism.AES_GCM, address, size)

    def over(self, nonce: bytes, aad: bytes) -> CkMechanism:
        """The mechanism with this nonce and these associated data, until it is asked for again: modules read it to the end."""
        parameters = self._parameters
        parameters.nonce, parameters.nonce_length, parameters.nonce_bits = nonce, len(nonce), len(nonce) * 8
        parameters.aad, parameters.aad_length = aad, len(aad)
        return self._mechanism


def zero_iv(mechanism: Mechanism) -> CkMechanism:
    """A block mechanism whose IV is sixteen zeros."""
    iv = (c_ubyte * 16)()
    how = CkMechanism(mechanism, ctypes.addressof(iv), ctypes.sizeof(iv))
    how.kept = iv
    return how


def oaep(digest: Mechanism) -> tuple[CkOaepParameters, CkMechanism]:
    """RSAES-OAEP without a label, MGF1 over the same hash. The parameters must live as long as the operation."""
    parameters = CkOaepParameters(digest, _MGF1[digest], _LABEL_GIVEN, None, 0)
    return parameters, CkMechanism(Mechanism.RSA_PKCS_OAEP, ctypes.addressof(parameters), ctypes.sizeof(parameters))
