"""Access tokens: ES256 JWTs signed in the HSM, bound to the client's certificate and DPoP key, to voice, key and text.

Where a voice allows it, a token may be bound to the certificate alone; a browser's is bound to its key alone.

Standards: RFC 7519 as RFC 8725 restricts it, RFC 7800 and RFC 8705 §3.1 and RFC 9449 §6 for `cnf`.
The order of the checks is part of the promise: lengths, spelling, header, signature, times, claims.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key
from jwt.algorithms import ECAlgorithm

from keyvault.hsm import Hsm
from keyvault.records import KeyRef
from policies import jws
from policies.errors import TokenExpired, TokenInvalid, TokenMalformed
from policies.grants import CLOCK_TOLERANCE_S, Agreed, Binding, Purpose, VerifiedToken

if TYPE_CHECKING:  # clients want thumbprints from here, and no database
    from keyvault.signing.serving import SigningKeys

TOKEN_TYPE = "voice-synth+jwt"  # noqa: S105 — a media type
TOKEN_LIFETIME_S = 5
MAX_TOKEN_LENGTH = 4096
MAX_CHARS = 5000
"""The longest text, in characters, that a token may be asked for."""

_HEADER = frozenset({"alg", "typ", "kid"})
_REQUIRED = frozenset({"iss", "aud", "sub", "client_id", "tenant", "purpose", "cnf", "iat", "nbf", "exp", "jti"})
_BY_PURPOSE: Mapping[Purpose, frozenset[str]] = {
    Purpose.SPEAK: frozenset({"voice", "vkey", "text_sha256", "max_chars"}),
    Purpose.COMPARE: frozenset({"voice", "vkey"}),
    Purpose.ENROL: frozenset({"consent"}),
    Purpose.CONSENT: frozenset(),
    Purpose.READ: frozenset(),
    Purpose.ERASE: frozenset({"voice"}),
    Purpose.LIVENESS: frozenset({"voice", "vkey"}),
    Purpose.APPROVE: frozenset({"voice", "text_sha256", "beneficiary"}),
}
_POSSIBLE: Mapping[Purpose, frozenset[str]] = {
    Purpose.SPEAK: frozenset({"liveness", "agreed"}),
    Purpose.COMPARE: frozenset({"liveness"}),
}
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_SHA256_BASE64URL = re.compile(r"[A-Za-z0-9_-]{43}")
Value = TypeVar("Value")
_ES256 = ECAlgorithm(ECAlgorithm.SHA256, SECP256R1)


@dataclass(frozen=True)
class Entitlement:
    """What a token is to say, before it has a time. Which fields must be set follows from the purpose."""

    jti: str
    tenant: str
    client_id: str
    purpose: Purpose
    x5t_s256: str | None
    jkt: str | None
    voice: UUID | None = None
    key: KeyRef | None = None
    consent: UUID | None = None
    text_sha256: str | None = None
    max_chars: int | None = None
    liveness: UUID | None = None
    agreed: Agreed | None = None
    beneficiary: str | None = None


class TokenMint:
    """Mints tokens. The signing key never leaves the HSM."""

    def __init__(self, hsm: Hsm, keys: SigningKeys, issuer: str, audience: str, clock: Callable[[], float]) -> None:
        self._hsm = hsm
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._clock = clock
        self._kid = lru_cache(maxsize=8)(key_id)

    def new_jti(self) -> str:
        """128 random bits from the HSM."""
        return jws.encode(self._hsm.random(16))

    def mint(self, entitlement: Entitlement) -> str:
        """A signed token that begins now and lives TOKEN_LIFETIME_S. Raises ValueError if the entitlement is not whole."""
        now = int(self._clock())
        claims = _claims(entitlement) | {
            "iss": self._issuer,
            "aud": self._audience,
            "iat": now,
            "nbf": now,
            "exp": now + TOKEN_LIFETIME_S,
        }
        _check_members(claims, entitlement.purpose)
        _confirmation(claims["cnf"])
        signer = self._keys.signer()
        header = {"alg": "ES256", "typ": TOKEN_TYPE, "kid": self._kid(signer.public_key)}
        signed = f"{_segment(header)}.{_segment(claims)}"
        return f"{signed}.{jws.encode(self._keys.sign(signer, signed.encode()))}"


class TokenVerifier:
    """Verifies tokens against the public keys given, and no others: a token's header picks among them by `kid`."""

    def __init__(self, public_keys: Iterable[bytes], issuer: str, audience: str, clock: Callable[[], float]) -> None:
        """`public_keys`: SubjectPublicKeyInfo DER of P-256 keys, the current one and those that may still be in use. They are
        asked for anew with each token, so that a collection that changes is followed."""
        self._public_keys = public_keys
        self._loaded = lru_cache(maxsize=8)(lambda der: (key_id(der), _p256(der)))
        self._issuer = issuer
        self._audience = audience
        self._clock = clock

    def verify(self, token: str) -> VerifiedToken:
        """The token's content, checked up to its binding to a request. Raises TokenMalformed, TokenInvalid, TokenExpired."""
        try:
            message = jws.split(token, limit=MAX_TOKEN_LENGTH)
            jws.check_header(message.header, typ=TOKEN_TYPE, alg="ES256", members=_HEADER)
        except ValueError as problem:
            raise TokenMalformed(str(problem)) from None
        kid = message.header["kid"]
        key = dict(map(self._loaded, self._public_keys)).get(kid) if isinstance(kid, str) else None
        if key is None:
            raise TokenInvalid("no such key")
        # High-S is the same signature spelled otherwise; our HSM door never writes it.
        if not jws.is_low_s(message.signature) or not _ES256.verify(message.signed, key, message.signature):
            raise TokenInvalid("signature")
        try:
            return self._read(jws.strict_object(message.payload))
        except ValueError as problem:
            raise TokenInvalid(str(problem)) from None

    def _read(self, claims: jws.Members) -> VerifiedToken:
        issued_at, expires_at = self._check_times(claims)
        if claims.get("iss") != self._issuer or claims.get("aud") != self._audience:
            raise TokenInvalid("issuer or audience")
        purpose = Purpose(jws.text(claims.get("purpose"), "purpose"))
        _check_members(claims, purpose)
        client_id = jws.text(claims["client_id"], "client_id")
        if claims["sub"] != client_id:
            raise TokenInvalid("sub is not the client")
        x5t_s256, jkt = _confirmation(claims["cnf"])
        return VerifiedToken(
            issuer=self._issuer,
            jti=jws.identifier(claims["jti"]),
            tenant=jws.text(claims["tenant"], "tenant"),
            client_id=client_id,
            purpose=purpose,
            voice=_optional(claims, "voice", _uuid),
            key=_optional(claims, "vkey", _key_ref),
            consent=_optional(claims, "consent", _uuid),
            text_sha256=_optional(claims, "text_sha256", _text_hash),
            max_chars=_optional(claims, "max_chars", lambda value: jws.whole(value, "max_chars")),
            x5t_s256=x5t_s256,
            jkt=jkt,
            issued_at=issued_at,
            expires_at=expires_at,
            liveness=_optional(claims, "liveness", _uuid),
            agreed=_optional(claims, "agreed", _agreed),
            beneficiary=_optional(claims, "beneficiary", lambda value: jws.text(value, "beneficiary")),
        )

    def _check_times(self, claims: jws.Members) -> tuple[int, int]:
        issued_at, not_before, expires_at = (jws.whole(claims.get(name), name) for name in ("iat", "nbf", "exp"))
        if not issued_at <= not_before < expires_at <= issued_at + TOKEN_LIFETIME_S:
            raise TokenInvalid("lifetime")
        if not not_before - CLOCK_TOLERANCE_S <= self._clock() < expires_at:
            raise TokenExpired()
        return issued_at, expires_at


