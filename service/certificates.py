"""Certificates of one installation: an authority whose key stays in the officer token, and what it issues.

The authority signs only requests (PKCS #10) whose maker proved to hold the key; every name and use is set here, and nothing
is taken over from the request but its public key. Profiles follow RFC 5280.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from service.errors import RequestRefused

AUTHORITY_DAYS, LEAF_DAYS, RENEW_DAYS = 3650, 365, 30
_EARLIER = timedelta(minutes=5)  # clocks of clients may be a little behind


def make_authority(key: ec.EllipticCurvePrivateKey, installation: str) -> x509.Certificate:
    """The self-signed certificate of an installation's authority; it may issue leaves and no further authority."""
    name = _name(f"Glottis authority {installation}")
    builder = _builder(name, name, key.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA256())


def issue_server(
    key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, request: bytes, hosts: Sequence[str]
) -> x509.Certificate:
    """A server's certificate for exactly `hosts` (names or addresses). Raises RequestRefused."""
    alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
    builder = _leaf(authority, request, hosts[0], ExtendedKeyUsageOID.SERVER_AUTH)
    return builder.add_extension(alternatives, critical=False).sign(key, hashes.SHA256())


def issue_client(key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, request: bytes, client: str) -> x509.Certificate:
    """A client's certificate under the name `client`. Raises RequestRefused."""
    return _leaf(authority, request, client, ExtendedKeyUsageOID.CLIENT_AUTH).sign(key, hashes.SHA256())


def issue_site(key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, request: bytes, name: str) -> x509.Certificate:
    """A site's certificate for its link to the other site: both ends of a connection, under `name`. Raises RequestRefused."""
    both = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    builder = _leaf(authority, request, name, *both)
    return builder.add_extension(x509.SubjectAlternativeName([_host(name)]), critical=False).sign(key, hashes.SHA256())


def new_request() -> tuple[bytes, bytes]:
    """A fresh P-256 key (PKCS #8, PEM) and a request for it (PEM): made where the key will be used."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name("Glottis")).sign(key, hashes.SHA256())
    return private_pem(key), request.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PKCS #8, PEM, unencrypted: its file's mode protects it."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def needs_renewal(certificate: bytes, authority: bytes, hosts: Sequence[str], now: datetime) -> bool:
    """Whether this server certificate (PEM) ends within RENEW_DAYS, is another authority's, or names other hosts."""
    leaf, issuer = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(authority)
    named = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    try:
        leaf.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return True
    return set(named) != {_host(host) for host in hosts} or leaf.not_valid_after_utc < now + timedelta(days=RENEW_DAYS)


def hosts(public_base_url: str, bind: str) -> list[str]:
    """What clients may call a server: its public name first, then the names of its machine for itself."""
    public = urlsplit(public_base_url).hostname or "localhost"
    bound = [] if bind in {"0.0.0.0", "::"} else [bind]  # noqa: S104 — compared, not bound
    return list(dict.fromkeys([public, "localhost", "127.0.0.1", "::1", *bound]))


def _leaf(authority: x509.Certificate, request: bytes, name: str, *uses: x509.ObjectIdentifier) -> x509.CertificateBuilder:
    public = _proved_key(request)
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = _builder(_name(name), authority.subject, public, LEAF_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)


def _proved_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The request's P-256 key. Raises RequestRefused unless its own signature proves that the maker holds it."""
    try:
        asked = x509.load_pem_x509_csr(request)
    except ValueError:
        raise RequestRefused("this is no certificate request (PKCS #10, PEM)") from None
    public = asked.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise RequestRefused("the request's key is not a P-256 key")
    if not asked.is_signature_valid:
        raise RequestRefused("the request is not signed by its own key")
    return public


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _EARLIER).not_valid_after(now + timedelta(days=days))


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
