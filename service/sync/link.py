"""The link to the other site: HTTPS with both certificates, TLS 1.3, and each end sure of the other's name.

It carries bytes and decides nothing: what matters in a message is signed by an HSM. Implements `keyvault.sync.peer.Link`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from keyvault.sync.errors import PeerUnavailable
from keyvault.sync.wire import MAX_BYTES

CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 15.0
"""How long the other site may take to shake hands, and between two pieces of its answer."""


class HttpsLink:
    """Calls of one site to the other, at `url`, whose certificate must carry the name `peer`. Safe from any thread."""

    def __init__(self, url: str, folder: Path, peer: str) -> None:
        """`folder` holds `server.pem`, `server.key` and `ca.pem` of this end."""
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=url, verify=context, timeout=timeout, trust_env=False)
        self._name = {"sni_hostname": peer}

    def call(self, method: str, message: bytes) -> bytes:
        """The reply. Raises PeerUnavailable where none came, or one too large."""
        try:
            with self._http.stream("POST", f"/{method}", content=message, extensions=self._name) as answer:
                reply = bytearray()
                for piece in answer.iter_raw():
                    reply += piece
                    if len(reply) > MAX_BYTES:
                        raise PeerUnavailable("the other site's answer is larger than a message may be")
                if not answer.is_success:
                    raise PeerUnavailable(f"the other site answered {answer.status_code}; its log says why")
                return bytes(reply)
        except httpx.HTTPError as error:
            raise PeerUnavailable(f"the other site does not answer: {type(error).__name__}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class NoLink:
    """Where no address of the other site is set: every call finds it away."""

    def call(self, method: str, message: bytes) -> bytes:
        """Raises PeerUnavailable."""
        raise PeerUnavailable(f"GLOTTIS_PEER_URL is not set, so {method} reaches nobody ({len(message)} bytes were not sent)")