def key_id(public_key: bytes) -> str:
    """The RFC 7638 thumbprint of a P-256 key given as SubjectPublicKeyInfo DER: its `kid`."""
    return jwk_thumbprint(_ES256.to_jwk(_p256(public_key), as_dict=True))


def jwks(public_keys: Iterable[bytes]) -> dict[str, list[dict[str, Any]]]:
    """The JWK set (RFC 7517 §5) of these P-256 keys, for /.well-known/jwks.json."""
    return {
        "keys": [
            _ES256.to_jwk(_p256(der), as_dict=True) | {"kid": key_id(der), "use": "sig", "alg": "ES256"} for der in public_keys
        ]
    }


def jwk_thumbprint(jwk: Mapping[str, Any]) -> str:
    """RFC 7638: SHA-256 over the required members alone, sorted, without spaces; base64url. RFC 8037 names those of OKP."""
    required = {"EC": ("crv", "kty", "x", "y"), "OKP": ("crv", "kty", "x"), "RSA": ("e", "kty", "n")}[jwk["kty"]]
    text = json.dumps({name: jwk[name] for name in required}, separators=(",", ":"), sort_keys=True)
    return jws.encode(hashlib.sha256(text.encode()).digest())


def _p256(der: bytes) -> EllipticCurvePublicKey:
    key = load_der_public_key(der)
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError("a token signer is a P-256 key")  # noqa: TRY004 — a wrong value of the right type
    return key


