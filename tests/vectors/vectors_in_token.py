"""Published vectors put through a token: each function yields what the token did otherwise than the vector says.

For a process of its own, with an empty token of its own: keys of known value are imported by C_CreateObject, which no shipped
code does. What our door has is called through it; what it has not, through python-pkcs11.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pkcs11
from hsm_fixtures import SO_PIN, USER_PIN
from pkcs11 import Attribute as A

from keyvault import softhsm
from keyvault.errors import CallFailed
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass, Role
from keyvault.pkcs11_start import Module, TokenSession
from keyvault.templates import P256

Deviation = tuple[str, str, int, str]
"""File, operation, tcId, and what the token answered."""
Case = dict[str, Any]
FOLDER = Path(__file__).parent / "wycheproof"

OTHER = "other bytes"
SECRET, RSA = pkcs11.ObjectClass.SECRET_KEY, pkcs11.Mechanism.RSA_PKCS_OAEP
TO_BE_READ = {A.SENSITIVE: False, A.EXTRACTABLE: True, A.TOKEN: False}
READABLE = {Attribute.TOKEN: False, Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}
AS_GENERIC = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.GENERIC_SECRET, **READABLE}


def groups(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}_test.json").read_text())["testGroups"]
    return found


def answer(call: Callable[[], bytes | bool]) -> bytes | bool | str:
    """What the call gave, or the name of the token's answer."""
    try:
        return call()
    except CallFailed as error:
        return error.answer
    except pkcs11.PKCS11Error as error:
        return type(error).__name__


def judged(case: Case, got: bytes | bool | str, wanted: bytes | bool) -> str | None:
    """How `got` departs from the vector, or None. An "acceptable" vector may be refused."""
    if case["result"] == "invalid":
        return "accepted" if got == wanted else None
    if got == wanted or (case["result"] == "acceptable" and isinstance(got, str)):
        return None
    return got if isinstance(got, str) else OTHER


class VectorToken:
    """A token of its own, logged in, and imports of known keys."""

    def __init__(self, folder: Path) -> None:
        path = softhsm.find_module()
        serial = softhsm.make_token(path, folder, "vectors", SO_PIN, USER_PIN)
        self._module = Module(path, folder)
        self.session: TokenSession = self._module.session(self._module.token("vectors", serial))
        self.calls, self.handle = self.session.calls, self.session.handle
        self.calls.login(self.handle, Role.USER, USER_PIN)
        self.python: Any = self.session._session

    def known(self, value: bytes, kind: KeyType, *uses: Attribute) -> int:
        template = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: kind, Attribute.VALUE: value, **READABLE}
        return self.calls.create(self.handle, {**template, **dict.fromkeys(uses, True)})

    def object(self, handle: int) -> Any:
        """The same object through python-pkcs11."""
        return next(found for found in self.python.get_objects({}) if found.handle == handle)

    def value(self, key: int) -> bytes:
        return self.calls.read(self.handle, key, Attribute.VALUE)

    def forget(self) -> None:
        for key in self.session.find({}):
            self.calls.destroy(self.handle, key)


def aes_wrap(token: VectorToken, cases: Iterator[Case]) -> Iterator[Deviation]:
    """RFC 3394 by our door: unwrap every blob; wrap every key again whose blob it can hold."""
    for case in cases:
        key, message, blob = (bytes.fromhex(case[name]) for name in ("key", "msg", "ct"))
        master = token.known(key, KeyType.AES, Attribute.WRAP, Attribute.UNWRAP)

        def unwrapped(master: int = master, blob: bytes = blob) -> bytes:
            return token.value(token.calls.unwrap(token.handle, master, blob, AS_GENERIC))

        def wrapped(master: int = master, message: bytes = message) -> bytes:
            return token.calls.wrap(token.handle, master, token.known(message, KeyType.GENERIC_SECRET))

        yield from _reported("aes_wrap", "unwrap", case, judged(case, answer(unwrapped), message))
        if case["result"] != "invalid" and len(blob) <= 64:
            yield from _reported("aes_wrap", "wrap", case, judged(case, answer(wrapped), blob))
        token.forget()


def aes_kwp(token: VectorToken, cases: Iterator[Case]) -> Iterator[Deviation]:
    """RFC 5649 by the mechanism 0x210A, which SoftHSM names AES_KEY_WRAP_PAD."""
    how = {"mechanism": pkcs11.Mechanism.AES_KEY_WRAP_PAD}
    for case in cases:
        key, message, blob = (bytes.fromhex(case[name]) for name in ("key", "msg", "ct"))
        master = token.object(token.known(key, KeyType.AES, Attribute.WRAP, Attribute.UNWRAP))

        def unwrapped(master: Any = master, blob: bytes = blob) -> bytes:
            return bytes(master.unwrap_key(SECRET, pkcs11.KeyType.GENERIC_SECRET, blob, template=TO_BE_READ, **how)[A.VALUE])

        def wrapped(master: Any = master, message: bytes = message) -> bytes:
            return bytes(master.wrap_key(token.object(token.known(message, KeyType.GENERIC_SECRET)), **how))

        yield from _reported("aes_kwp", "unwrap", case, judged(case, answer(unwrapped), message))
        if case["result"] != "invalid":
            yield from _reported("aes_kwp", "wrap", case, judged(case, answer(wrapped), blob))
        token.forget()


