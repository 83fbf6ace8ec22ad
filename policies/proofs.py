"""Proof that the caller holds the key: DPoP (RFC 9449), and the certificate's thumbprint (RFC 8705 §3.1)."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from jwt.algorithms import ECAlgorithm
from jwt.exceptions import InvalidKeyError

from policies import jws
from policies.errors import NonceRequired, ProofInvalid
from policies.grants import VerifiedProof
from policies.nonces import Nonces
from policies.tokens import jwk_thumbprint

PROOF_TYPE = "dpop+jwt"
MAX_PROOF_LENGTH = 4096
PROOF_AGE_S = 30
"""How old a proof may be. Clients' clocks are not ours, so it is wider than a token's life."""
PROOF_LEAD_S = 5
"""How far ahead of ours a client's clock may be."""

_KEYS, _URLS = 1024, 256
_HEADER = frozenset({"alg", "typ", "jwk"})
_CLAIMS = frozenset({"htm", "htu", "iat", "jti"})
_ES256 = ECAlgorithm(ECAlgorithm.SHA256, SECP256R1)
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!$-;=@-Z_a-z~%]*)?(?:[?#][!-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_PERCENT = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class ProofVerifier:
    """Verifies DPoP proofs for one service, whose public address alone says what `htu` must be."""

    def __init__(self, public_base_url: str, clock: Callable[[], float], nonces: Nonces | None = None) -> None:
        """With `nonces`, a client whose clock is off is told to use one; without, its proofs are refused."""
        self._base = public_base_url.rstrip("/")
        normal_url(self._base)
        self._clock = clock
        self._nonces = nonces

    def verify(self, proof: str, htm: str, path: str, access_token: str | None) -> VerifiedProof:
        """Check a proof for method `htm` at `path` (as received, without query), by RFC 9449 §4.3. Raises ProofInvalid.

        Step 1 (one header) and the replay of §11.1 are the caller's. A proof with a nonce is as old as its nonce, whatever its
        `iat` says. Raises NonceRequired, with a nonce to use, where the nonce is none of ours or `iat` is too far from our clock.
        """
        try:
            message = jws.split(proof, limit=MAX_PROOF_LENGTH)
            jws.check_header(message.header, typ=PROOF_TYPE, alg="ES256", members=_HEADER)
            key, jkt = _known_key(json.dumps(message.header["jwk"], sort_keys=True))
            # s and n-s both pass here, unlike in tokens: clients' libraries write either. Single use is keyed on jti.
            if len(message.signature) != 64 or not _ES256.verify(message.signed, key, message.signature):
                raise ValueError("signature")
            claims = jws.strict_object(message.payload)
            issued_at = self._check_claims(claims, htm, path, access_token)
            return VerifiedProof(jkt=jkt, jti=jws.identifier(claims["jti"]), issued_at=issued_at)
        except ValueError as problem:
            raise ProofInvalid(str(problem)) from None

    def _check_claims(self, claims: jws.Members, htm: str, path: str, access_token: str | None) -> int:
        if not claims.keys() >= _CLAIMS:
            raise ValueError("a claim is missing")
        if claims["htm"] != htm:
            raise ValueError("htm is another method")
        if not isinstance(claims["htu"], str) or normal_url(claims["htu"]) != _our_url(self._base + path):
            raise ValueError("htu is another address")
        expected = None if access_token is None else token_hash(access_token)
        if claims.get("ath") != expected:
            raise ValueError("ath is for another token")
        return self._issued_at(jws.whole(claims["iat"], "iat"), claims)

    def _issued_at(self, issued_at: int, claims: jws.Members) -> int:
        if self._nonces is None:
            self.check_age(issued_at)
            return issued_at
        if "nonce" in claims:
            found = self._nonces.issued_at(jws.text(claims["nonce"], "nonce"), PROOF_AGE_S)
            if found is None:
                raise NonceRequired(self._nonces.fresh())
            return found
        try:
            self.check_age(issued_at)
        except ProofInvalid:
            raise NonceRequired(self._nonces.fresh()) from None
        return issued_at

    def check_age(self, issued_at: int) -> None:
        """Raise ProofInvalid unless a proof made at `issued_at` is acceptable now."""
        if not issued_at - PROOF_LEAD_S <= self._clock() <= issued_at + PROOF_AGE_S:
            raise ProofInvalid("iat is too far from our clock")


@lru_cache(_KEYS)
def _known_key(jwk: str) -> tuple[EllipticCurvePublicKey, str]:
    """The key of a JWK and its thumbprint. Clients sign with the same key again and again: those in use are kept.

    Raises ValueError, each time anew, so that what is refused takes nobody's place.
    """
    members = json.loads(jwk)
    return public_key(members), jwk_thumbprint(members)


@lru_cache(_URLS)
def _our_url(url: str) -> str:
    return normal_url(url)


def make_proof(
    private_key: EllipticCurvePrivateKey, htm: str, htu: str, access_token: str | None = None, nonce: str | None = None
) -> str:
    """For clients: a fresh proof, signed with their P-256 key, for one request; with the server's nonce, where it gave one."""
    header = {"typ": PROOF_TYPE, "alg": "ES256", "jwk": public_jwk(private_key.public_key())}
    claims: dict[str, Any] = {"htm": htm, "htu": htu, "iat": int(time.time()), "jti": secrets.token_urlsafe(16)}
    if access_token is not None:
        claims["ath"] = token_hash(access_token)
    if nonce is not None:
        claims["nonce"] = nonce
    signed = ".".join(jws.encode(json.dumps(part, separators=(",", ":")).encode()) for part in (header, claims))
    return f"{signed}.{jws.encode(_ES256.sign(signed.encode(), private_key))}"


def public_jwk(key: EllipticCurvePublicKey) -> dict[str, Any]:
    """A P-256 public key as a JWK with its required members alone."""
    return _ES256.to_jwk(key, as_dict=True)


def public_key(jwk: Any) -> EllipticCurvePublicKey:
    """The key of a public P-256 JWK. Raises ValueError, also for one with private members or meant for another use."""
    if not isinstance(jwk, dict) or jwk.get("kty") != "EC" or jwk.get("crv") != "P-256":
        raise ValueError("jwk is not a P-256 key")
    # WebCrypto exports carry `ext` and `key_ops`; whatever else a key says about itself must not contradict its use here.
    meant = {"alg": "ES256", "use": "sig", "key_ops": ["verify"], "ext": True}
    for name in jwk.keys() - {"kty", "crv", "x", "y", "kid"}:
        if name not in meant or jwk[name] != meant[name]:
            raise ValueError("jwk has a member that a verification key may not have")
    for name in ("x", "y"):
        if not isinstance(jwk.get(name), str) or len(jws.decode(jwk[name])) != 32:
            raise ValueError("jwk coordinates")
    try:
        key = _ES256.from_jwk(jwk)
    except InvalidKeyError:
        raise ValueError("jwk is not a point of the curve") from None
    if not isinstance(key, EllipticCurvePublicKey):
        raise TypeError("from_jwk gave a private key for a public one")
    return key


def certificate_thumbprint(der: bytes) -> str:
    """`x5t#S256` of a certificate (RFC 8705 §3.1): base64url of the SHA-256 of its DER."""
    return jws.encode(hashlib.sha256(der).digest())


def token_hash(access_token: str) -> str:
    """`ath` (RFC 9449 §4.2): base64url of the SHA-256 of the token as it is sent."""
    return jws.encode(hashlib.sha256(access_token.encode()).digest())


def normal_url(url: str) -> str:
    """An address after the normalisation of RFC 3986 §6.2.2 and §6.2.3, without query and fragment (RFC 9449 §4.3 step 9).

    Raises ValueError for what a request's address cannot be: user information, spaces, dot segments, other schemes.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError("not an address of ours")
    scheme, host = match["scheme"].lower(), match["host"].lower()
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    path = _normal_path(match["path"] or "/")
    return f"{scheme}://{host}:{port}{path}"


def _normal_path(path: str) -> str:
    if _PERCENT.sub("", path).count("%"):
        raise ValueError("a percent sign that starts no escape")
    path = _PERCENT.sub(lambda found: _escape(int(found[1], 16)), path)
    if any(segment in (".", "..") for segment in path.split("/")):
        raise ValueError("dot segments")
    return path


def _escape(byte: int) -> str:
    return chr(byte) if byte in _UNRESERVED else f"%{byte:02X}"
