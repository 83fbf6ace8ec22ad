"""Customers' lists of revoked certificates: a leaf on one is refused at the next request, and so is what cannot be told."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from test_proxied_certificates import Client, Edge, Issuer, asked, is_seen

from service.authority_checks import authorities
from service.edge.authorities import Authorities
from service.edge.proxied import REVOKED, UNKNOWN, written
from service.edge.revocations import CertificateRevoked, RevocationsUnknown, read_lists
from service.problems import STATUS
from service.settings import Settings

HOUR = timedelta(hours=1)


def crl(issuer: Issuer, *revoked: x509.Certificate, hours: float = 1, ago: float = 0.5, critical: bool = False) -> bytes:
    """A list by this issuer, of half an hour ago, good for one hour more."""
    now = datetime.now(UTC)
    made = x509.CertificateRevocationListBuilder().issuer_name(issuer.certificate.subject)
    made = made.last_update(now - ago * HOUR).next_update(now + hours * HOUR)
    for one in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(one.serial_number).revocation_date(now - HOUR)
        made = made.add_revoked_certificate(entry.build())
    if critical:
        made = made.add_extension(x509.DeltaCRLIndicator(1), critical=True)
    return made.sign(issuer.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def leaf(client: Client) -> x509.Certificate:
    return x509.load_der_x509_certificate(client.der)


def under(top: Issuer, name: str) -> Issuer:
    """An authority that another one issued."""
    made, now = Issuer(name), datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(made.certificate.subject).issuer_name(top.certificate.subject)
    builder = builder.public_key(made.key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - HOUR).not_valid_after(now + timedelta(days=90))
    for extension in made.certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    identifier = top.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    made.certificate = builder.sign(top.key, hashes.SHA256())
    return made


class Customer:
    """A customer's authority in an edge's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.issuer = folder, Issuer("customer")
        self.place("pem", self.issuer.pem)

    def place(self, kind: str, content: bytes) -> None:
        file = self.folder / "authorities" / f"acme.{kind}"
        fresh = file.with_name("fresh")
        fresh.write_bytes(content)
        fresh.rename(file)

    def client(self, name: str) -> Client:
        return self.issuer.client(self.folder, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "authorities").mkdir()
    (tmp_path / "ca.pem").write_bytes(Issuer().pem)
    return tmp_path


def known(folder: Path, client: Client, **ahead: float) -> str:
    """What becomes of this client's certificate."""
    try:
        Authorities(folder).require_unrevoked(client.der, datetime.now(UTC) + timedelta(**ahead))
    except (CertificateRevoked, RevocationsUnknown) as refused:
        return type(refused).__name__
    return "holds"


def test_a_leaf_on_the_list_is_refused_at_the_next_request_on_the_same_connection() -> None:
    folder = Path(tempfile.mkdtemp(prefix="glottis-crl-"))
    edge = Edge(folder, Issuer(), ())
    customer = Customer(folder)
    bob, eve = customer.client("bob"), customer.client("eve")
    with edge.serving():
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(eve.pem, eve.key)
        with context.wrap_socket(socket.create_connection(edge.tcp.getsockname(), 10), server_hostname="localhost") as open_before:
            open_before.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = http.client.HTTPResponse(open_before)
            answer.begin()
            assert (answer.status, answer.read() != b"") == (200, True)
            customer.place("crl", crl(customer.issuer, leaf(eve)))
            status, body = asked(open_before, ())
        assert (status, body["code"]) == (STATUS[REVOKED], REVOKED) == (401, REVOKED)
        for answer in (edge.over_tls(eve), edge.over_unix(written(eve.der))):
            assert (answer[0], answer[1]["code"]) == (401, REVOKED)
        assert edge.over_tls(bob) == edge.over_unix(written(bob.der)) == is_seen(bob), "the control: another one of that authority"
        assert edge.counts == {REVOKED: 3}
        customer.place("crl-required", b"")
        customer.place("crl", b"no list")
        assert edge.over_tls(bob)[1]["code"] == UNKNOWN
        assert edge.over_tls(bob)[0] == 503
    shutil.rmtree(folder)


def test_a_list_that_is_over_shuts_only_where_one_is_required(folder: Path) -> None:
    customer = Customer(folder)
    bob, eve = customer.client("bob"), customer.client("eve")
    customer.place("crl", crl(customer.issuer, leaf(eve)))
    assert (known(folder, bob), known(folder, eve)) == ("holds", "CertificateRevoked")
    assert (known(folder, bob, hours=2), known(folder, eve, hours=2)) == ("holds", "CertificateRevoked"), "revoked stays so"
    customer.place("crl-required", b"")
    assert (known(folder, bob), known(folder, bob, hours=2)) == ("holds", "RevocationsUnknown")
    assert known(folder, eve, hours=2) == "CertificateRevoked"
    (folder / "authorities" / "acme.crl").unlink()
    assert known(folder, bob) == "RevocationsUnknown"


def test_a_list_that_cannot_be_believed_is_none_and_nothing_passes(folder: Path) -> None:
    customer = Customer(folder)
    bob = customer.client("bob")
    impostor, older = Issuer("customer"), crl(customer.issuer, ago=2)
    good = crl(customer.issuer, leaf(bob))
    assert len(read_lists(older + good, [customer.issuer.certificate])[0].serials) == 1, "of several lists the newest"
    lines = good.splitlines(keepends=True)
    spoilt = b"".join([*lines[:2], lines[2].swapcase(), *lines[3:]])
    for bad in (crl(impostor), crl(customer.issuer, critical=True), crl(customer.issuer, ago=-1, hours=2), spoilt, b""):
        with pytest.raises(ValueError):
            read_lists(bad, [customer.issuer.certificate])
        customer.place("crl", bad)
        assert known(folder, bob) == "RevocationsUnknown"


def test_an_intermediate_that_was_revoked_takes_its_leaves_with_it(folder: Path) -> None:
    customer = Customer(folder)
    issuing = under(customer.issuer, "issuing")
    customer.place("pem", issuing.pem + customer.issuer.pem)
    bob, direct = issuing.client(folder, "bob"), customer.client("direct")
    Authorities(folder).verify(bob.der)
    customer.place("crl", crl(issuing) + crl(customer.issuer))
    customer.place("crl-required", b"")
    assert (known(folder, bob), known(folder, direct)) == ("holds", "holds")
    customer.place("crl", crl(issuing))
    assert known(folder, bob) == "RevocationsUnknown", "nobody says whether the one in between was revoked"
    customer.place("crl", crl(issuing) + crl(customer.issuer, issuing.certificate))
    assert (known(folder, bob), known(folder, direct)) == ("CertificateRevoked", "holds")


def test_doctor_names_what_ends(folder: Path) -> None:
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(folder)})
    (folder / "tls").symlink_to(folder)
    customer = Customer(folder)

    def found() -> str:
        return " ".join(finding.state for finding in authorities(settings))

    assert found() == "ok"
    customer.place("crl", crl(customer.issuer, hours=100))
    assert found() == "ok"
    customer.place("crl", crl(customer.issuer))
    assert found() == "note"
    customer.place("crl", crl(customer.issuer, ago=3, hours=-2))
    assert found() == "note"
    customer.place("crl-required", b"")
    assert found() == "fails"
    customer.place("crl", b"-")
    assert found() == "fails"
