"""The raw C calls, in this one file: what must work by pointer, and templates that python-pkcs11 cannot express.

Called through the module's own function table (C_GetFunctionList), so that modules that export nothing else work too.
ctypes releases the GIL around each call. Every call raises CallFailed with the module's answer; none retries.
Source: OASIS PKCS#11 v2.40 base specification, chapter 5, and `pkcs11f.h` for the order of the table.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from ctypes import byref, c_char, c_char_p, c_ubyte, c_ulong, c_void_p
from typing import Any

from keyvault.errors import CallFailed
from keyvault.pkcs11_names import Answer, Attribute, Mechanism, Role
from keyvault.pkcs11_structures import GCM_NONCE as GCM_NONCE
from keyvault.pkcs11_structures import GCM_TAG as GCM_TAG
from keyvault.pkcs11_structures import (
    CkAttribute,
    CkInitializeArguments,
    CkMechanism,
    CkSessionInfo,
    EncodedTemplate,
    GcmMechanism,
    oaep,
    zero_iv,
)
from keyvault.pkcs11_structures import Template as Template

# Places in CK_FUNCTION_LIST, counted after its version field.
_INIT_TOKEN, _INIT_PIN, _SESSION_INFO, _LOGIN, _LOGOUT = 9, 10, 15, 18, 19
_CREATE, _COPY, _DESTROY, _GET_ATTRIBUTE, _SET_ATTRIBUTE, _FIND_INIT, _FIND, _FIND_FINAL = 20, 21, 22, 24, 25, 26, 27, 28
_ENCRYPT_INIT, _ENCRYPT, _DECRYPT_INIT, _DECRYPT, _SIGN_INIT, _SIGN = 29, 30, 33, 34, 42, 43
_GENERATE_KEY, _GENERATE_KEY_PAIR, _WRAP_KEY, _UNWRAP_KEY, _GENERATE_RANDOM = 58, 59, 60, 61, 64
_TABLE_OFFSET = 8  # CK_VERSION, padded to a pointer
_OS_LOCKING_OK = 2
_RW_USER = 3  # CKS_RW_USER_FUNCTIONS
_UNAVAILABLE = c_ulong(-1).value

_DATA = (c_ulong, c_char_p, c_ulong, c_void_p, c_void_p)
_ARGUMENTS: Mapping[int, tuple[type[Any], ...]] = {
    _SIGN_INIT: (c_ulong, c_void_p, c_ulong),
    _SIGN: _DATA,
    _DECRYPT_INIT: (c_ulong, c_void_p, c_ulong),
    _DECRYPT: _DATA,
    _WRAP_KEY: (c_ulong, c_void_p, c_ulong, c_ulong, c_void_p, c_void_p),
    _UNWRAP_KEY: (c_ulong, c_void_p, c_ulong, c_char_p, c_ulong, c_void_p, c_ulong, c_void_p),
    _DESTROY: (c_ulong, c_ulong),
}
"""Declared for what every open calls: Python's numbers and bytes then pass as they are. Elsewhere the caller converts."""
_Block = c_char * 64


class _Scratch(threading.local):
    """What a thread's calls fill in again and again, instead of making it anew for each. Nothing in it is secret."""

    def __init__(self) -> None:
        self.block, self.length, self.handle = _Block(), c_ulong(), c_ulong()
        self.key_wrap, self.mac = CkMechanism(Mechanism.AES_KEY_WRAP, None, 0), CkMechanism(0, None, 0)
        self.gcm = GcmMechanism()
        self.length_at, self.handle_at = byref(self.length), byref(self.handle)
        self.key_wrap_at, self.mac_at = byref(self.key_wrap), byref(self.mac)


