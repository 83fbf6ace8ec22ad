"""Certificates from the handshake and from proxies (RFC 9440), over real connections: believed from nobody but our proxies."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import shutil
import socket
import ssl
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn import Server

from policies.proofs import certificate_thumbprint
from service import certificates
from service.edge.authorities import Authorities, CertificateRefused
from service.edge.proxied import ProxiedCertificate, certificate_in, written
from service.edge.tls import client_certificate, server_config, unix_config


class Issuer:
    """An authority, and what it issues into folders."""

    def __init__(self, name: str = "ours") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = certificates.make_authority(self.key, name)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def client(self, folder: Path, name: str, issue=certificates.issue_client) -> Client:
        folder.mkdir(exist_ok=True)
        private, request = certificates.new_request()
        made = issue(self.key, self.certificate, request, name)
        (folder / f"{name}.key").write_bytes(private)
        (folder / f"{name}.pem").write_bytes(made.public_bytes(Encoding.PEM))
        return Client(folder / f"{name}.pem", folder / f"{name}.key", made.public_bytes(Encoding.DER))


class Client:
    def __init__(self, pem: Path, key: Path, der: bytes) -> None:
        self.pem, self.key, self.der = pem, key, der
        self.thumbprint = certificate_thumbprint(der)


class Edge:
    """One edge on a TCP and one on a Unix socket, with an application that says whose certificate it sees."""

    def __init__(self, folder: Path, issuer: Issuer, proxies: tuple[str, ...]) -> None:
        self.folder, self.issuer, self.counts = folder, issuer, Counter()
        private, request = certificates.new_request()
        made = certificates.issue_server(issuer.key, issuer.certificate, request, ["localhost"])
        (folder / "server.key").write_bytes(private)
        (folder / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
        (folder / "ca.pem").write_bytes(issuer.pem)
        (folder / "authorities").mkdir()
        self.authorities = Authorities(folder)
        app = Starlette(routes=[Route("/", seen)])
        count = lambda code: self.counts.update([code])  # noqa: E731
        self.app = ProxiedCertificate(app, authorities=self.authorities, proxies=proxies, count=count)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "edge.sock"))
        self.unix.listen()

    @contextmanager
    def serving(self) -> Iterator[None]:
        plain = {"log_config": None, "lifespan": "off"}
        configs = [
            (server_config(self.app, self.folder, factory=self.authorities.context_factory(), **plain), self.tcp),
            (unix_config(self.app, **plain), self.unix),
        ]
        servers = [(Server(config), listener) for config, listener in configs]
        threads = [threading.Thread(target=lambda s=s, at=at: asyncio.run(s.serve(sockets=[at])), daemon=True) for s, at in servers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for server, _ in servers:
                server.should_exit = True
            for thread in threads:
                thread.join(10)
            self.tcp.close()
            self.unix.close()

    def over_tls(self, client: Client | None = None, *headers: bytes) -> tuple[int, dict]:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if client is not None:
            context.load_cert_chain(client.pem, client.key)
        plain = socket.create_connection(self.tcp.getsockname(), 10)
        return asked(context.wrap_socket(plain, server_hostname="localhost"), headers)

    def over_unix(self, *headers: bytes) -> tuple[int, dict]:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(10)
        plain.connect(self.unix.getsockname())
        return asked(plain, headers)


async def seen(request: Request) -> JSONResponse:
    found = client_certificate(request)
    told = {"client": certificate_thumbprint(found) if found else None}
    return JSONResponse(told | {"headers": [name for name in request.headers if name.startswith("client-cert")]})


def asked(connection: socket.socket, headers: tuple[bytes, ...]) -> tuple[int, dict]:
    """Status, and whose certificate was seen or the refusal's code."""
    with connection:
        lines = b"".join(b"Client-Cert: " + value + b"\r\n" for value in headers)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + lines + b"\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = json.loads(answer.read())
    return answer.status, body.get("error", body)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="glottis-edge-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def alice(folder: Path, issuer: Issuer) -> Client:
    return issuer.client(folder, "alice")


@pytest.fixture(scope="module")
def proxy(folder: Path, issuer: Issuer) -> Client:
    return issuer.client(folder, "proxy")


