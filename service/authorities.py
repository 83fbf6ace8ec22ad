"""Customers' own authorities: whose clients' certificates are taken beside those of our own. Listed, added, taken away; on record.

An authority is a file in the edge's folder, which every edge worker reads again at its next handshake. It gives nobody a right:
the vault knows a client by its own certificate's thumbprint, which is registered one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from service.edge.authorities import FOLDER, LISTS, REQUIRED, beside, trusted
from service.edge.revocations import RevocationList, Trusted, fingerprint, issuer_among, read_lists
from service.errors import AuthorityMissing, AuthorityRefused
from service.holding import require_running
from service.isolation import establish
from service.settings import Settings
from service.sync.admin import ask

MOST = 8
"""Certificates in one authority's file."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def trust(settings: Settings, name: str, pem: bytes, *, crl: bytes | None = None, require_crl: bool = False) -> dict[str, Any]:
    """Take certificates of this authority (PEM: its certificate, and those above it) from the next handshake on; returns its facts.

    `crl`: its lists of revoked certificates; with `require_crl`, its certificates hold only while there is a current one.
    Raises AuthorityRefused for what is no authority's certificate in its time, or under a name that another one has; SiteRefused.
    """
    _check(name)
    certificates = _chain(pem)
    place = _place(settings, name)
    if place.exists() and trusted(place).certificates != certificates:
        raise AuthorityRefused(f"{name} is another authority", fix="Choose another name, or take that one away first.")
    if crl is not None:
        _lists(crl, certificates, trusted(place).lists if place.exists() else ())
    told = _told(Trusted(name, certificates))
    _record(settings, "authority.trusted", told)
    edge = establish(settings.state_dir, settings.site).edge
    edge.folder(place.parent)
    if require_crl:
        edge.file(beside(place, REQUIRED), b"", mode=0o644)
    if crl is not None:
        edge.file(beside(place, LISTS), crl, mode=0o644)
    # Last, for this is what counts; and the certificates alone: what else a PEM file holds, such as a key, is not the edge's.
    edge.file(place, b"".join(one.public_bytes(Encoding.PEM) for one in certificates), mode=0o644)
    return _told(trusted(place))


def update_crl(settings: Settings, name: str, crl: bytes) -> dict[str, Any]:
    """Put an authority's newer lists of revoked certificates in place: they count from the next request on. Returns its facts.

    Raises AuthorityMissing, AuthorityRefused for lists that are not its own or are older than those here, SiteRefused.
    """
    _check(name)
    place = _place(settings, name)
    if not place.exists():
        raise AuthorityMissing(f"there is no authority {name}")
    known = trusted(place)
    _lists(crl, known.certificates, known.lists)
    _record(settings, "authority.crl_updated", {"name": name, "sha256": sha256(crl).hexdigest()})
    establish(settings.state_dir, settings.site).edge.file(beside(place, LISTS), crl, mode=0o644)
    return _told(trusted(place))


def distrust(settings: Settings, name: str) -> dict[str, Any]:
    """Take no certificate of this authority any more, from the next handshake on. Raises AuthorityMissing, SiteRefused."""
    _check(name)
    place = _place(settings, name)
    if not place.exists():
        raise AuthorityMissing(f"there is no authority {name}")
    told = _told(trusted(place))
    _record(settings, "authority.distrusted", told)
    place.unlink()
    for suffix in (LISTS, REQUIRED):
        beside(place, suffix).unlink(missing_ok=True)
    return told


def listed(settings: Settings) -> list[dict[str, Any]]:
    """The authorities that are trusted beside our own, by name."""
    return [_told(trusted(file)) for file in sorted((settings.tls_dir / FOLDER).glob("*.pem"))]


def _chain(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Certificates of authorities, each in its time, and each but one issued by another of them. Raises AuthorityRefused."""
    try:
        found = tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        raise AuthorityRefused("this is no authority's certificate (PEM)") from None
    for certificate in found:
        _require_authority(certificate)
    others = [[other for other in found if other != certificate] for certificate in found]
    tops = [one for one, rest in zip(found, others, strict=True) if issuer_among(one, rest) is None]
    if len(tops) != 1 or len(set(found)) != len(found) or len(found) > MOST:
        raise AuthorityRefused("these certificates are not one authority's and those above it, each once")
    return found


def _require_authority(certificate: x509.Certificate) -> None:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except (ValueError, x509.ExtensionNotFound):
        raise AuthorityRefused("this is no authority's certificate (PEM)") from None
    if not constraints.ca or not usage.key_cert_sign:
        raise AuthorityRefused("this certificate may issue no others")
    if not certificate.not_valid_before_utc <= datetime.now(UTC) < certificate.not_valid_after_utc:
        raise AuthorityRefused("this certificate is out of its time")


def _lists(pem: bytes, certificates: Sequence[x509.Certificate], known: Sequence[RevocationList]) -> None:
    """Raise AuthorityRefused unless these are the authority's lists, in their time, and none is older than one that is here."""
    try:
        found = {one.issuer: one for one in read_lists(pem, certificates)}
    except ValueError as problem:
        raise AuthorityRefused(str(problem), fix="Use a current list of revoked certificates, in PEM, of this authority.") from None
    if any(one.next_update <= datetime.now(UTC) for one in found.values()):
        raise AuthorityRefused("a list is out of its time", fix="Ask the authority for its newest list of revoked certificates.")
    for one in known:
        if one.issuer not in found or found[one.issuer].this_update < one.this_update:
            raise AuthorityRefused(
                "a list that is here is newer, or missing there", fix="Give the newest list of each certificate."
            )


def _told(known: Trusted) -> dict[str, Any]:
    first, *above = known.certificates
    return {
        "name": known.name,
        "subject": _shown(first.subject.rfc4514_string()),
        "sha256": fingerprint(first).hex(),
        "not_after": min(one.not_valid_after_utc for one in known.certificates).isoformat(),
        "above": [fingerprint(one).hex() for one in above],
        "crl_until": min((one.next_update.isoformat() for one in known.lists), default=None),
        "crl_required": known.required,
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
