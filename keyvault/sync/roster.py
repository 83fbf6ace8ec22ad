"""The roster: which two HSMs form the cluster, and which officers may act for it. The trust anchor of every check."""

from __future__ import annotations

from dataclasses import dataclass

from keyvault.approvals import Officer, Quorum
from keyvault.sync.errors import SignatureInvalid
from keyvault.sync.wire import Statement, require


@dataclass(frozen=True)
class SiteKey(Statement):
    """One site: its name, its token's serial number, and its HSM's P-256 identity key (SubjectPublicKeyInfo, DER)."""

    DOMAIN = "hsm-sync/1/site"
    name: str
    token_serial: str
    public_key: bytes

    def __post_init__(self) -> None:
        require(bool(self.name) and bool(self.public_key), "a site has a name and a public key")


@dataclass(frozen=True)
class Roster(Statement):
    """Sites in the order of their names, and the officers of whom `threshold` must approve.

    One site is a development mode: nothing waits for a second HSM, `threshold` may be 0, and `glottis doctor` names it.
    """

    DOMAIN = "hsm-sync/1/roster"
    cluster: str
    epoch: int
    sites: tuple[SiteKey, ...]
    officers: tuple[Officer, ...]
    threshold: int

    def __post_init__(self) -> None:
        require(bool(self.cluster), "a roster names its cluster")
        require(len(self.sites) in (1, 2), "a cluster has two sites, or one in development")
        require(list(self.names) == sorted(set(self.names)), "sites are sorted by name, each once")
        people = [officer.person for officer in self.officers]
        require(people == sorted(set(people)), "officers are sorted by name, each once")
        keys = [key for officer in self.officers for key in officer.keys] + [site.public_key for site in self.sites]
        require(len(keys) == len(set(keys)), "every key belongs to one person or one site")
        require(not set(people) & {machine(name) for name in self.names}, "no person is named like a site")
        least = 0 if self.development else 2
        require(least <= self.threshold <= len(people), f"the quorum is from {least} to the number of officers")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def development(self) -> bool:
        """Whether only one site exists, so that nothing is ever held twice."""
        return len(self.sites) == 1

    @property
    def quorum(self) -> Quorum:
        """The officers; the sites' HSMs may file requests (a rotation by schedule) and never approve."""
        machines = tuple(Officer(machine(site.name), (site.public_key,)) for site in self.sites)
        return Quorum(self.officers, self.threshold, machines)

    def public_key(self, site: str) -> bytes:
        """Raises SignatureInvalid for a name that is no site: nobody else can have signed."""
        for known in self.sites:
            if known.name == site:
                return known.public_key
        raise SignatureInvalid(f"the roster names no site {site!r}")

    def peers(self, site: str) -> tuple[str, ...]:
        """The other site's name, or nothing in development."""
        return tuple(name for name in self.names if name != site)


def machine(site: str) -> str:
    """The name under which a site's HSM signs requests."""
    return f"site/{site}"
