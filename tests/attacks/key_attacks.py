"""What somebody with the serving PIN tries: each function returns the key's bytes, or nothing where success is the breach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, byref, c_ubyte, c_ulong, c_void_p, sizeof
from dataclasses import dataclass, field
from typing import Any

import pkcs11
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from pkcs11 import Attribute as A
from weak_masters import LEFT_OUT

from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import RawCalls, Template
from keyvault.pkcs11_structures import CkMechanism, EncodedTemplate
from keyvault.templates import DEK_OPENING


@dataclass
class Attacker:
    """What the serving PIN gives: a session, the master's handle, a voice's wrapped key and something it sealed."""

    calls: RawCalls
    session: int
    master: int
    dek: int
    wrapped: bytes
    python: Any
    right: Template = field(default_factory=lambda: DEK_OPENING)
    """What an honest unwrap asks for."""

    def unwrap(self, **weaker: Any) -> int:
        template = {**self.right, **{Attribute[name]: value for name, value in weaker.items()}}
        return self.calls.unwrap(self.session, self.master, self.wrapped, {k: v for k, v in template.items() if v is not LEFT_OUT})

    def value(self, key: int) -> bytes:
        return self.calls.read(self.session, key, Attribute.VALUE)

    def own_key(self, **more: Any) -> int:
        template = {Attribute.VALUE_LEN: 32, Attribute.TOKEN: False, Attribute.WRAP: True, Attribute.DECRYPT: True}
        template |= {Attribute[name]: value for name, value in more.items()}
        return self.calls.generate_key(self.session, Mechanism.AES_KEY_GEN, template)

    def object(self, handle: int) -> Any:
        """The same object through python-pkcs11, for the calls that only attackers make."""
        return next(found for found in self.python.get_objects({}) if found.handle == handle)


def done(_key: int) -> bytes:
    """The breach is that the token agreed."""
    return b""


def unwrapped(key: bytes, blob: bytes) -> bytes:
    return aes_key_unwrap(key, blob)


def in_software(a: Attacker, master: int) -> bytes:
    """RFC 3394 section 2.2.2 in software, over a master that decrypts single blocks (AES-ECB)."""
    key = a.object(master)
    if not hasattr(key, "decrypt"):
        # python-pkcs11 believes the attribute; the token itself is asked.
        a.calls.may_decrypt(a.session, master, Mechanism.AES_ECB)
        raise AssertionError("the token decrypts with a key that says it does not")
    register, blocks = a.wrapped[:8], [a.wrapped[at : at + 8] for at in range(8, len(a.wrapped), 8)]
    for step in range(6 * len(blocks), 0, -1):
        place = (step - 1) % len(blocks)
        mixed = (int.from_bytes(register, "big") ^ step).to_bytes(8, "big")
        block = key.decrypt(mixed + blocks[place], mechanism=pkcs11.Mechanism.AES_ECB)
        register, blocks[place] = block[:8], block[8:]
    assert register == b"\xa6" * 8
    return b"".join(blocks)


# Attacks that end with the key's bytes (or an oracle on them) in hand


def read_in_clear(a: Attacker) -> bytes:
    return a.value(a.unwrap(SENSITIVE=False, EXTRACTABLE=True))


def leave_sensitive_out(a: Attacker) -> bytes:
    return a.value(a.unwrap(SENSITIVE=LEFT_OUT, EXTRACTABLE=True))


def wrap_under_own_key(a: Attacker) -> bytes:
    """Unwrapped without WRAP_WITH_TRUSTED, a key leaves under the attacker's own."""
    own = a.calls.generate_key(
        a.session,
        Mechanism.AES_KEY_GEN,
        {
            Attribute.VALUE_LEN: 32,
            Attribute.TOKEN: False,
            Attribute.SENSITIVE: False,
            Attribute.EXTRACTABLE: True,
            Attribute.WRAP: True,
        },
    )
    blob = a.calls.wrap(a.session, own, a.unwrap(WRAP_WITH_TRUSTED=False))
    return unwrapped(a.value(own), blob)


def wrap_extractable_under_own_key(a: Attacker) -> bytes:
    """Unwrapped as extractable, a key leaves under the attacker's own."""
    own = a.own_key(SENSITIVE=False, EXTRACTABLE=True)
    return unwrapped(a.value(own), a.calls.wrap(a.session, own, a.unwrap(EXTRACTABLE=True)))