@pytest.fixture(scope="module")
def edge(folder: Path, issuer: Issuer, proxy: Client) -> Iterator[Edge]:
    made = Edge(folder, issuer, (proxy.thumbprint, "A" * 43))
    with made.serving():
        yield made


@pytest.fixture(autouse=True)
def _uncounted(edge: Edge) -> None:
    edge.counts.clear()


def is_seen(client: Client | None) -> tuple[int, dict]:
    return 200, {"client": client.thumbprint if client else None, "headers": []}


def refused(answer: tuple[int, dict], code: str) -> None:
    status, body = answer
    assert (status, body["code"]) == (400, code)


def test_the_certificate_of_the_handshake_is_the_clients(edge, alice):
    assert edge.over_tls(alice) == is_seen(alice)
    assert edge.over_tls() == is_seen(None)
    assert edge.counts == {}


def test_a_proxy_at_the_unix_socket_says_whose_certificate_it_saw(edge, alice):
    assert edge.over_unix(written(alice.der)) == is_seen(alice)
    assert edge.over_unix() == is_seen(None)
    assert edge.counts == {}


def test_so_does_a_proxy_whose_certificate_is_pinned_and_its_own_counts_for_nobody(edge, alice, proxy):
    assert edge.over_tls(proxy, written(alice.der)) == is_seen(alice)
    assert edge.over_tls(proxy) == is_seen(None)
    assert edge.over_tls(proxy, written(proxy.der)) == is_seen(proxy)


def test_from_anybody_else_the_header_is_stripped_and_counted(edge, alice):
    assert edge.over_tls(None, written(alice.der)) == is_seen(None)
    assert edge.over_tls(alice, written(alice.der)) == is_seen(alice)
    assert edge.counts == {"client_cert_stripped": 2}


def test_a_header_beside_another_certificate_is_refused(edge, folder, issuer, alice):
    mallory = issuer.client(folder, "mallory")
    for values in ((written(alice.der),), (written(mallory.der), written(alice.der)), (b"nonsense",)):
        refused(edge.over_tls(mallory, *values), "certificate_ambiguous")
    assert edge.over_tls(mallory) == is_seen(mallory)
    assert edge.counts == {"client_cert_stripped": 3, "certificate_ambiguous": 3}


def spellings(der: bytes) -> list[tuple[bytes, ...]]:
    """What is no single byte sequence in its one spelling."""
    good = written(der)
    return [
        (good, good),
        (good + b", " + good,),
        (b"",),
        (b"::",),
        (b":",),
        (good[1:],),
        (good[:-1],),
        (good[1:-1],),
        (good + b";a=1",),
        (b'"' + good[1:-1] + b'"',),
        (good.replace(b"=", b"") if b"=" in good else good[:-1] + b"=:",),
        (b":" + base64.urlsafe_b64encode(der) + b"-:",),
        (b":" + base64.b64encode(der)[:40] + b" " + base64.b64encode(der)[40:] + b":",),
        (b":" + base64.b64encode(der + b"\0") + b":",),
        (b":" + base64.b64encode(b"not a certificate") + b":",),
        (b":" + base64.b64encode(der * 40) + b":",),
        (b"-----BEGIN CERTIFICATE-----",),
    ]


def test_what_is_not_one_certificate_in_its_one_spelling_is_refused(edge, alice):
    for values in spellings(alice.der):
        refused(edge.over_unix(*values), "client_cert_invalid")
    assert edge.counts == {"client_cert_invalid": len(spellings(alice.der))}
    assert certificate_in([written(alice.der)]) == alice.der


@given(st.binary(max_size=200))
def test_no_other_bytes_are_a_byte_sequence(value):
    with suppress(ValueError):
        assert written(certificate_in([value])) == value
    assert not value or certificate_in([written(value)]) == value


def test_a_chain_is_not_read_and_not_passed_on(edge, alice):
    value = written(alice.der) + b"\r\nClient-Cert-Chain: " + written(edge.issuer.certificate.public_bytes(Encoding.DER))
    assert edge.over_unix(value) == is_seen(alice)
    assert edge.over_unix(written(alice.der) + b"\r\nclient_cert: x\r\nX-Client-Cert: x") == is_seen(alice)


