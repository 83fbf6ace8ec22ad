"""Whose certificates clients may come with: our own authority's, and those of customers' authorities that the operator trusts.

They are files, read again as soon as one changes, so that a new one counts from the next connection on and one taken away
counts no more. So are their lists of revoked certificates, at each request. To be issued by one of them is not enough to be
anybody: the vault knows clients by their certificates' thumbprints alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID
from uvicorn import Config

from service.edge.revocations import CertificateRefused as CertificateRefused
from service.edge.revocations import Trusted, read_lists
from service.edge.tls import ContextFactory, harden

OURS, FOLDER = "ca.pem", "authorities"
"""In the edge's folder: our own authority's certificate, and the folder of the others', `NAME.pem`."""
LISTS, REQUIRED = ".crl", ".crl-required"
"""Beside `NAME.pem`: its lists of revoked certificates, and an empty file where it is nobody's without a current one."""
_SEEN = tuple[tuple[str, int, int, int], ...]

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Known:
    seen: _SEEN
    ours: x509.Certificate
    others: tuple[Trusted, ...]
    context: ssl.SSLContext | None = None

    @property
    def certificates(self) -> tuple[x509.Certificate, ...]:
        return (self.ours, *(certificate for other in self.others for certificate in other.certificates))


class Authorities:
    """The authorities in one folder, as they are at the moment of each call. Any thread."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds `ca.pem`, and may hold `authorities/`. Raises OSError or ValueError where `ca.pem` cannot be read."""
        self._folder = folder
        self._known = self._read()

    def verify(self, certificate: bytes, now: datetime | None = None) -> None:
        """Raise CertificateRefused unless this certificate (DER) is a client's, issued by one of the authorities, and in time.

        What a handshake would check, checked here: for certificates that a proxy saw. Path validation of RFC 5280 §6 as
        `cryptography` does it; a client's certificate must name its use (clientAuth), and needs no alternative name.
        """
        store = verification.Store(list(self._current().certificates))
        try:
            leaf = x509.load_der_x509_certificate(certificate)
            _verifier(store, now or datetime.now(UTC)).verify(leaf, [])
        except (ValueError, verification.VerificationError) as problem:
            raise CertificateRefused(type(problem).__name__) from None

    def require_unrevoked(self, certificate: bytes, now: datetime | None = None) -> None:
        """Raise CertificateRevoked for a certificate (DER) on its issuer's list, or whose issuer is on the one above.

        Raises RevocationsUnknown where the issuer must have a current list, and has not. Our own authority keeps none.
        """
        asked = [other for other in self._current().others if other.lists or other.required or other.unreadable]
        if not asked:
            return
        leaf, now = x509.load_der_x509_certificate(certificate), now or datetime.now(UTC)
        for other in asked:
            if other.require_good(leaf, now):
                return

    def context_factory(self) -> ContextFactory:
        """A factory of uvicorn's TLS context, whose handshakes trust the authorities of their moment, and show its newest keys."""

        def make_context(config: Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
            def of_now() -> ssl.SSLContext:
                known = self._current()
                if known.context is None:
                    context = harden(config, make)
                    _trust(context, known.certificates)
                    self._known = known = replace(known, context=context)
                    return context
                return known.context

            outer = harden(config, make)
            outer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an issuing authority is trusted as it is, whoever issued it
            # Called in every handshake, with or without a name, before the client's certificate is looked at.
            outer.sni_callback = lambda tls, _name, _context: setattr(tls, "context", of_now())
            return outer

        return make_context

    def _current(self) -> _Known:
        if self._known.seen != _seen(self._folder):
            self._known = self._read()
        return self._known

    def _read(self) -> _Known:
        seen, found = _seen(self._folder), []
        for file in sorted((self._folder / FOLDER).glob("*.pem")):
            try:
                found.append(trusted(file))
            except (OSError, ValueError) as problem:  # not trusted, then; the others are not the worse for it
                _log.error("authority_unreadable", authority=file.stem, cause=type(problem).__name__)
        return _Known(seen, x509.load_pem_x509_certificate((self._folder / OURS).read_bytes()), tuple(found))


def trusted(file: Path) -> Trusted:
    """A customer's authority as its files say it. Raises OSError or ValueError where its certificates cannot be read."""
    certificates, lists = tuple(x509.load_pem_x509_certificates(file.read_bytes())), beside(file, LISTS)
    known = Trusted(file.stem, certificates, required=beside(file, REQUIRED).exists())
    try:
        return replace(known, lists=read_lists(lists.read_bytes(), certificates))
    except FileNotFoundError:
        return known
    except (OSError, ValueError) as problem:
        _log.error("revocations_unreadable", authority=file.stem, cause=type(problem).__name__)
        return replace(known, unreadable=True)


def beside(file: Path, suffix: str) -> Path:
    """The file with this ending that belongs to an authority's file; names may have dots."""
    return file.with_name(file.name.removesuffix(".pem") + suffix)


def _seen(folder: Path) -> _SEEN:
    """What changes when a file does: a new one is put in its place by renaming."""
    files = [*(folder / name for name in (OURS, "server.pem", "server.key")), *sorted((folder / FOLDER).glob("*.*"))]
    found = []
    for file in files:
        try:
            told = file.stat()
        except FileNotFoundError:
            continue
        found.append((file.name, told.st_ino, told.st_mtime_ns, told.st_size))
    return tuple(found)


def _trust(context: ssl.SSLContext, certificates: tuple[x509.Certificate, ...]) -> None:
    context.load_verify_locations(cadata=b"".join(certificate.public_bytes(Encoding.DER) for certificate in certificates))


def _verifier(store: verification.Store, now: datetime) -> verification.ClientVerifier:
    leaves = verification.ExtensionPolicy.webpki_defaults_ee()
    leaves = leaves.may_be_present(x509.SubjectAlternativeName, verification.Criticality.AGNOSTIC, None)
    leaves = leaves.require_present(x509.ExtendedKeyUsage, verification.Criticality.AGNOSTIC, _names_clients)
    authorities = verification.ExtensionPolicy.webpki_defaults_ca()
    builder = verification.PolicyBuilder().store(store).time(now)
    return builder.extension_policies(ca_policy=authorities, ee_policy=leaves).build_client_verifier()


def _names_clients(_: verification.Policy, __: x509.Certificate, uses: x509.ExtendedKeyUsage) -> None:
    if ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        raise ValueError("not for clients")
