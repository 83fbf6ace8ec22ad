"""Lists of revoked certificates (RFC 5280 §5) that customers' authorities give out: read, believed, and asked.

Whole lists by the issuer itself alone: no delta lists, no lists by others, no OCSP, and nothing is fetched. The operator brings the
newest list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes

_ONE = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)
_AHEAD = timedelta(minutes=5)
"""How far the issuer's clock may be ahead of ours."""


class CertificateRefused(Exception):
    """A certificate does not hold for a client. The message says why, and repeats nothing of it."""


class CertificateRevoked(CertificateRefused):
    """The issuer revoked it, or an authority between it and the one that is trusted."""


class RevocationsUnknown(CertificateRefused):
    """Its issuer's list is missing, over, or not whole: whether it was revoked cannot be told."""


@dataclass(frozen=True)
class RevocationList:
    """One issuer's list: serial numbers, and from when to when it holds."""

    issuer: bytes = field(repr=False)
    """The issuing certificate's fingerprint."""
    serials: frozenset[int] = field(repr=False)
    this_update: datetime
    next_update: datetime


@dataclass(frozen=True)
class Trusted:
    """One customer's authority: its certificates, the lists that it gave out, and whether it is nobody's without a current one."""

    name: str
    certificates: tuple[x509.Certificate, ...]
    lists: tuple[RevocationList, ...] = ()
    required: bool = False
    unreadable: bool = False
    """There is a list that cannot be believed: then nothing is known."""

    def require_good(self, certificate: x509.Certificate, now: datetime) -> bool:
        """Whether one of these issued the certificate; it and those above it, as far as they are here, were not revoked.

        Raises CertificateRevoked, RevocationsUnknown.
        """
        issuer = issuer_among(certificate, self.certificates)
        if issuer is None:
            return False
        while issuer is not None:
            self._ask(certificate, issuer, now)
            above = None if certificate == issuer else issuer_among(issuer, [one for one in self.certificates if one != issuer])
            certificate, issuer = issuer, above
        return True

    def _ask(self, certificate: x509.Certificate, issuer: x509.Certificate, now: datetime) -> None:
        named = fingerprint(issuer)
        found = next((one for one in self.lists if one.issuer == named), None)
        if found is not None and certificate.serial_number in found.serials:
            raise CertificateRevoked
        if self.unreadable or (self.required and (found is None or not found.this_update - _AHEAD <= now < found.next_update)):
            raise RevocationsUnknown


def fingerprint(certificate: x509.Certificate) -> bytes:
    """SHA-256 of a certificate."""
    return certificate.fingerprint(hashes.SHA256())


def issuer_among(certificate: x509.Certificate, known: Sequence[x509.Certificate]) -> x509.Certificate | None:
    """The one of these that signed the certificate."""
    for one in known:
        try:
            certificate.verify_directly_issued_by(one)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return one
    return None


def read_lists(pem: bytes, issuers: Sequence[x509.Certificate], now: datetime | None = None) -> tuple[RevocationList, ...]:
    """The lists in a PEM file, each signed by one of `issuers`, and the newest of each. Raises ValueError, naming what is wrong."""
    blocks = _ONE.findall(pem)
    if not blocks:
        raise ValueError("there is no list of revoked certificates (PEM) in it")
    newest: dict[bytes, RevocationList] = {}
    for block in blocks:
        found = _read(block, issuers)
        if found.this_update > (now or datetime.now(UTC)) + _AHEAD:
            raise ValueError("a list is of a time to come")
        if found.issuer not in newest or newest[found.issuer].this_update < found.this_update:
            newest[found.issuer] = found
    return tuple(newest.values())


def _read(block: bytes, issuers: Sequence[x509.Certificate]) -> RevocationList:
    found = x509.load_pem_x509_crl(block)
    issuer = next((one for one in issuers if one.subject == found.issuer and _signed(found, one)), None)
    if issuer is None:
        raise ValueError("a list is not signed by this authority, or its certificate may sign none")
    if any(extension.critical for extension in found.extensions):
        raise ValueError("a list is a delta, covers a part, or speaks for others: give a whole list of the authority's own")
    if found.next_update_utc is None:
        raise ValueError("a list does not say when the next one comes")
    serials = set()
    for one in found:
        if any(extension.critical for extension in one.extensions):
            raise ValueError("an entry of a list speaks for another authority")
        serials.add(one.serial_number)
    return RevocationList(fingerprint(issuer), frozenset(serials), found.last_update_utc, found.next_update_utc)


def _signed(found: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    try:
        usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
        return usage.crl_sign and found.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]  # others raise TypeError
    except (x509.ExtensionNotFound, TypeError, ValueError):
        return False