def _segment(value: Mapping[str, Any]) -> str:
    return jws.encode(json.dumps(value, separators=(",", ":")).encode())


def _claims(entitlement: Entitlement) -> dict[str, Any]:
    key, agreed = entitlement.key, entitlement.agreed
    optional = {
        "voice": entitlement.voice and str(entitlement.voice),
        "vkey": key and {"id": str(key.id), "version": key.version, "ring": key.ring, "ring_version": key.ring_version},
        "consent": entitlement.consent and str(entitlement.consent),
        "text_sha256": entitlement.text_sha256,
        "max_chars": entitlement.max_chars,
        "liveness": entitlement.liveness and str(entitlement.liveness),
        "agreed": agreed and {"id": str(agreed.id), "approver": agreed.approver},
        "beneficiary": entitlement.beneficiary,
    }
    return {
        "sub": entitlement.client_id,
        "client_id": entitlement.client_id,
        "tenant": entitlement.tenant,
        "purpose": entitlement.purpose.value,
        "jti": entitlement.jti,
        "cnf": _present({"x5t#S256": entitlement.x5t_s256, "jkt": entitlement.jkt}),
    } | _present(optional)


def _present(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _check_members(claims: Mapping[str, Any], purpose: Purpose) -> None:
    """Every claim that this purpose needs, and none that it cannot have. Raises ValueError."""
    needed = _REQUIRED | _BY_PURPOSE[purpose]
    if not needed <= claims.keys() <= needed | _POSSIBLE.get(purpose, frozenset()):
        raise ValueError("claims other than this purpose has")


def _confirmation(cnf: Any) -> tuple[str | None, str | None]:
    """Exactly the members of one binding; one that we do not know could not be checked, so it is refused."""
    if not isinstance(cnf, dict) or cnf.keys() not in [binding.members for binding in Binding]:
        raise ValueError("cnf members")
    for value in cnf.values():
        if not isinstance(value, str) or not _SHA256_BASE64URL.fullmatch(value):
            raise ValueError("cnf values")
    return cnf.get("x5t#S256"), cnf.get("jkt")


def _optional(claims: Mapping[str, Any], name: str, read: Callable[[Any], Value]) -> Value | None:
    """None for a claim that is absent, which `_check_members` allowed; a null is a value, and refused as such."""
    return read(claims[name]) if name in claims else None


def _uuid(value: Any) -> UUID:
    if not isinstance(value, str) or str(UUID(value)) != value:
        raise ValueError("not a UUID in its usual spelling")
    return UUID(value)


def _key_ref(value: Any) -> KeyRef:
    if not isinstance(value, dict) or value.keys() != {"id", "version", "ring", "ring_version"}:
        raise ValueError("vkey members")
    return KeyRef(
        _uuid(value["id"]),
        jws.whole(value["version"], "version"),
        jws.text(value["ring"], "ring"),
        jws.whole(value["ring_version"], "ring_version"),
    )


def _agreed(value: Any) -> Agreed:
    if not isinstance(value, dict) or value.keys() != {"id", "approver"}:
        raise ValueError("agreed members")
    return Agreed(_uuid(value["id"]), jws.text(value["approver"], "approver"))


def _text_hash(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256_HEX.fullmatch(value):
        raise ValueError("text_sha256 is not a SHA-256 in hex")
    return value
