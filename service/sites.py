"""How a site comes into a cluster: it introduces itself, the first site's officers admit it, it enters with what they give.

An introduction holds public facts alone: the token's serial and identity key, and a request for the certificate of the link
between the sites. The welcome holds that certificate and the roster, which from then on is the anchor of every check.
`glottis up` plays both sides on one machine; between hosts the two travel as files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from cryptography import x509

from keyvault.approvals import Officer
from keyvault.hsm import KeyName
from keyvault.sync.errors import StatementMalformed
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.statement import Certificate
from service import certificates, step
from service.errors import IntroductionRefused
from service.isolation import Account, Isolation, establish
from service.officers import OfficerKey, new_key, read_roster
from service.settings import Settings
from service.site import Site

DEVELOPMENT_OFFICERS = ("officer-1", "officer-2", "officer-3")
THRESHOLD = 2
HISTORY = "history"


@dataclass(frozen=True)
class Introduction:
    """What a site says of itself. `link` and `edge` are requests (PKCS #10, PEM) for its end of the link and its server."""

    site: str
    serial: str
    identity: bytes
    link: str
    edge: str
    hosts: tuple[str, ...]

    @property
    def key(self) -> SiteKey:
        return SiteKey(self.site, self.serial, self.identity)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "identity": base64.b64encode(self.identity).decode(), "hosts": list(self.hosts)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Raises IntroductionRefused for anything else than `to_json` writes."""
        try:
            identity = base64.b64decode(facts["identity"], validate=True)
            hosts = tuple(str(host) for host in facts["hosts"])
            return cls(str(facts["site"]), str(facts["serial"]), identity, str(facts["link"]), str(facts["edge"]), hosts)
        except (KeyError, TypeError, ValueError) as error:
            raise IntroductionRefused from error


def introduce(settings: Settings, isolation: Isolation, site: Site) -> Introduction:
    """This site's introduction; the private keys of link and server are made where they stay, under their own users."""
    token, hosts = site.tokens["serving"], tuple(certificates.hosts(settings.public_base_url, settings.bind))
    link = _requested(isolation.vault, settings.link_dir)
    edge = _requested(isolation.edge, settings.tls_dir)
    return Introduction(settings.site, token.serial, token.public_keys[KeyName.SITE_IDENTITY], link, edge, hosts)


def _requested(owner: Account, folder: Path) -> str:
    """The request beside the private key in `folder`; both are made where one is missing, and the old certificate ends."""
    key, request = folder / "server.key", folder / "request.pem"
    owner.folder(folder)
    if not (key.exists() and request.exists()):
        private, asked = certificates.new_request()
        (folder / "server.pem").unlink(missing_ok=True)  # a key beside another key's certificate must not look whole
        owner.file(key, private)
        owner.file(request, asked, mode=0o644)
    return request.read_text()


def gather(settings: Settings, isolation: Isolation, site: Site, second: Introduction | None) -> None:
    """See to it that this site has a roster and, where there is another, its certificates; likewise a second one, introduced.

    A site without an officer token can only enter by a welcome. Idempotent: what holds stays.
    """
    if "officer" not in site.tokens:
        return
    if settings.sites == 1:
        compose(settings, isolation, site, ())
        return
    if second is not None:
        roster = compose(settings, isolation, site, (second.key,))
        other = settings.of_site_b()
        theirs = establish(other.state_dir, other.site)
        enter(other, theirs, Site.load(other.site_file), admit(settings, isolation, second, roster))
    if settings.roster_file.exists() and not inside(settings):
        request, cluster = _requested(isolation.vault, settings.link_dir), read_roster(settings.roster_file).cluster
        certificate = _link_certificate(settings, isolation, request, link_name(settings.site, cluster))
        _take(isolation.vault, settings.link_dir, certificate, (settings.officer_dir / "ca.pem").read_text())


def compose(settings: Settings, isolation: Isolation, site: Site, others: Sequence[SiteKey]) -> Roster:
    """The roster that a new cluster of this site and `others` begins with, kept here; one that is there already stays.

    The development installation makes its three officers' keys here; two of them must approve.
    """
    if settings.roster_file.exists():
        return read_roster(settings.roster_file)
    officers = tuple(Officer(person, (key.public,)) for person, key in development_officers(settings).items())
    token = site.tokens["serving"]
    own = SiteKey(settings.site, token.serial, token.public_keys[KeyName.SITE_IDENTITY])
    members = tuple(sorted((own, *others), key=lambda key: key.name))
    roster = Roster(str(site.cluster), 1, members, officers, THRESHOLD)
    isolation.officer.file(settings.roster_file, roster.encode(), mode=0o644)
    return roster


def development_officers(settings: Settings) -> dict[str, OfficerKey]:
    """The development installation's officers by name; a key that is missing is made. Nobody else holds them."""
    found = {}
    for person in DEVELOPMENT_OFFICERS:
        path = settings.officer_dir / f"{person}.pem"
        found[person] = OfficerKey.load(path, str) if path.exists() else new_key(path, None)
    return found


def admit(
    settings: Settings, isolation: Isolation, introduction: Introduction, roster: Roster, history: Sequence[str] = ()
) -> dict[str, Any]:
    """What an introduced site needs to enter: its certificates from the authority in the officer token, and the first roster.

    `roster` is the one in force; a site that comes in later gets the `history` (base64) that leads to it. Raises
    IntroductionRefused where the roster does not name this site with this token and key.
    """
    if introduction.key not in roster.sites:
        raise IntroductionRefused("the roster names no such site with this token and key")
    link = _link_certificate(settings, isolation, introduction.link, link_name(introduction.site, roster.cluster))
    edge = step.call(settings, isolation.officer, "issue", request=introduction.edge, hosts=list(introduction.hosts))
    authority = (settings.officer_dir / "ca.pem").read_text()
    first = settings.roster_file.read_bytes()
    given = {"authority": authority, "link": link, "edge": str(edge["pem"])}
    return given | {"roster": base64.b64encode(first).decode(), "history": list(history)}


def _link_certificate(settings: Settings, isolation: Isolation, request: str, name: str) -> str:
    return str(step.call(settings, isolation.officer, "issue_site", request=request, name=name)["pem"])


@dataclass(frozen=True)
class Welcome:
    """What `admit` gave: certificates (PEM) of the link and the server, their authority, the first roster, and its history."""

    roster: Roster
    link: str
    edge: str
    authority: str
    history: tuple[bytes, ...]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Raises IntroductionRefused for anything else than `admit` gives, whichever part it is."""
        try:
            roster = Roster.decode(base64.b64decode(facts["roster"], validate=True))
            UUID(roster.cluster)
            link, edge, authority = (str(facts[name]) for name in ("link", "edge", "authority"))
            for certificate in (link, edge, authority):
                x509.load_pem_x509_certificate(certificate.encode())
            history = tuple(base64.b64decode(one, validate=True) for one in facts.get("history", ()))
            for one in history:
                Certificate.decode(one)
        except (KeyError, TypeError, ValueError, StatementMalformed) as error:
            mend = "Use what `glottis site admit` printed at the first site, unchanged."
            raise IntroductionRefused("this is no site's welcome", fix=mend) from error
        return cls(roster, link, edge, authority, history)


def enter(settings: Settings, isolation: Isolation, site: Site, welcome: Mapping[str, Any]) -> Site:
    """Take certificates, history and roster; returns the site's facts, now of the roster's cluster.

    Raises IntroductionRefused; nothing was written then. The roster comes last: with it the site has entered.
    """
    given = Welcome.from_json(welcome)
    _take(isolation.vault, settings.link_dir, given.link, given.authority)
    _take(isolation.edge, settings.tls_dir, given.edge, given.authority)
    folder = isolation.officer.folder(settings.state_dir / HISTORY, 0o755)
    for number, certificate in enumerate(given.history, 1):
        isolation.officer.file(folder / f"{number:08}.certificate", certificate, mode=0o644)
    entered = replace(site, cluster=UUID(given.roster.cluster))
    isolation.officer.file(settings.site_file, entered.to_json(), mode=0o644)
    isolation.officer.file(settings.roster_file, given.roster.encode(), mode=0o644)
    return entered


def read_history(settings: Settings) -> list[bytes]:
    """The certificates that a site which came in later begins from, in order."""
    return [path.read_bytes() for path in sorted((settings.state_dir / HISTORY).glob("*.certificate"))]


def _take(owner: Account, folder: Path, certificate: str, authority: str) -> None:
    owner.file(folder / "ca.pem", authority, mode=0o644)
    owner.file(folder / "server.pem", certificate, mode=0o644)


def inside(settings: Settings) -> bool:
    """Whether this site has entered a cluster, with certificates that hold for a while yet."""
    if not settings.roster_file.exists():
        return False
    names = [link_name(settings.site, read_roster(settings.roster_file).cluster)]
    return _holds(settings.link_dir, names) and (
        settings.site == "a" or _holds(settings.tls_dir, certificates.hosts(settings.public_base_url, settings.bind))
    )


def _holds(folder: Path, hosts: Sequence[str]) -> bool:
    certificate, authority = folder / "server.pem", folder / "ca.pem"
    if not (certificate.exists() and authority.exists() and (folder / "server.key").exists()):
        return False
    return not certificates.needs_renewal(certificate.read_bytes(), authority.read_bytes(), hosts, datetime.now(UTC))


def link_name(site: str, cluster: str) -> str:
    """The name in a site's link certificate, which the other end demands: no server and no client is ever called so."""
    return f"site-{site}.{cluster}"
