"""Glottis behind the real nginx, with the configuration that ships: whose certificate counts, and whose does not."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from installation import SPEECH, Installation, free_port

from policies.proofs import make_proof
from service import checks, programs
from service.client import Refused, VoiceClient
from service.edge.proxied import written
from service.isolation import establish
from service.settings import Settings
from service.supervisor import Supervisor, signals_held

SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx"
NGINX, NJS = shutil.which("nginx"), Path("/usr/lib/nginx/modules/ngx_http_js_module.so")

pytestmark = pytest.mark.skipif(NGINX is None or not NJS.exists(), reason="nginx with the module njs is not installed")

HOLE = """
        location /forgotten/ {
            proxy_set_header Host $host;
            proxy_pass http://glottis/;
        }
    }
}
"""


@dataclass
class Front:
    """nginx on a port of its own, before an edge of its own, before the running installation's vault."""

    running: Installation
    port: int
    log: Path

    def client(self, name: str = "studio") -> VoiceClient:
        """A registered client that calls nginx; its proofs name the public address all the same."""
        self.running.client(name)
        client = VoiceClient.from_folder(self.running.settings.client_dir(name))
        client._http.base_url = httpx.URL(self.url)
        return client

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def nobody(self) -> httpx.Client:
        """Somebody without a certificate."""
        context = ssl.create_default_context(cafile=str(self.running.settings.officer_dir / "ca.pem"))
        return httpx.Client(base_url=self.url, verify=context, trust_env=False)

    def certificate(self, name: str) -> str:
        """A client's certificate, as RFC 9440 writes it: who has seen it can."""
        pem = (self.running.settings.client_dir(name) / "client.pem").read_bytes()
        return written(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)).decode()


@contextmanager
def edge_at(running: Installation, path: Path) -> Iterator[Settings]:
    """One edge worker at a Unix socket, as `glottis up` starts it, with nothing but what the supervisor gives it."""
    settings = replace(running.settings, edge_socket=path)
    with socket.socket(socket.AF_UNIX) as unix, signals_held():
        programs.bind_for_proxy(unix, settings)
        supervisor = Supervisor(path.parent, lambda _: None)
        try:
            supervisor.start(programs.edges(settings, establish(settings.state_dir, settings.site), None, unix))
            yield settings
        finally:
            supervisor.stop()


