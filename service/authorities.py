"""Customers' own authorities: whose clients' certificates are taken beside those of our own. Listed, added, taken away; on record.

An authority is a file in the edge's folder, which every edge worker reads again at its next handshake. It gives nobody a right:
the vault knows a client by its own certificate's thumbprint, which is registered one by one.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from service.errors import AuthorityMissing, AuthorityRefused
from service.holding import require_running
from service.isolation import establish
from service.settings import Settings
from service.sync.admin import ask

FOLDER = "authorities"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def trust(settings: Settings, name: str, pem: bytes) -> dict[str, Any]:
    """Take certificates of this authority (one certificate, PEM) from the next handshake on; returns its facts.

    Raises AuthorityRefused for what is no authority's certificate in its time, or under a name that another one has; SiteRefused.
    """
    _check(name)
    certificate = _authority(pem)
    told = _told(name, certificate)
    place = _place(settings, name)
    if place.exists() and _told(name, x509.load_pem_x509_certificate(place.read_bytes())) != told:
        raise AuthorityRefused(f"{name} is another authority", fix="Choose another name, or take that one away first.")
    _record(settings, "authority.trusted", told)
    edge = establish(settings.state_dir, settings.site).edge
    edge.folder(place.parent)
    # The certificate alone: what else a PEM file holds, such as its key, is not the edge's.
    edge.file(place, certificate.public_bytes(Encoding.PEM), mode=0o644)
    return told


def distrust(settings: Settings, name: str) -> dict[str, Any]:
    """Take no certificate of this authority any more, from the next handshake on. Raises AuthorityMissing, SiteRefused."""
    _check(name)
    place = _place(settings, name)
    if not place.exists():
        raise AuthorityMissing(f"there is no authority {name}")
    told = _told(name, x509.load_pem_x509_certificate(place.read_bytes()))
    _record(settings, "authority.distrusted", told)
    place.unlink()
    return told


def listed(settings: Settings) -> list[dict[str, Any]]:
    """The authorities that are trusted beside our own, by name."""
    files = sorted((settings.tls_dir / FOLDER).glob("*.pem"))
    return [_told(file.stem, x509.load_pem_x509_certificate(file.read_bytes())) for file in files]


def _authority(pem: bytes) -> x509.Certificate:
    try:
        [certificate] = x509.load_pem_x509_certificates(pem)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except (ValueError, x509.ExtensionNotFound):
        raise AuthorityRefused("this is not one authority's certificate (PEM)") from None
    if not constraints.ca or not usage.key_cert_sign:
        raise AuthorityRefused("this certificate may issue no others")
    if not certificate.not_valid_before_utc <= datetime.now(UTC) < certificate.not_valid_after_utc:
        raise AuthorityRefused("this certificate is out of its time")
    return certificate


def _told(name: str, certificate: x509.Certificate) -> dict[str, Any]:
    return {
        "name": name,
        "subject": _shown(certificate.subject.rfc4514_string()),
        "sha256": certificate.fingerprint(hashes.SHA256()).hex(),
        "not_after": certificate.not_valid_after_utc.isoformat(),
    }


def _shown(subject: str) -> str:
    """Whoever made the certificate wrote this: nothing in it begins a line, or moves what stands beside it, in a terminal."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in subject)


def _record(settings: Settings, action: str, told: dict[str, Any]) -> None:
    """The entry in the audit log, before anything is done: without it nothing is. Raises NotRunning, SiteRefused."""
    require_running(settings)
    ask(settings, "record_authority", action=action, name=told["name"], sha256=told["sha256"])


def _place(settings: Settings, name: str) -> Path:
    return settings.tls_dir / FOLDER / f"{name}.pem"


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise AuthorityRefused(f"{name!a} is no authority's name", fix="Use 1 to 63 characters of a-z, 0-9, dot, dash, underscore.")
