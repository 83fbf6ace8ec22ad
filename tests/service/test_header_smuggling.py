"""What comes through a proxy of ours, byte by byte: no spelling of a head, and no request hidden in a body, is anybody's word.

A proxy that reads a message otherwise than we do passes on a client's bytes that we would take for the proxy's. So whatever can be
read in two ways is refused, and the connection ends with it.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_proxied_certificates import Client, Edge, Issuer

from service.edge.proxied import written

Peer = Callable[[], socket.socket]


class Front:
    """An edge, the proxy that it believes, and a client whose certificate everybody has seen."""

    def __init__(self, folder: Path) -> None:
        issuer = Issuer()
        self.alice, self.proxy = issuer.client(folder, "alice"), issuer.client(folder, "proxy")
        self.edge = Edge(folder, issuer, (self.proxy.thumbprint,))

    def over_unix(self) -> socket.socket:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(10)
        plain.connect(self.edge.unix.getsockname())
        return plain

    def over_tls(self) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.edge.folder / "ca.pem"))
        context.load_cert_chain(self.proxy.pem, self.proxy.key)
        return context.wrap_socket(socket.create_connection(self.edge.tcp.getsockname(), 10), server_hostname="localhost")


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    folder = Path(tempfile.mkdtemp(prefix="glottis-smuggling-"))
    made = Front(folder)
    with made.edge.serving():
        yield made
    shutil.rmtree(folder)


@pytest.fixture(params=["over_unix", "over_tls"])
def peer(front: Front, request: pytest.FixtureRequest) -> Peer:
    return getattr(front, request.param)


def said(peer: Peer, sent: bytes) -> bytes:
    """Everything that the edge answers to these bytes, until it closes the connection."""
    answer = b""
    with peer() as connection:
        connection.sendall(sent)
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionError:
            pass
    return answer


def seen(client: Client) -> bytes:
    """How the application says that this client was there."""
    return b'"client":"' + client.thumbprint.encode()


def head(*lines: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" / HTTP/1.1", b"Host: localhost", b"Connection: close", *lines, b"", b""])


def test_a_proxys_one_header_counts(front: Front, peer: Peer) -> None:
    """The control for everything that follows."""
    for name in (b"Client-Cert", b"client-cert", b"CLIENT-CERT"):
        assert seen(front.alice) in said(peer, head(name + b": " + written(front.alice.der)))


def heads(value: bytes) -> list[tuple[bytes, ...]]:
    """Spellings of the header that a client may have got through its proxy, beside none of the proxy's own."""
    half = len(value) // 2
    return [
        (b"Client-Cert: " + value, b"Client-Cert: " + value),
        (b"Client-Cert: " + value, b"client-cert:"),
        (b"Client-Cert: " + value[:half], b" " + value[half:]),
        (b"Client-Cert:", b"\t" + value),
        (b"X-Any: 1", b" Client-Cert: " + value),
        (b"Client_Cert: " + value,),
        (b"Client-Cert : " + value,),
        (b"Client-Cert\t: " + value,),
        (b" Client-Cert: " + value,),
        (b"Client-Cert\0: " + value,),
        (b"X-Any: 1\nClient_Cert: " + value,),
        (b"X-Any: 1\rClient-Cert: " + value,),
        (b"Client-Cert: " + value + b", " + value,),
        (b"Client-Cert: " + value + b"\0",),
        (b"Client-Cert-Chain: " + value,),
        (b"Ssl-Client-Cert: " + value, b"X-Client-Cert: " + value, b"X-Forwarded-Client-Cert: " + value),
    ]


@pytest.mark.parametrize("number", range(16))
def test_no_other_spelling_of_the_header_is_anybodys_word(front: Front, peer: Peer, number: int) -> None:
    answer = said(peer, head(*heads(written(front.alice.der))[number]))
    assert seen(front.alice) not in answer
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200")) or not answer
    if answer.startswith(b"HTTP/1.1 200"):
        assert b'"client":null' in answer, "it came as a request without a certificate"


def hidden(value: bytes) -> bytes:
    """A whole request of somebody else, in the body of one's own."""
    return b"GET / HTTP/1.1\r\nHost: localhost\r\nClient-Cert: " + value + b"\r\n\r\n"


def framings(inner: bytes) -> list[bytes]:
    """Messages whose end two readers may see in two places: to the proxy, each is one request with `inner` in its body."""
    chunked, length = b"0\r\n\r\n" + inner, b"Content-Length: %d" % (len(inner) + 5)
    return [
        head(length, b"Transfer-Encoding: chunked", method=b"POST") + chunked,
        head(b"Transfer-Encoding: chunked", length, method=b"POST") + chunked,
        head(length, b"Transfer-Encoding : chunked", method=b"POST") + chunked,
        head(length, b"Transfer-Encoding: xchunked", method=b"POST") + chunked,
        head(length, b"Transfer-Encoding: identity, chunked", method=b"POST") + chunked,
        head(length, b"Transfer-Encoding:\x0bchunked", method=b"POST") + chunked,
        head(length, b"X-Any: 1", b" Transfer-Encoding: chunked", method=b"POST") + chunked,
        head(length, b"Transfer_Encoding: chunked", method=b"POST") + chunked,
        head(length, b"Content-Length: 0", method=b"POST") + chunked,
        head(b"Content-Length: 0, %d" % (len(inner) + 5), method=b"POST") + chunked,
        head(b"Content-Length: +%d" % (len(inner) + 5), method=b"POST") + chunked,
        head(b"Content-Length: 0x10", method=b"POST") + chunked,
        head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", method=b"POST")
        + b"%x\r\n" % len(inner)
        + inner
        + b"\r\n0\r\n\r\n",
        head(b"Transfer-Encoding: chunked", method=b"POST") + b"%x;\n" % len(inner) + inner + b"\r\n0\r\n\r\n",
        head(length).replace(b"Connection: close\r\n", b"Connection: close, Content-Length\r\n") + chunked,
        head(length, b"Connection: keep-alive", b"Upgrade: h2c", method=b"POST") + chunked,
        head(length, b"Expect: 100-continue") + chunked,
    ]


@pytest.mark.parametrize("number", range(17))
def test_no_request_is_hidden_in_the_body_of_another(front: Front, peer: Peer, number: int) -> None:
    answer = said(peer, framings(hidden(written(front.alice.der)))[number])
    assert seen(front.alice) not in answer
    assert answer.count(b"HTTP/1.1 4") + answer.count(b"HTTP/1.1 2") <= 1, "one message was one request, or none"


def test_two_whole_requests_are_two(front: Front, peer: Peer) -> None:
    """The control: what hides nothing is read, each with its own header and no other's."""
    value = written(front.alice.der)
    first = head(b"Client-Cert: " + value).replace(b"Connection: close\r\n", b"")
    answer = said(peer, first + head())
    assert (answer.count(b"HTTP/1.1 200"), answer.count(seen(front.alice)), answer.count(b'"client":null')) == (2, 1, 1)
