"""What somebody with the serving PIN tries: each function returns the key's bytes, or nothing where success is the breach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pkcs11
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from pkcs11 import Attribute as A
from weak_masters import LEFT_OUT

from keyvault.pkcs11_names import Attribute, KeyType, Mechanism
from keyvault.pkcs11_raw import RawCalls
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

    def unwrap(self, **weaker: Any) -> int:
        template = {**DEK_OPENING, **{Attribute[name]: value for name, value in weaker.items()}}
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
    return a.value(a.unwrap(SENSITIVE=False))


def leave_sensitive_out(a: Attacker) -> bytes:
    return a.value(a.unwrap(SENSITIVE=LEFT_OUT))


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