def wrap_again(a: Attacker) -> bytes:
    """Under the master itself: a blob that another token might take for something else."""
    return a.calls.wrap(a.session, a.master, a.dek)


def clone_the_master(a: Attacker) -> bytes:
    return done(a.calls.copy(a.session, a.master, {}))


def wrap_the_born_key_under_own_key(a: Attacker) -> bytes:
    own = a.own_key(SENSITIVE=False, EXTRACTABLE=True)
    return unwrapped(a.value(own), a.calls.wrap(a.session, own, a.dek))


def dress_as_hmac_key(a: Attacker) -> bytes:
    """As a GENERIC_SECRET it would sign: an oracle, and a use that nobody granted."""
    key = a.unwrap(KEY_TYPE=KeyType.GENERIC_SECRET, SIGN=True, DECRYPT=LEFT_OUT)
    return a.calls.sign(a.session, key, Mechanism.SHA256_HMAC, b"oracle")


def keep_in_the_token(a: Attacker) -> bytes:
    """A DEK as a token object would outlive its erasure."""
    return done(a.unwrap(TOKEN=True))


def copy_to_the_token(a: Attacker) -> bytes:
    return done(a.calls.copy(a.session, a.unwrap(COPYABLE=True, MODIFIABLE=True), {Attribute.TOKEN: True}))


def derive_by_set(a: Attacker) -> bytes:
    key = a.unwrap(MODIFIABLE=True)
    a.calls.set(a.session, key, {Attribute.DERIVE: True})
    return done(key)


def derive(a: Attacker) -> bytes:
    return done(a.unwrap(DERIVE=True))


def let_it_wrap(a: Attacker) -> bytes:
    return done(a.unwrap(WRAP=True))


def let_it_unwrap(a: Attacker) -> bytes:
    return done(a.unwrap(UNWRAP=True))


def not_private(a: Attacker) -> bytes:
    return done(a.unwrap(PRIVATE=False))


def not_extractable(a: Attacker) -> bytes:
    """Harmless alone; but the template says EXTRACTABLE, and exactly that must be asked for."""
    return done(a.unwrap(EXTRACTABLE=False))


def set_decrypt_on_the_master(a: Attacker) -> bytes:
    a.calls.set(a.session, a.master, {Attribute.DECRYPT: True})
    return in_software(a, a.master)


def copy_the_master_with_decrypt(a: Attacker) -> bytes:
    return in_software(a, a.calls.copy(a.session, a.master, {Attribute.DECRYPT: True}))


def decrypt_with_the_master(a: Attacker) -> bytes:
    return in_software(a, a.master)


def wrap_by_cbc(a: Attacker) -> bytes:
    return a.calls.wrap(a.session, a.master, a.dek, Mechanism.AES_CBC)


def wrap_the_master(a: Attacker) -> bytes:
    return a.calls.wrap(a.session, a.own_key(), a.master)


def read_the_master(a: Attacker) -> bytes:
    return a.value(a.master)


def make_a_trusted_key(a: Attacker) -> bytes:
    own = a.own_key(TRUSTED=True, SENSITIVE=False, EXTRACTABLE=True)
    return unwrapped(a.value(own), a.calls.wrap(a.session, own, a.dek))


def import_a_trusted_key(a: Attacker) -> bytes:
    known = b"k" * 32
    own = a.python.create_object(
        {A.CLASS: pkcs11.ObjectClass.SECRET_KEY, A.KEY_TYPE: pkcs11.KeyType.AES, A.VALUE: known, A.WRAP: True, A.TRUSTED: True}
    )
    return unwrapped(known, a.calls.wrap(a.session, own.handle, a.dek))


def trust_a_key_later(a: Attacker) -> bytes:
    own = a.own_key(SENSITIVE=False, EXTRACTABLE=True)
    a.calls.set(a.session, own, {Attribute.TRUSTED: True})
    return unwrapped(a.value(own), a.calls.wrap(a.session, own, a.dek))


def wrap_a_known_key_as_a_dek(a: Attacker) -> bytes:
    """Forge a blob: a key whose bytes he knows, wrapped under the master, would pass for a voice's."""
    known = a.python.create_object(
        {A.CLASS: pkcs11.ObjectClass.SECRET_KEY, A.KEY_TYPE: pkcs11.KeyType.AES, A.VALUE: b"k" * 32, A.EXTRACTABLE: True}
    )
    return a.calls.wrap(a.session, a.master, known.handle)


# Requests that only a program of his own can form


