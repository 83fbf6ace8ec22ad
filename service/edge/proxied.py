"""Certificates that a proxy saw in its own handshake: the header `Client-Cert` of RFC 9440, believed from nobody but our proxies.

A proxy of ours is whoever reaches the Unix socket, whose owner and mode say who may, or comes over mutual TLS with a certificate
whose thumbprint is set. From anybody else the header is taken away and counted. What a proxy reports is verified here again:
its word stands for the handshake alone, the proof that the client holds the certificate's key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence

from starlette.responses import JSONResponse

from service.edge.authorities import Authorities
from service.edge.limits import App, Message, Receive, Send
from service.edge.revocations import CertificateRefused, CertificateRevoked, RevocationsUnknown
from service.edge.tls import Connection, connection_of
from service.problems import problem

HEADER, CHAIN = b"client-cert", b"client-cert-chain"
"""The chain is not read: a client's certificate must be issued by an authority that the operator trusts, and by no other."""
MAX_HEADER = 16 * 1024
STRIPPED, AMBIGUOUS, INVALID = "client_cert_stripped", "certificate_ambiguous", "client_cert_invalid"
REVOKED, UNKNOWN = "certificate_revoked", "revocations_unknown"


class ProxiedCertificate:
    """ASGI middleware, before all others: whose certificate a request comes with is settled here, once."""

    def __init__(
        self, app: App, *, authorities: Authorities, proxies: Collection[str] = (), count: Callable[[str], None] = lambda _: None
    ) -> None:
        """`proxies`: the certificates' x5t#S256 of those that come over TLS. `count` hears each header taken away or refused."""
        self._app, self._authorities, self._proxies, self._count = app, authorities, frozenset(proxies), count

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        refusal = self._settle(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _settle(self, scope: Message) -> JSONResponse | None:
        values = [value for name, value in scope["headers"] if name == HEADER]
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (HEADER, CHAIN)]
        connection = connection_of(scope)
        if connection.certificate is not None and (refusal := self._revoked(connection.certificate)) is not None:
            return refusal
        if self._is_proxy(connection):
            return self._reported(connection, values)
        if values:
            self._count(STRIPPED)
        if values and connection.certificate is not None and values != [written(connection.certificate)]:
            self._count(AMBIGUOUS)
            fix = "Leave the header Client-Cert out: the certificate of this connection says who you are."
            return problem(AMBIGUOUS, "The connection's certificate and the header Client-Cert are not the same.", fix)
        return None

    def _reported(self, connection: Connection, values: Sequence[bytes]) -> JSONResponse | None:
        connection.certificate = None  # a proxy's own says nothing about its client
        if not values:
            return None
        try:
            certificate = certificate_in(values)
            self._authorities.verify(certificate)
        except (ValueError, CertificateRefused):
            self._count(INVALID)
            fix = "The proxy must send Client-Cert once, as RFC 9440 writes it, with a client's certificate of a trusted authority."
            return problem(INVALID, "The proxy's header Client-Cert does not hold.", fix)
        connection.certificate = certificate
        return self._revoked(certificate)

    def _revoked(self, certificate: bytes) -> JSONResponse | None:
        """The refusal of a certificate that its issuer took back. Asked at each request: a connection may outlive a list."""
        try:
            self._authorities.require_unrevoked(certificate)
        except CertificateRevoked:
            self._count(REVOKED)
            return problem(
                REVOKED, "This certificate was revoked by its issuer.", "Have your authority issue another, and register it."
            )
        except RevocationsUnknown:
            self._count(UNKNOWN)
            fix = "The operator brings the issuer's newest list of revoked certificates: glottis clients update-crl NAME FILE."
            return problem(UNKNOWN, "Whether this certificate was revoked cannot be told.", fix)
        return None

    def _is_proxy(self, connection: Connection) -> bool:
        if connection.unix:
            return True
        if connection.certificate is None:
            return False
        own = _thumbprint(connection.certificate)
        return any(hmac.compare_digest(own, pinned) for pinned in self._proxies)


def written(certificate: bytes) -> bytes:
    """A certificate (DER) as RFC 9440 §2.1 writes it: a byte sequence of RFC 8941 §3.3.5."""
    return b":" + base64.b64encode(certificate) + b":"


def certificate_in(values: Sequence[bytes]) -> bytes:
    """The certificate (DER) in the one value of the header. Raises ValueError for several, and for any other spelling of it."""
    if len(values) != 1 or len(values[0]) > MAX_HEADER:
        raise ValueError("not one value")
    try:
        certificate = base64.b64decode(values[0][1:-1], validate=True)
    except binascii.Error as problem:
        raise ValueError("not base64") from problem
    if not certificate or values[0] != written(certificate):
        raise ValueError("not a byte sequence in its one spelling")
    return certificate


def _thumbprint(certificate: bytes) -> str:
    """`x5t#S256`, RFC 8705 §3.1."""
    return base64.urlsafe_b64encode(hashlib.sha256(certificate).digest()).rstrip(b"=").decode()
