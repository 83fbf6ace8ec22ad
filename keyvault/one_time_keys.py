"""One-time RSA keys that carry a new master once: made as session objects, named by SubjectPublicKeyInfo (RFC 5280, 4.1.2.7).

Where several tokens are to receive one master, their keys stand one after the other: DER says itself where each ends.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from keyvault.errors import CeremonyRefused
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession

RSA_BITS = 3072  # SP 800-57 Part 1, table 2: 128 bits of strength, as P-256
_EXPONENT = (65537).to_bytes(3, "big")
_SEQUENCE, _TWO_LENGTH_BYTES = 0x30, 0x82

_PUBLIC_HALF: Template = {
    Attribute.TOKEN: False,
    Attribute.PRIVATE: False,
    Attribute.ENCRYPT: False,
    Attribute.VERIFY: False,
    Attribute.WRAP: False,
    Attribute.MODULUS_BITS: RSA_BITS,
    Attribute.PUBLIC_EXPONENT: _EXPONENT,
    Attribute.MODIFIABLE: False,
}


def _private_half(*, private: bool) -> Template:
    return {
        Attribute.TOKEN: False,
        Attribute.PRIVATE: private,
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False,
        Attribute.DECRYPT: False,
        Attribute.SIGN: False,
        Attribute.UNWRAP: True,
        Attribute.COPYABLE: False,
        Attribute.ALLOWED_MECHANISMS: (Mechanism.RSA_PKCS_OAEP,),
        Attribute.MODIFIABLE: False,
    }


def made(session: TokenSession, *, private: bool) -> tuple[int, int]:
    """A new pair (public, private). `private`: it is a user's, and ends with his login; an officer sees no such objects."""
    half = _private_half(private=private)
    return session.calls.generate_pair(session.handle, Mechanism.RSA_PKCS_KEY_PAIR_GEN, _PUBLIC_HALF, half)


def public_bytes(session: TokenSession, public: int) -> bytes:
    """The public half as SubjectPublicKeyInfo, DER."""
    n, e = (
        int.from_bytes(session.calls.read(session.handle, public, name), "big")
        for name in (Attribute.MODULUS, Attribute.PUBLIC_EXPONENT)
    )
    return RSAPublicNumbers(e, n).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def apart(transport: bytes) -> list[bytes]:
    """Each key of those that stand one after the other. Raises CeremonyRefused where they are cut short."""
    keys = []
    while transport:
        if len(transport) < 4 or (transport[0], transport[1]) != (_SEQUENCE, _TWO_LENGTH_BYTES):
            raise CeremonyRefused("the one-time key cannot be read")
        end = 4 + int.from_bytes(transport[2:4], "big")
        keys.append(transport[:end])
        transport = transport[end:]
    return keys


def template(transport: bytes) -> Template:
    """The receiver's public key as the sender's token takes it, for wrapping alone.

    Raises CeremonyRefused unless this is one RSA key of at least 3072 bits.
    """
    try:
        key = load_der_public_key(transport)
    except ValueError as error:
        raise CeremonyRefused("the one-time key cannot be read") from error
    if not isinstance(key, RSAPublicKey) or key.key_size < RSA_BITS:
        raise CeremonyRefused(f"the one-time key is no RSA key of {RSA_BITS} bits or more")
    numbers = key.public_numbers()
    return {
        Attribute.CLASS: ObjectClass.PUBLIC_KEY,
        Attribute.KEY_TYPE: KeyType.RSA,
        Attribute.MODULUS: numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big"),
        Attribute.PUBLIC_EXPONENT: numbers.e.to_bytes((numbers.e.bit_length() + 7) // 8, "big"),
        Attribute.TOKEN: False,
        Attribute.PRIVATE: False,
        Attribute.ENCRYPT: False,
        Attribute.VERIFY: False,
        Attribute.WRAP: True,
        Attribute.ALLOWED_MECHANISMS: (Mechanism.RSA_PKCS_OAEP,),
        Attribute.MODIFIABLE: False,
    }