class RawCalls:
    """The module's functions. Handles are the module's own numbers; any thread may call, one session one call at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address = c_void_p()
        answer = library.C_GetFunctionList(byref(address))
        if answer:
            raise _failed("C_GetFunctionList", answer)
        if not address.value:
            raise CallFailed("C_GetFunctionList", "no table")
        self._library = library
        self.table = address.value + _TABLE_OFFSET
        self._functions: dict[int, Any] = {}
        self._scratch = _Scratch()
        # What every open and every re-wrap calls, looked up once.
        self._sign_init, self._sign = self._function(_SIGN_INIT), self._function(_SIGN)
        self._decrypt_init, self._decrypt = self._function(_DECRYPT_INIT), self._function(_DECRYPT)
        self._unwrap, self._wrap = self._function(_UNWRAP_KEY), self._function(_WRAP_KEY)
        self._destroy = self._function(_DESTROY)

    def _call(self, place: int, name: str, *arguments: Any) -> None:
        function = self._functions.get(place) or self._function(place)
        answer = function(*arguments)
        if answer:
            raise _failed(name, answer)

    def _function(self, place: int) -> Any:
        address = c_void_p.from_address(self.table + place * ctypes.sizeof(c_void_p)).value
        function = ctypes.CFUNCTYPE(c_ulong, *_ARGUMENTS.get(place, ()))(address or 0)
        self._functions[place] = function
        return function

    def start_with_locking(self, start: Callable[[], None]) -> None:
        """Run `start`, whose C_Initialize(NULL) reaches the module as C_Initialize(CKF_OS_LOCKING_OK).

        Without that flag a module may switch its mutexes off, while python-pkcs11 releases the GIL around every call. The
        table's first pointer is replaced for this moment only. Raises CallFailed unless exactly one such call was made.
        """
        place = c_void_p.from_address(self.table)
        original = place.value
        prototype = ctypes.CFUNCTYPE(c_ulong, c_void_p)
        initialize = prototype(original or 0)
        arguments = CkInitializeArguments(flags=_OS_LOCKING_OK)
        answers: list[int] = []

        def with_locking(_: int | None) -> int:
            answers.append(int(initialize(ctypes.addressof(arguments))))
            return answers[-1]

        replacement = prototype(with_locking)
        place.value = ctypes.cast(replacement, c_void_p).value
        try:
            start()
        finally:
            place.value = original
        if answers != [Answer.OK]:
            raise CallFailed("C_Initialize", f"{[hex(answer) for answer in answers]} with OS locking, one 0x0 expected")

    # Tokens and roles

    def init_token(self, slot: int, so_pin: str, label: str) -> None:
        """C_InitToken: a new, empty token in `slot`. Erases what was there."""
        pin = so_pin.encode()
        self._call(_INIT_TOKEN, "C_InitToken", c_ulong(slot), c_char_p(pin), c_ulong(len(pin)), c_char_p(label.encode().ljust(32)))

    def init_pin(self, session: int, user_pin: str) -> None:
        """C_InitPIN: set the user PIN; `session` is the security officer's."""
        pin = user_pin.encode()
        self._call(_INIT_PIN, "C_InitPIN", c_ulong(session), c_char_p(pin), c_ulong(len(pin)))

    def login(self, session: int, role: Role, pin: str) -> None:
        """C_Login, once. It covers every session of this process on the token."""
        secret = pin.encode()
        self._call(_LOGIN, "C_Login", c_ulong(session), c_ulong(role), c_char_p(secret), c_ulong(len(secret)))

    def logout(self, session: int) -> None:
        """C_Logout: private session objects of the process are gone after it; public ones stay."""
        self._call(_LOGOUT, "C_Logout", c_ulong(session))

    def is_users(self, session: int) -> bool:
        """C_GetSessionInfo: whether the session is the logged-in user's, read-write."""
        info = CkSessionInfo()
        self._call(_SESSION_INFO, "C_GetSessionInfo", c_ulong(session), byref(info))
        return bool(info.state == _RW_USER)

    # Objects

    def find(self, session: int, template: Template) -> list[int]:
        """C_FindObjects to the end: a search left open would block the session's next one."""
        encoded, batch, count = EncodedTemplate(template), (c_ulong * 64)(), c_ulong()
        self._call(_FIND_INIT, "C_FindObjectsInit", c_ulong(session), encoded.array, c_ulong(encoded.count))
        found: list[int] = []
        try:
            while True:
                self._call(_FIND, "C_FindObjects", c_ulong(session), batch, c_ulong(len(batch)), byref(count))
                found += batch[: count.value]
                if count.value == 0:
                    return found
        finally:
            self._call(_FIND_FINAL, "C_FindObjectsFinal", c_ulong(session))

    def read(self, session: int, key: int, attribute: Attribute) -> bytes:
        """C_GetAttributeValue of one attribute, as the module's own bytes."""
        one = CkAttribute(attribute, None, 0)
        self._call(_GET_ATTRIBUTE, "C_GetAttributeValue", c_ulong(session), c_ulong(key), byref(one), c_ulong(1))
        if one.length in (0, _UNAVAILABLE):
            return b""
        buffer = (c_ubyte * one.length)()
        one.value = ctypes.addressof(buffer)
        self._call(_GET_ATTRIBUTE, "C_GetAttributeValue", c_ulong(session), c_ulong(key), byref(one), c_ulong(1))
        return bytes(buffer)[: one.length]

    def set(self, session: int, key: int, template: Template) -> None:
        """C_SetAttributeValue."""
        encoded = EncodedTemplate(template)
        self._call(_SET_ATTRIBUTE, "C_SetAttributeValue", c_ulong(session), c_ulong(key), encoded.array, c_ulong(encoded.count))

    def create(self, session: int, template: Template) -> int:
        """C_CreateObject: an object of given content; returns its handle."""
        encoded, handle = EncodedTemplate(template), c_ulong()
        self._call(_CREATE, "C_CreateObject", c_ulong(session), encoded.array, c_ulong(encoded.count), byref(handle))
        return handle.value

    def copy(self, session: int, key: int, template: Template) -> int:
        """C_CopyObject: a second object with `template` over what it inherits; returns its handle."""
        encoded, handle = EncodedTemplate(template), c_ulong()
        self._call(_COPY, "C_CopyObject", c_ulong(session), c_ulong(key), encoded.array, c_ulong(encoded.count), byref(handle))
        return handle.value

    def destroy(self, session: int, key: int) -> None:
        """C_DestroyObject."""
        if answer := self._destroy(session, key):
            raise _failed("C_DestroyObject", answer)

    def generate_key(self, session: int, mechanism: Mechanism, template: Template) -> int:
        """C_GenerateKey; returns the handle."""
        encoded, how, handle = EncodedTemplate(template), CkMechanism(mechanism, None, 0), c_ulong()
        self._call(
            _GENERATE_KEY, "C_GenerateKey", c_ulong(session), byref(how), encoded.array, c_ulong(encoded.count), byref(handle)
        )
        return handle.value

    def generate_pair(self, session: int, mechanism: Mechanism, public: Template, private: Template) -> tuple[int, int]:
        """C_GenerateKeyPair; returns the handles (public, private)."""
        open_half, secret_half, how = EncodedTemplate(public), EncodedTemplate(private), CkMechanism(mechanism, None, 0)
        handles = c_ulong(), c_ulong()
        self._call(
            _GENERATE_KEY_PAIR, "C_GenerateKeyPair", c_ulong(session), byref(how),
            open_half.array, c_ulong(open_half.count), secret_half.array, c_ulong(secret_half.count),
            byref(handles[0]), byref(handles[1]),
        )  # fmt: skip
        return handles[0].value, handles[1].value

    def wrap(self, session: int, wrapping: int, key: int, mechanism: Mechanism = Mechanism.AES_KEY_WRAP) -> bytes:
        """C_WrapKey: `key` under `wrapping`, for keys of up to 256 bits."""
        mine = self._scratch
        how = mine.key_wrap_at if mechanism is Mechanism.AES_KEY_WRAP else byref(zero_iv(mechanism))
        mine.length.value = 64
        if answer := self._wrap(session, how, wrapping, key, mine.block, mine.length_at):
            raise _failed("C_WrapKey", answer)
        return mine.block.raw[: mine.length.value]

    def unwrap(self, session: int, wrapping: int, wrapped: bytes, template: Template | EncodedTemplate) -> int:
        """C_UnwrapKey with AES key wrap (RFC 3394); returns the new key's handle."""
        encoded = template if isinstance(template, EncodedTemplate) else EncodedTemplate(template)
        mine = self._scratch
        if answer := self._unwrap(
            session, mine.key_wrap_at, wrapping, wrapped, len(wrapped), encoded.array, encoded.count, mine.handle_at
        ):
            raise _failed("C_UnwrapKey", answer)
        return mine.handle.value

    def wrap_oaep(self, session: int, wrapping: int, key: int, digest: Mechanism) -> bytes:
        """C_WrapKey with RSAES-OAEP (RFC 8017, 7.1), MGF1 over the same hash, no label; RSA keys of up to 8192 bits."""
        parameters, how = oaep(digest)
        out, length = (c_ubyte * 1024)(), c_ulong(1024)
        self._call(_WRAP_KEY, "C_WrapKey", c_ulong(session), byref(how), c_ulong(wrapping), c_ulong(key), out, byref(length))
        del parameters
        return bytes(out)[: length.value]

    def unwrap_oaep(self, session: int, unwrapping: int, wrapped: bytes, template: Template, digest: Mechanism) -> int:
        """C_UnwrapKey of what `wrap_oaep` made; returns the new key's handle."""
        parameters, how = oaep(digest)
        encoded, handle = EncodedTemplate(template), c_ulong()
        self._call(
            _UNWRAP_KEY, "C_UnwrapKey", c_ulong(session), byref(how), c_ulong(unwrapping), c_char_p(wrapped),
            c_ulong(len(wrapped)), encoded.array, c_ulong(encoded.count), byref(handle),
        )  # fmt: skip
        del parameters
        return handle.value

    # Data

    def random(self, session: int, length: int) -> bytes:
        """C_GenerateRandom."""
        out = (c_ubyte * length)()
        self._call(_GENERATE_RANDOM, "C_GenerateRandom", c_ulong(session), out, c_ulong(length))
        return bytes(out)

    def sign(self, session: int, key: int, mechanism: Mechanism, data: bytes) -> bytes:
        """C_Sign: a MAC or signature of up to 64 bytes."""
        mine = self._scratch
        mine.mac.mechanism, mine.length.value = mechanism, 64
        if answer := self._sign_init(session, mine.mac_at, key):
            raise _failed("C_SignInit", answer)
        if answer := self._sign(session, data, len(data), mine.block, mine.length_at):
            raise _failed("C_Sign", answer)
        return mine.block.raw[: mine.length.value]

    def may_decrypt(self, session: int, key: int, mechanism: Mechanism) -> None:
        """C_DecryptInit alone: raises CallFailed where the key may not decrypt. Use a session that is closed afterwards."""
        how = CkMechanism(mechanism, None, 0)
        self._call(_DECRYPT_INIT, "C_DecryptInit", session, byref(how), key)

    def encrypt(self, session: int, key: int, nonce: bytes, aad: bytes, address: int, length: int) -> bytes:
        """AES-256-GCM of `length` bytes at `address`; the caller vouches for that range. Returns ciphertext | tag(16)."""
        how = self._scratch.gcm.over(nonce, aad)
        self._call(_ENCRYPT_INIT, "C_EncryptInit", c_ulong(session), byref(how), c_ulong(key))
        out, written = (c_ubyte * (length + GCM_TAG))(), c_ulong(length + GCM_TAG)
        self._call(_ENCRYPT, "C_Encrypt", c_ulong(session), c_void_p(address), c_ulong(length), out, byref(written))
        return bytes(out)[: written.value]

    def decrypt(self, session: int, key: int, nonce: bytes, aad: bytes, sealed: bytes, address: int, room: int) -> int:
        """Open ciphertext | tag(16) into `room` bytes at `address`; the caller vouches for that range. Returns the length."""
        mine = self._scratch
        if answer := self._decrypt_init(session, byref(mine.gcm.over(nonce, aad)), key):
            raise _failed("C_DecryptInit", answer)
        mine.length.value = room
        if answer := self._decrypt(session, sealed, len(sealed), address, mine.length_at):
            raise _failed("C_Decrypt", answer)
        return mine.length.value


def _failed(function: str, answer: int) -> CallFailed:
    return CallFailed(function, Answer(answer).name if answer in Answer._value2member_map_ else hex(answer))
