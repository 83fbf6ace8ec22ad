"""Certificates: signed by a key that stays in its token, with names and uses that no request can choose."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from keyvault.hsm import KeyName
from service import certificates
from service.authority_key import TokenPrivateKey
from service.errors import RequestRefused

HOSTS = ["localhost", "127.0.0.1", "::1"]


class SigningToken:
    """The two things that certificates ask of a token, with a key in this test's memory."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def sign(self, key: KeyName, data: bytes) -> bytes:
        assert key is KeyName.CERTIFICATE_AUTHORITY
        r, s = decode_dss_signature(self._key.sign(data, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32) + s.to_bytes(32)

    def public_key(self, key: KeyName) -> bytes:
        return self._key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def key():
    return TokenPrivateKey(SigningToken(), KeyName.CERTIFICATE_AUTHORITY)


@pytest.fixture(scope="module")
def authority(key):
    return certificates.make_authority(key, "test")


def verifier(authority):
    return PolicyBuilder().store(Store([authority])).time(datetime.now(UTC))


def test_a_servers_certificate_holds_for_its_hosts_and_no_other(key, authority):
    leaf = certificates.issue_server(key, authority, certificates.new_request()[1], HOSTS)
    verifier(authority).build_server_verifier(x509.DNSName("localhost")).verify(leaf, [])
    with pytest.raises(VerificationError):
        verifier(authority).build_server_verifier(x509.DNSName("elsewhere.example")).verify(leaf, [])
    with pytest.raises(VerificationError):
        verifier(authority).build_client_verifier().verify(leaf, [])


def test_a_clients_certificate_is_no_servers(key, authority):
    leaf = certificates.issue_client(key, authority, certificates.new_request()[1], "studio")
    assert leaf.subject.rfc4514_string() == "CN=studio"
    assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(VerificationError):
        verifier(authority).build_server_verifier(x509.DNSName("localhost")).verify(leaf, [])


def test_nothing_is_taken_from_a_request_but_its_key(key, authority):
    mine = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")]))
    asked = asked.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    request = asked.sign(mine, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    leaf = certificates.issue_client(key, authority, request, "studio")
    assert leaf.public_key() == mine.public_key()
    assert leaf.subject.rfc4514_string() == "CN=studio"
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_requests_that_prove_nothing_are_refused(key, authority):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    other_kind = builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    other_curve = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    good = x509.load_pem_x509_csr(certificates.new_request()[1]).public_bytes(serialization.Encoding.DER)
    forged = x509.load_der_x509_csr(good[:-1] + bytes([good[-1] ^ 1]))
    for request in (other_kind, other_curve, forged):
        with pytest.raises(RequestRefused):
            certificates.issue_client(key, authority, request.public_bytes(serialization.Encoding.PEM), "studio")
    with pytest.raises(RequestRefused, match="no certificate request"):
        certificates.issue_client(key, authority, b"-----BEGIN NOTHING-----", "studio")


def test_the_key_never_leaves_its_shape(key):
    for refused in (key.private_numbers, key.private_bytes, lambda: key.exchange(None, None)):
        with pytest.raises(TypeError):
            refused()
    with pytest.raises(TypeError, match="SHA-256 only"):
        key.sign(b"data", ec.ECDSA(hashes.SHA384()))
    assert hashlib.sha256(b"").hexdigest() not in repr(key)


def test_a_server_certificate_is_renewed_in_time_and_for_new_hosts(key, authority):
    ca = authority.public_bytes(serialization.Encoding.PEM)
    leaf = certificates.issue_server(key, authority, certificates.new_request()[1], HOSTS).public_bytes(serialization.Encoding.PEM)
    now = datetime.now(UTC)
    assert not certificates.needs_renewal(leaf, ca, HOSTS, now)
    assert certificates.needs_renewal(leaf, ca, [*HOSTS, "voice.example"], now)
    assert certificates.needs_renewal(leaf, ca, HOSTS, now + timedelta(days=340))
    stranger = TokenPrivateKey(SigningToken(), KeyName.CERTIFICATE_AUTHORITY)
    other = certificates.make_authority(stranger, "test").public_bytes(serialization.Encoding.PEM)
    assert certificates.needs_renewal(leaf, other, HOSTS, now)