def aes_cmac(token: VectorToken, cases: Iterator[Case]) -> Iterator[Deviation]:
    """RFC 4493 and SP 800-38B by our door. A key of no AES length may be imported, but makes no tag."""
    for case in cases:
        key, message, tag = (bytes.fromhex(case[name]) for name in ("key", "msg", "tag"))

        def made(key: bytes = key, message: bytes = message, size: int = len(tag)) -> bytes:
            handle = token.known(key, KeyType.AES, Attribute.SIGN)
            return token.calls.sign(token.handle, handle, Mechanism.AES_CMAC, message)[:size]

        yield from _reported("aes_cmac", "sign", case, judged(case, answer(made), tag))
        token.forget()


def ecdsa_secp256r1_sha256_p1363(token: VectorToken, cases: Iterator[Case]) -> Iterator[Deviation]:
    """Raw r||s over our own SHA-256, as access tokens, statements and receipts are signed."""
    for case in cases:
        point = bytes.fromhex(case["group"]["publicKey"]["uncompressed"])
        template = {A.CLASS: pkcs11.ObjectClass.PUBLIC_KEY, A.KEY_TYPE: pkcs11.KeyType.EC, A.EC_PARAMS: P256}
        public = token.python.create_object(template | {A.EC_POINT: b"\x04\x41" + point, A.VERIFY: True, A.TOKEN: False})
        digest, signature = hashlib.sha256(bytes.fromhex(case["msg"])).digest(), bytes.fromhex(case["sig"])

        def holds(public: Any = public, digest: bytes = digest, signature: bytes = signature) -> bool:
            return bool(public.verify(digest, signature, mechanism=pkcs11.Mechanism.ECDSA))

        got = answer(holds)
        yield from _reported("ecdsa_secp256r1_sha256_p1363", "verify", case, judged(case, got or "refused", wanted=True))
        token.forget()


_RSA_PARTS = {
    A.MODULUS: "modulus", A.PUBLIC_EXPONENT: "publicExponent", A.PRIVATE_EXPONENT: "privateExponent", A.PRIME_1: "prime1",
    A.PRIME_2: "prime2", A.EXPONENT_1: "exponent1", A.EXPONENT_2: "exponent2", A.COEFFICIENT: "coefficient",
}  # fmt: skip


def rsa_oaep_2048_sha1_mgf1sha1(token: VectorToken, cases: Iterator[Case]) -> Iterator[Deviation]:
    """RFC 8017, 7.1: C_UnwrapKey by our door where there is no label, C_Decrypt by the library for all."""
    for case in cases:
        parts = case["group"]["privateKey"]
        numbers = {name: bytes.fromhex(parts[part]).lstrip(b"\0") for name, part in _RSA_PARTS.items()}
        template = {A.CLASS: pkcs11.ObjectClass.PRIVATE_KEY, A.KEY_TYPE: pkcs11.KeyType.RSA, A.TOKEN: False, A.PRIVATE: True}
        private = token.python.create_object({**template, **numbers, A.DECRYPT: True, A.UNWRAP: True})
        blob, message, label = (bytes.fromhex(case[name]) for name in ("ct", "msg", "label"))

        def unwrapped(private: Any = private, blob: bytes = blob) -> bytes:
            return token.value(token.calls.unwrap_oaep(token.handle, private.handle, blob, AS_GENERIC, Mechanism.SHA_1))

        def decrypted(private: Any = private, blob: bytes = blob, label: bytes = label) -> bytes:
            parameters = (pkcs11.Mechanism.SHA_1, pkcs11.MGF.SHA1, label or None)
            return bytes(private.decrypt(blob, mechanism=RSA, mechanism_param=parameters))

        if not label:
            yield from _reported("rsa_oaep_2048_sha1_mgf1sha1", "unwrap", case, judged(case, answer(unwrapped), message))
        yield from _reported("rsa_oaep_2048_sha1_mgf1sha1", "decrypt", case, judged(case, answer(decrypted), message))
        token.forget()


def _reported(name: str, operation: str, case: Case, deviation: str | None) -> Iterator[Deviation]:
    if deviation is not None:
        yield name, operation, case["tcId"], deviation


FILES: dict[str, Callable[[VectorToken, Iterator[Case]], Iterator[Deviation]]] = {
    function.__name__: function
    for function in (aes_wrap, aes_kwp, aes_cmac, ecdsa_secp256r1_sha256_p1363, rsa_oaep_2048_sha1_mgf1sha1)
}


def through_a_token(folder: Path) -> tuple[dict[str, int], list[Deviation], list[Deviation]]:
    """How many vectors of each file ran, every deviation, and what the same code says of a vector turned into its opposite."""
    token = VectorToken(folder)
    ran, found, control = dict.fromkeys(FILES, 0), list[Deviation](), list[Deviation]()
    for name, through in FILES.items():
        cases = [{**case, "group": group} for group in groups(name) for case in group["tests"]]
        ran[name] = len(cases)
        found += through(token, iter(cases))
        for result, opposite in (("valid", "invalid"), ("invalid", "valid")):
            case = next(case for case in cases if case["result"] == result and not case.get("label"))
            control += through(token, iter([{**case, "result": opposite}]))
    return ran, found, control