def _twice(right: Template, name: Attribute, *, false_first: bool) -> EncodedTemplate:
    """The full template with one attribute a second time, FALSE: before its honest self, or after it."""
    extra, rest = {Attribute.ID: b"\0"}, {key: value for key, value in right.items() if key is not Attribute.MODIFIABLE}
    order = {**extra, **rest} if false_first else {**rest, **extra}
    encoded = EncodedTemplate({**order, Attribute.MODIFIABLE: False})
    (place,) = (place for place in encoded.array if place.type == Attribute.ID)
    place.type = name
    return encoded


def twice_with_false_first(a: Attacker) -> bytes:
    return a.value(
        a.calls.unwrap(
            a.session, a.master, a.wrapped, _twice({**a.right, Attribute.EXTRACTABLE: True}, Attribute.SENSITIVE, false_first=True)
        )
    )


def twice_with_false_last(a: Attacker) -> bytes:
    return a.value(
        a.calls.unwrap(
            a.session, a.master, a.wrapped, _twice({**a.right, Attribute.EXTRACTABLE: True}, Attribute.SENSITIVE, false_first=False)
        )
    )


def sensitive_of_no_length(a: Attacker) -> bytes:
    encoded = EncodedTemplate(a.right)
    (place,) = (place for place in encoded.array if place.type == Attribute.SENSITIVE)
    place.length = 0
    return a.value(a.calls.unwrap(a.session, a.master, a.wrapped, encoded))


def dress_as(kind: int) -> Callable[[Attacker], bytes]:
    """As a key of another type, which may sign or be read where an AES key may not."""

    def attack(a: Attacker) -> bytes:
        return done(a.unwrap(KEY_TYPE=kind))

    attack.__name__ = f"dress_as_{kind:#x}"
    return attack


def dress_as_a_private_key(a: Attacker) -> bytes:
    return done(a.unwrap(CLASS=ObjectClass.PRIVATE_KEY, KEY_TYPE=KeyType.RSA))


def unwrap_by(name: str) -> Callable[[Attacker], bytes]:
    """By a mechanism with other checks, or none. Where the master wraps by it too, its own blob is tried."""
    mechanism = getattr(pkcs11.Mechanism, name)

    def attack(a: Attacker) -> bytes:
        master, blob = a.object(a.master), a.wrapped
        with suppress(pkcs11.PKCS11Error):
            blob = master.wrap_key(a.object(a.dek), mechanism=mechanism)
        template = {A(int(name)): value for name, value in a.right.items()}
        template |= {A.CLASS: pkcs11.ObjectClass.SECRET_KEY, A.KEY_TYPE: pkcs11.KeyType.AES}
        parameter = bytes(16) if name.startswith("AES_CBC") else None
        kinds = (pkcs11.ObjectClass.SECRET_KEY, pkcs11.KeyType.AES)
        decrypt = pkcs11.MechanismFlag.DECRYPT
        master.unwrap_key(*kinds, blob, mechanism=mechanism, mechanism_param=parameter, template=template, capabilities=decrypt)
        return b""

    attack.__name__ = f"unwrap_by_{name}"
    return attack


def wrap_the_master_under_its_clone(a: Attacker) -> bytes:
    """A clone is as TRUSTED as the master, so WRAP_WITH_TRUSTED does not stand in the way."""
    clone = a.calls.copy(a.session, a.master, {})
    try:
        return a.calls.wrap(a.session, clone, a.master)
    finally:
        a.calls.destroy(a.session, clone)  # or two would stand under one name


def encrypt_with_the_master(a: Attacker) -> bytes:
    block, length = (c_ubyte * 16)(), c_ulong(16)
    a.calls._call(29, "C_EncryptInit", c_ulong(a.session), byref(CkMechanism(Mechanism.AES_ECB, None, 0)), c_ulong(a.master))
    a.calls._call(30, "C_Encrypt", c_ulong(a.session), block, c_ulong(16), block, byref(length))
    return done(length.value)


def sign_with_the_master(a: Attacker) -> bytes:
    return a.calls.sign(a.session, a.master, Mechanism.AES_CMAC, b"oracle") and b""


