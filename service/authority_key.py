"""The authority's key, which stays in the officer token, in the shape that `cryptography` signs certificates with."""

from __future__ import annotations

from typing import Any, NoReturn

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from keyvault.hsm import Hsm, KeyName


class TokenPrivateKey(ec.EllipticCurvePrivateKey):
    """A P-256 key of a token in the shape that `cryptography` signs certificates with. The key itself never appears."""

    def __init__(self, hsm: Hsm, name: KeyName) -> None:
        public = serialization.load_der_public_key(hsm.public_key(name))
        assert isinstance(public, ec.EllipticCurvePublicKey)
        self._hsm, self._name, self._public = hsm, name, public

    def sign(self, data: Any, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        """ECDSA over SHA-256, DER as X.509 wants it."""
        if not isinstance(signature_algorithm.algorithm, hashes.SHA256):
            raise TypeError("this key signs SHA-256 only")
        raw = self._hsm.sign(self._name, bytes(data))
        return encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))

    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._public

    @property
    def curve(self) -> ec.EllipticCurve:
        return self._public.curve

    @property
    def key_size(self) -> int:
        return self._public.key_size

    def exchange(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this key only signs")

    def private_numbers(self) -> NoReturn:
        raise TypeError("this key stays in its token")

    def private_bytes(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this key stays in its token")

    def __copy__(self) -> TokenPrivateKey:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> TokenPrivateKey:
        return self
