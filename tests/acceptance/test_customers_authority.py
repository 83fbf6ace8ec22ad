"""A customer's own authority from the outside: trusted, its registered client works at once, and nobody else gets anything."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cli_here import glottis_here
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from installation import VARIABLES, Installation
from sqlalchemy import text

from policies.authority import Role
from service import authorities, certificates, clients
from service.client import Refused, VoiceClient
from service.errors import RequestRefused
from service.schema import opened


class Customer:
    """A customer, with an authority of its own and clients whose keys never come near Glottis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = certificates.make_authority(self.key, "customer")
        self.pem = folder / "authority.pem"
        self.pem.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def device(self, running: Installation, name: str) -> Device:
        private, request = certificates.new_request()
        made = certificates.issue_client(self.key, self.certificate, request, name)
        dpop = ec.generate_private_key(ec.SECP256R1())
        files = {"pem": made.public_bytes(Encoding.PEM), "key": private, "dpop": certificates.private_pem(dpop)}
        for kind, content in files.items():
            (self.folder / f"{name}.{kind}").write_bytes(content)
        return Device(running, self.folder, name, clients.thumbprint(dpop))

    def crl(self, name: str, *revoked: Path, hours: float = 1, ago: float = 0.5) -> Path:
        """A list of these certificates as revoked."""
        now, hour = datetime.now(UTC), timedelta(hours=1)
        made = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        made = made.last_update(now - ago * hour).next_update(now + hours * hour)
        for one in revoked:
            serial = x509.load_pem_x509_certificate(one.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - hour)
            made = made.add_revoked_certificate(entry.build())
        (self.folder / name).write_bytes(made.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return self.folder / name


@dataclass
class Device:
    running: Installation
    folder: Path
    name: str
    jkt: str

    @property
    def pem(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def client(self) -> VoiceClient:
        keys = [self.folder / f"{self.name}.{kind}" for kind in ("pem", "key", "dpop")]
        return VoiceClient(self.running.settings.public_base_url, *keys, self.running.settings.officer_dir / "ca.pem")


def glottis(running: Installation, *arguments: str) -> subprocess.CompletedProcess[str]:
    return glottis_here("clients", *arguments, environ=VARIABLES | running.settings.environ())


def registering(device: Device) -> tuple[str, ...]:
    return "add", device.name, "--certificate", str(device.pem), "--jkt", device.jkt, "--tenant", "acceptance", "--role", "reader"


def recorded(running: Installation, action: str) -> int:
    """How many of the log's entries are of this action."""
    with opened(running.settings.role_url("owner")) as database, database.connect() as connection:
        bodies = [json.loads(bytes(row.body)) for row in connection.execute(text("SELECT body FROM intent"))]
    return sum(body["action"] == action for body in bodies)


@pytest.fixture
def customer(running: Installation, tmp_path: Path) -> Iterator[Customer]:
    yield Customer(tmp_path)
    for known in authorities.listed(running.settings):
        authorities.distrust(running.settings, known["name"])


def test_a_registered_certificate_of_a_trusted_authority_works_at_once_and_no_other(
    running: Installation, customer: Customer
) -> None:
    known, unknown = customer.device(running, "customers-app"), customer.device(running, "customers-other")
    with pytest.raises(RequestRefused, match="trusted here"):
        clients.accept(
            running.settings, known.name, known.pem.read_bytes(), tenant="acceptance", roles=[Role.READER], jkt=known.jkt
        )
    with known.client() as early, pytest.raises(httpx.TransportError):
        early.voices()

    done = glottis(running, "trust-ca", str(customer.pem), "--name", "acme", "--json")
    trusted = json.loads(done.stdout)
    assert trusted["sha256"] in glottis(running, "list-cas").stdout
    assert authorities.listed(running.settings) == [trusted]
    assert recorded(running, "authority.trusted") == 1
    with known.client() as early, pytest.raises(Refused) as told:
        early.voices()
    assert (told.value.status, told.value.code) == (401, "client_unknown")

    done = glottis(running, *registering(known))
    assert (done.returncode, done.stdout) == (0, "customers-app is registered\n"), done.stderr
    with known.client() as client:
        client.voices()
    with unknown.client() as other, pytest.raises(Refused) as told:
        other.voices()
    assert (told.value.status, told.value.code) == (401, "client_unknown")

    assert "would no longer" in glottis(running, "distrust-ca", "acme", "--dry-run").stdout
    assert glottis(running, "distrust-ca", "acme", "--yes").stdout == "acme is no longer trusted\n"
    with known.client() as client, pytest.raises(httpx.TransportError):
        client.voices()
    running.client("studio").voices()
    with pytest.raises(authorities.AuthorityMissing):
        authorities.distrust(running.settings, "acme")


def test_a_revoked_certificate_ends_with_the_newest_list(running: Installation, customer: Customer) -> None:
    device = customer.device(running, "soon-revoked")
    older, newest = customer.crl("older.crl", ago=0.9), customer.crl("newest.crl", device.pem)
    with pytest.raises(authorities.AuthorityRefused):
        authorities.trust(
            running.settings, "acme", customer.pem.read_bytes(), crl=customer.crl("over.crl", hours=-0.1).read_bytes()
        )
    done = glottis(running, "trust-ca", str(customer.pem), "--name", "acme", "--crl", str(older), "--require-crl")
    assert "then none of its certificates is taken" in done.stdout, done.stderr
    assert glottis(running, *registering(device)).returncode == 0
    with device.client() as client:
        client.voices()
        done = glottis(running, "update-crl", "acme", str(newest), "--json")
        assert json.loads(done.stdout)["crl_required"]
        with pytest.raises(Refused) as told:
            client.voices()
    assert (told.value.status, told.value.code) == (401, "certificate_revoked")
    assert recorded(running, "authority.crl_updated") == 1
    assert "newer" in glottis(running, "update-crl", "acme", str(older)).stderr, "no older list is put back"
    with pytest.raises(authorities.AuthorityMissing):
        authorities.update_crl(running.settings, "nobody", newest.read_bytes())
    with pytest.raises(RequestRefused):
        clients.accept(running.settings, "again", device.pem.read_bytes(), tenant="acceptance", roles=[Role.READER], jkt=device.jkt)
    authorities.distrust(running.settings, "acme")
    assert not list((running.settings.tls_dir / authorities.FOLDER).iterdir())


def test_an_authority_comes_with_those_above_it_and_with_nobody_else(running: Installation, customer: Customer) -> None:
    stranger = certificates.make_authority(ec.generate_private_key(ec.SECP256R1()), "stranger").public_bytes(Encoding.PEM)
    with pytest.raises(authorities.AuthorityRefused):
        authorities.trust(running.settings, "acme", customer.pem.read_bytes() + stranger)
    assert authorities.listed(running.settings) == []


def test_what_is_no_authority_is_not_trusted(running: Installation, customer: Customer) -> None:
    leaf = customer.device(running, "a-leaf").pem
    both = customer.folder / "both.pem"
    both.write_bytes(customer.pem.read_bytes() * 2)
    for file in (leaf, both):
        with pytest.raises(authorities.AuthorityRefused):
            authorities.trust(running.settings, "acme", file.read_bytes())
    for name in ("", "../ca", "a/b", "A", "x" * 64):
        with pytest.raises(authorities.AuthorityRefused):
            authorities.trust(running.settings, name, customer.pem.read_bytes())
    assert authorities.listed(running.settings) == []
    assert x509.load_pem_x509_certificate((running.settings.tls_dir / "ca.pem").read_bytes())


def test_an_authoritys_key_is_not_kept_and_its_name_writes_no_line(running: Installation, customer: Customer) -> None:
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "acme\n  SHA-256 \u202e00")])
    made = certificates.make_authority(customer.key, "customer")
    builder = x509.CertificateBuilder(named, named, customer.key.public_key(), made.serial_number)
    builder = builder.not_valid_before(made.not_valid_before_utc).not_valid_after(made.not_valid_after_utc)
    for extension in made.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    certificate = builder.sign(customer.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    told = authorities.trust(running.settings, "acme", certificate + certificates.private_pem(customer.key))
    assert told["subject"] == "CN=acme\\u000a  SHA-256 \\u202e00"
    assert (running.settings.tls_dir / authorities.FOLDER / "acme.pem").read_bytes() == certificate