def derive_from_the_master(a: Attacker) -> bytes:
    """AES_ECB_ENCRYPT_DATA: the master's encryption of a chosen block, as a key that can be read."""
    block = (c_ubyte * 32)()
    data = (c_void_p * 2)(addressof(block), 32)
    how, new = CkMechanism(0x1104, addressof(data), sizeof(data)), c_ulong()
    template = EncodedTemplate(
        {
            Attribute.CLASS: ObjectClass.SECRET_KEY,
            Attribute.KEY_TYPE: KeyType.GENERIC_SECRET,
            Attribute.VALUE_LEN: 32,
            Attribute.TOKEN: False,
            Attribute.SENSITIVE: False,
            Attribute.EXTRACTABLE: True,
        }
    )
    arguments = (c_ulong(a.session), byref(how), c_ulong(a.master), template.array, c_ulong(template.count), byref(new))
    a.calls._call(62, "C_DeriveKey", *arguments)
    return done(new.value)


# Attempts to get round TRUSTED


def trusted_on_unwrap(a: Attacker) -> bytes:
    return done(a.calls.unwrap(a.session, a.master, a.wrapped, {Attribute.TRUSTED: True, **a.right}))


def trusted_on_copy(a: Attacker) -> bytes:
    own = a.own_key(SENSITIVE=False, EXTRACTABLE=True)
    trusted = a.calls.copy(a.session, own, {Attribute.TOKEN: False, Attribute.TRUSTED: True})
    return unwrapped(a.value(own), a.calls.wrap(a.session, trusted, a.dek))


def wrap_under_a_planted_master(a: Attacker) -> bytes:
    """His own key with the master's label and id, and every other attribute that he can give it."""
    label, identity = (a.calls.read(a.session, a.master, name) for name in (Attribute.LABEL, Attribute.ID))
    planted = a.own_key(LABEL=label, ID=identity, SENSITIVE=False, EXTRACTABLE=True, UNWRAP=True)
    return unwrapped(a.value(planted), a.calls.wrap(a.session, planted, a.dek))


def _own_pair(a: Attacker) -> tuple[int, int]:
    public = {Attribute.TOKEN: False, Attribute.WRAP: True, Attribute.MODULUS_BITS: 2048, Attribute.PUBLIC_EXPONENT: b"\1\0\1"}
    private = {Attribute.TOKEN: False, Attribute.UNWRAP: True, Attribute.DECRYPT: True}
    return a.calls.generate_pair(a.session, Mechanism.RSA_PKCS_KEY_PAIR_GEN, public, private)


def wrap_under_own_rsa_by_oaep(a: Attacker) -> bytes:
    public, private = _own_pair(a)
    blob = a.calls.wrap_oaep(a.session, public, a.dek, Mechanism.SHA_1)
    how = {"mechanism": pkcs11.Mechanism.RSA_PKCS_OAEP, "mechanism_param": (pkcs11.Mechanism.SHA_1, pkcs11.MGF.SHA1, None)}
    return bytes(a.object(private).decrypt(blob, **how))


def wrap_under_own_rsa_by_v15(a: Attacker) -> bytes:
    public, private = _own_pair(a)
    blob = a.object(public).wrap_key(a.object(a.dek), mechanism=pkcs11.Mechanism.RSA_PKCS)
    return bytes(a.object(private).decrypt(blob, mechanism=pkcs11.Mechanism.RSA_PKCS))


def wrap_under_own_aes_by_cbc(a: Attacker) -> bytes:
    own = a.own_key(SENSITIVE=False, EXTRACTABLE=True)
    blob = a.calls.wrap(a.session, own, a.dek, Mechanism.AES_CBC)
    decryptor = Cipher(algorithms.AES(a.value(own)), modes.CBC(bytes(16))).decryptor()
    return decryptor.update(blob) + decryptor.finalize()


def let_the_born_key_be_read(a: Attacker) -> bytes:
    a.calls.set(a.session, a.dek, {Attribute.SENSITIVE: False})
    return a.value(a.dek)


def let_the_born_key_go_untrusted(a: Attacker) -> bytes:
    a.calls.set(a.session, a.dek, {Attribute.WRAP_WITH_TRUSTED: False})
    return wrap_the_born_key_under_own_key(a)


def let_the_born_key_derive(a: Attacker) -> bytes:
    a.calls.set(a.session, a.dek, {Attribute.DERIVE: True})
    return done(a.dek)


def copy_the_born_key(a: Attacker) -> bytes:
    return done(a.calls.copy(a.session, a.dek, {Attribute.TOKEN: True}))


def read_the_born_key(a: Attacker) -> bytes:
    return a.value(a.dek)


def save_an_operation(a: Attacker) -> bytes:
    """The state of a running decryption would hold key material."""
    length = c_ulong()
    a.calls._call(16, "C_GetOperationState", c_ulong(a.session), None, byref(length))
    return b""
