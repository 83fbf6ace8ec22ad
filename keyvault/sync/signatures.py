"""Signatures on statements: ECDSA over P-256 with SHA-256, raw r | s (FIPS 186-5, section 6), low s only.

Only public keys come here; private keys stay in the sites' HSMs and the officers' tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from keyvault.sync.errors import SignatureInvalid

Sign = Callable[[bytes], bytes]
"""Signs a statement's bytes with the key that the roster names for the signer."""

Verify = Callable[[bytes, bytes, bytes], None]
"""(public key, data, signature): raises SignatureInvalid unless the signature holds."""

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # SP 800-186, section 3.2.1.3


def verify_p256(public_key: bytes, data: bytes, signature: bytes) -> None:
    """Check `signature` by the key whose SubjectPublicKeyInfo (DER) is given. Raises SignatureInvalid."""
    try:
        key = load_der_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureInvalid("the public key cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SignatureInvalid("the public key is not on P-256")
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    # Without the low-s rule anyone could turn one signature into a second, different one.
    if len(signature) != 64 or not 0 < r < _ORDER or not 0 < s <= _ORDER // 2:
        raise SignatureInvalid("the signature has another form than r | s with a low s")
    try:
        key.verify(encode_dss_signature(r, s), data, ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise SignatureInvalid from error


def low_s(der: bytes) -> bytes:
    """An ECDSA signature over P-256 as DER has it, in the one form that `verify_p256` takes."""
    r, s = decode_dss_signature(der)
    return r.to_bytes(32, "big") + min(s, _ORDER - s).to_bytes(32, "big")