@contextmanager
def nginx(folder: Path, settings: Settings, port: int, change: Callable[[str], str]) -> Iterator[None]:
    """The shipped configuration, with this machine's paths and port in place of the written ones."""
    for name in ("server.pem", "server.key"):
        shutil.copy(settings.tls_dir / name, folder / name)
    shutil.copy(settings.tls_dir / "ca.pem", folder / "clients.pem")
    shutil.copy(SHIPPED / "client_cert.js", folder / "client_cert.js")
    written_paths = {"/etc/nginx/glottis/": f"{folder}/", "/run/glottis/edge.sock": str(settings.edge_socket)}
    text = (SHIPPED / "glottis.conf").read_text()
    for old, new in {**written_paths, "listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "voice.example": "localhost"}.items():
        assert old in text
        text = text.replace(old, new)
    own = f"error_log {folder}/error.log;\npid {folder}/pid;\nuser {pwd.getpwuid(os.geteuid()).pw_name};\n"
    places = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    text = text.replace("http {\n", f"http {{\n    access_log {folder}/access.log;\n{places}", 1)
    (folder / "nginx.conf").write_text(own + change(text) + "events {}\n")
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf"), "-g", "daemon off;"], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture(scope="module")
def front(running: Installation) -> Iterator[Front]:
    folder = Path(tempfile.mkdtemp(prefix="glottis-nginx-"))
    folder.chmod(0o711)
    port = free_port()

    def with_hole(text: str) -> str:
        return text.rstrip()[: text.rstrip().rindex("}")].rstrip()[:-1].rstrip() + HOLE

    with edge_at(running, folder / "edge.sock") as settings, nginx(folder, settings, port, with_hole):
        yield Front(running, port, folder / "edge-proxied-0.log")
    shutil.rmtree(folder)


def test_a_client_works_through_nginx_as_it_does_without(front: Front, voice: str) -> None:
    with front.client() as client:
        assert voice in [found["id"] for found in client.voices()]
        assert client.speak(voice, "Through a proxy.")[:4] == b"RIFF"
        assert client.verify(voice, (SPEECH / "1998" / "1998-15444-0003.flac").read_bytes()) == "match"


def test_without_a_certificate_one_reads_a_401(front: Front) -> None:
    with front.nobody() as nobody:
        assert code(nobody.get("/v1/voices")) == (401, "certificate_required")
        assert nobody.get("/healthz").is_success


def test_a_header_that_a_client_makes_up_arrives_stripped(front: Front, voice: str) -> None:
    made_up = {"Client-Cert": front.certificate("studio")}
    with front.nobody() as nobody:
        for headers in (made_up, {"client-cert": made_up["Client-Cert"]}, {**made_up, "Client-Cert-Chain": made_up["Client-Cert"]}):
            assert code(nobody.get("/v1/voices", headers=headers)) == (401, "certificate_required")
        twice = [("Client-Cert", made_up["Client-Cert"])] * 2
        assert code(nobody.get("/v1/voices", headers=twice)) == (401, "certificate_required")
    with front.client("mallory") as mallory, front.client() as studio, pytest.raises(Refused) as refused:
        mallory.send("GET", "/v1/voices", studio.headers("GET", "/v1/voices", studio.token("read")) | made_up)
    assert (refused.value.status, refused.value.code) == (401, "binding_mismatch")
    with front.client() as studio:
        stolen = studio.headers("GET", "/v1/voices", studio.token("read")) | {"Client-Cert": front.certificate("mallory")}
        assert studio.send("GET", "/v1/voices", stolen).is_success


def test_a_forgotten_location_lets_it_through(front: Front, voice: str) -> None:
    """The control: what the shipped configuration's lines are for, and what stands behind them, a proof by the client's key."""
    made_up = {"Client-Cert": front.certificate("studio")}
    with front.nobody() as nobody:
        assert code(nobody.get("/forgotten/v1/voices", headers=made_up)) == (401, "scheme_invalid")
        assert code(nobody.get("/forgotten/v1/voices", headers={"Client-Cert": "x"})) == (400, "client_cert_invalid")
        with front.client() as studio:
            headers = studio.headers("GET", "/v1/voices", studio.token("read"))
        assert nobody.get("/forgotten/v1/voices", headers=headers | made_up).is_success


def test_the_public_address_alone_says_what_a_proof_must_name(front: Front) -> None:
    with front.client() as client:
        asked = {"grant_type": "client_credentials", "authorization_details": '[{"type":"glottis_voice","actions":["read"]}]'}
        proof = make_proof(client.dpop_key, "POST", front.url + "/oauth/token")
        for headers in ({}, {"X-Forwarded-Host": f"localhost:{front.port}", "Host": f"localhost:{front.port}"}):
            with pytest.raises(Refused) as refused:
                client.send("POST", "/oauth/token", {"DPoP": proof, **headers}, data=asked)
            assert (refused.value.status, refused.value.code) == (401, "proof_invalid")
        assert client.token("read")


@pytest.mark.soak
def test_glottis_up_serves_a_proxy_alone(new_installation: Callable[..., Installation]) -> None:
    """`GLOTTIS_EDGE_TCP=no`: nothing listens at the port, the Unix socket serves, and the doctor looks there."""
    folder = Path(tempfile.mkdtemp(prefix="glottis-proxied-"))
    installation = new_installation(GLOTTIS_EDGE_TCP="no", GLOTTIS_EDGE_SOCKET=str(folder / "edge.sock"))
    installation.start()
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(folder / "edge.sock")), base_url="http://edge") as client:
            assert client.get("/readyz").is_success
            assert code(client.get("/v1/voices")) == (401, "certificate_required")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", installation.settings.port), 1)
        found = {finding.part: finding.state for finding in checks.examine(installation.settings)}
        assert (found["edge for a proxy"], found.get("edge")) == ("ok", None)
    finally:
        installation.stop()
        shutil.rmtree(folder)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]
