"""The link between the sites: both ends by certificate and by name, TLS 1.3, nothing larger than a message."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from uvicorn import Server

from keyvault.sync.errors import PeerUnavailable
from keyvault.sync.wire import MAX_BYTES
from service import certificates
from service.errors import NotRunning, SiteBusy
from service.exits import Exit, exit_for
from service.settings import Settings
from service.sync import http
from service.sync.admin import ask
from service.sync.link import HttpsLink, NoLink

A, B = "site-a.cluster", "site-b.cluster"


class Authority:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = certificates.make_authority(self.key, "test")

    def folder(self, path: Path, name: str, issue=certificates.issue_site) -> Path:
        """An end's folder, with the kind of certificate that `issue` makes."""
        path.mkdir()
        private, request = certificates.new_request()
        given = [name] if issue is certificates.issue_server else name
        made = issue(self.key, self.certificate, request, given)
        (path / "server.key").write_bytes(private)
        (path / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
        (path / "ca.pem").write_bytes(self.certificate.public_bytes(Encoding.PEM))
        return path


@contextmanager
def serving(folder: Path, answer=lambda method, message: method.encode() + b":" + message) -> Iterator[str]:
    """Site b answers at the address that this yields."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(http.config(http.create_app(answer, A), folder))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def linked(url: str, folder: Path, name: str = B) -> Iterator[HttpsLink]:
    link = HttpsLink(url, folder, name)
    try:
        yield link
    finally:
        link.close()


def refused(url: str, folder: Path, match: str | None = None, message: bytes = b"") -> None:
    with linked(url, folder) as link, pytest.raises(PeerUnavailable, match=match):
        link.call("state", message)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def url(authority: Authority, tmp_path: Path) -> Iterator[str]:
    with serving(authority.folder(tmp_path / "b", B)) as found:
        yield found


def test_a_call_reaches_the_other_site_and_its_reply_comes_back(url, authority, tmp_path):
    with linked(url, authority.folder(tmp_path / "a", A)) as link:
        assert link.call("state", b"\x00\x01") == b"state:\x00\x01"
        assert link.call("take", bytes(MAX_BYTES - 5)) == b"take:" + bytes(MAX_BYTES - 5)


def test_only_the_one_name_is_answered(url, authority, tmp_path):
    foreign = [(B, certificates.issue_site), ("site-c.cluster", certificates.issue_site), (A, certificates.issue_client)]
    for number, (name, issue) in enumerate(foreign):
        refused(url, authority.folder(tmp_path / str(number), name, issue), "403")


def test_a_servers_certificate_of_our_authority_is_no_site(url, authority, tmp_path):
    refused(url, authority.folder(tmp_path / "edge", A, certificates.issue_server))


def test_another_authoritys_site_is_cut_off_in_the_handshake(url, authority, tmp_path):
    stranger = Authority().folder(tmp_path / "stranger", A)
    (stranger / "ca.pem").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    refused(url, stranger)


def test_without_a_certificate_and_below_tls_1_3_nobody_gets_in(url, authority, tmp_path):
    folder = authority.folder(tmp_path / "a", A)
    bare = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    old = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(folder / "server.pem", folder / "server.key")
    for context in (bare, old):
        with httpx.Client(verify=context, trust_env=False) as client, pytest.raises(httpx.HTTPError):
            client.post(f"{url}/state", extensions={"sni_hostname": B})


def test_the_caller_demands_the_other_sites_name(authority, tmp_path):
    mine = authority.folder(tmp_path / "a", A)
    with serving(authority.folder(tmp_path / "other", "site-c.cluster")) as elsewhere:
        refused(elsewhere, mine)
    with serving(authority.folder(tmp_path / "client", B, certificates.issue_client)) as client:
        refused(client, mine)


def test_what_is_larger_than_a_message_is_refused_at_both_ends(authority, tmp_path):
    mine = authority.folder(tmp_path / "a", A)
    with serving(authority.folder(tmp_path / "b", B), lambda *_: bytes(MAX_BYTES + 1)) as url:
        refused(url, mine, "larger")
        refused(url, mine, message=bytes(MAX_BYTES + 1))


def test_a_silent_site_and_a_missing_one_are_unavailable(authority, tmp_path):
    mine = authority.folder(tmp_path / "a", A)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and says nothing, as a stopped process does
        refused(f"https://127.0.0.1:{silent.getsockname()[1]}", mine)
    refused("https://127.0.0.1:1", mine)
    with pytest.raises(PeerUnavailable, match="GLOTTIS_PEER_URL"):
        NoLink().call("state", b"")


def test_a_certificate_without_names_has_none(authority, tmp_path):
    folder = authority.folder(tmp_path / "c", "somebody", certificates.issue_client)
    der = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).public_bytes(Encoding.DER)
    assert http.names_of(der) == http.names_of(None) == []


def test_a_site_process_that_is_busy_is_not_taken_for_one_that_does_not_run(state_dir: Path) -> None:
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(state_dir)})
    settings.admin_socket.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(settings.admin_socket))
        busy.listen()
        with pytest.raises(SiteBusy) as refused:
            ask(settings, "status", timeout_s=0.2)
    assert exit_for(refused.value) is Exit.TEMPORARY
    with pytest.raises(NotRunning):
        ask(settings, "status", timeout_s=0.2)