# What a proxy reports is verified here too


def certificate_with(issuer: Issuer, *, days: tuple[int, int] = (-1, 1), uses=(x509.OID_CLIENT_AUTH,), ca: bool = False) -> bytes:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "somebody")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer.certificate.subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now + timedelta(days=days[0])).not_valid_after(now + timedelta(days=days[1]))
    identifier = issuer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(issuer.key, hashes.SHA256()).public_bytes(Encoding.DER)


BAD = {
    "expired": {"days": (-3, -1)},
    "not yet valid": {"days": (1, 3)},
    "a server's": {"uses": (x509.OID_SERVER_AUTH,)},
    "for no named use": {"uses": ()},
    "an authority's": {"ca": True},
}


@pytest.mark.parametrize("name", BAD)
def test_a_proxy_that_did_not_look_is_no_way_in(edge, issuer, name):
    refused(edge.over_unix(written(certificate_with(issuer, **BAD[name]))), "client_cert_invalid")


def test_what_differs_in_nothing_is_taken(edge, issuer):
    good = certificate_with(issuer)
    assert edge.over_unix(written(good))[1]["client"] == certificate_thumbprint(good)


def test_an_authority_of_the_same_name_is_another(edge):
    impostor = Issuer("ours")
    refused(edge.over_unix(written(certificate_with(impostor))), "client_cert_invalid")
    self_signed = impostor.certificate.public_bytes(Encoding.DER)
    refused(edge.over_unix(written(self_signed)), "client_cert_invalid")


def test_a_customers_authority_counts_from_the_next_handshake_and_no_longer_than_it_is_there(edge, folder, alice):
    customer = Issuer("customer")
    bob = customer.client(folder, "bob")
    file = folder / "authorities" / "customer.pem"

    def enters() -> bool:
        try:
            status, body = edge.over_tls(bob)
        except (ssl.SSLError, ConnectionError, http.client.HTTPException):
            return False
        return (status, body["client"]) == (200, bob.thumbprint)

    def is_reported() -> bool:
        return edge.over_unix(written(bob.der))[0] == 200

    assert (enters(), is_reported()) == (False, False)
    file.write_bytes(customer.pem)
    assert (enters(), is_reported()) == (True, True)
    assert edge.over_tls(alice) == is_seen(alice)
    file.write_bytes(b"no certificate")
    assert (enters(), is_reported()) == (False, False)
    assert edge.over_tls(alice) == is_seen(alice)
    file.write_bytes(customer.pem)
    assert (enters(), is_reported()) == (True, True)
    file.unlink()
    assert (enters(), is_reported()) == (False, False)
    assert edge.over_tls(alice) == is_seen(alice)


def test_an_issuing_authority_is_trusted_as_it_is_and_its_root_is_not(edge, folder, tmp_path):
    root = Issuer("root")
    issuing = Issuer("issuing")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "issuing")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(root.certificate.subject)
    builder = builder.public_key(issuing.key.public_key()).serial_number(x509.random_serial_number())
    now = datetime.now(UTC)
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    for extension in issuing.certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    identifier = root.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    issuing.certificate = builder.sign(root.key, hashes.SHA256())
    carol, dave = issuing.client(folder, "carol"), root.client(folder, "dave")
    file = folder / "authorities" / "issuing.pem"
    file.write_bytes(issuing.pem)
    assert edge.over_tls(carol) == is_seen(carol)
    assert edge.over_unix(written(carol.der)) == is_seen(carol)
    refused(edge.over_unix(written(dave.der)), "client_cert_invalid")
    file.unlink()


def test_our_own_authority_expires_too(tmp_path, issuer):
    (tmp_path / "ca.pem").write_bytes(issuer.pem)
    authorities, now = Authorities(tmp_path), datetime.now(UTC)
    leaf = certificate_with(issuer, days=(-1, 5000))
    authorities.verify(leaf, now)
    with pytest.raises(CertificateRefused):
        authorities.verify(leaf, now + timedelta(days=certificates.AUTHORITY_DAYS + 1))
