"""The first start of a state folder, step by step, and every later one: what is there stays, what is missing is made.

A token appears by renaming a finished folder, a file by renaming a finished file, the cluster likewise: a start that was cut
off is taken up again, and what it left half made was never used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import make_url

from service import certificates, sites, step
from service.embedded import SUPERUSER, EmbeddedPostgres, new_password
from service.errors import HalfMade
from service.isolation import Account, Isolation, establish
from service.officers import read_roster
from service.schema import LOG, OWNER, VAULT
from service.secrets import Secret
from service.settings import Settings
from service.site import ROTATION, Site, holds_masters_twice, module, token_facts
from service.sites import Introduction

TOKENS = ("serving", "log", "officer")
"""The first site's. The second has no officer token: the first site's authority issues its certificates too."""


@dataclass(frozen=True)
class Installation:
    """A state folder that is ready: its settings, the users in force, its public facts, and its database if embedded."""

    settings: Settings
    isolation: Isolation
    site: Site
    postgres: EmbeddedPostgres | None

    @property
    def second(self) -> Settings | None:
        """The second site's settings, where it is one that this installation starts."""
        return self.settings.of_site_b() if self.settings.starts_peer else None


def prepare(settings: Settings) -> Installation:
    """Everything but the running processes: folders, tokens, certificates, site.json, database and schema. Idempotent.

    Call it while holding the folder. Raises ServiceError or KeyVaultError with what to do; finished steps are kept.
    """
    installation = prepare_files(settings)
    if installation.postgres is None:
        prepare_schema(installation)
    else:
        with installation.postgres.serving(superuser_password(installation.settings)):
            prepare_schema(installation)
    return installation


def prepare_files(settings: Settings) -> Installation:
    """The part of `prepare` that needs no database: after it, the embedded server can be started."""
    module(settings)  # missing: say so before anything is made
    isolation = establish(settings.state_dir, settings.site)
    _folders(settings, isolation)
    with ExitStack() as stack:  # tokens, clusters and the second site at once: two cores make them in half the time
        second = stack.enter_context(_second_site(settings, isolation))
        tokens = [stack.enter_context(_token(settings, name, isolation)) for name in _tokens(settings)]
        postgres = _postgres(settings, isolation)
        for finish in tokens:
            finish()
        site = _site(settings, isolation)
        if "officer" in site.tokens:
            _certificates(settings, isolation, site)
        introduced = second()
    sites.gather(settings, isolation, site, introduced)
    return Installation(settings, isolation, site, postgres)


def _tokens(settings: Settings) -> tuple[str, ...]:
    own = TOKENS if settings.site == "a" else TOKENS[:2]
    return (*own, ROTATION) if holds_masters_twice(settings) else own


@contextmanager
def _second_site(settings: Settings, isolation: Isolation) -> Iterator[Callable[[], Introduction | None]]:
    """Begin to make the second site's folder, where this installation starts that site and it has not entered yet."""
    second = settings.of_site_b()
    if not settings.starts_peer or sites.inside(second):
        yield lambda: None
        return
    isolation.officer.folder(second.state_dir, 0o711)
    with step.begun(second, isolation.officer, "prepare_site") as answer:
        yield lambda: Introduction.from_json(answer())


def embedded_postgres(settings: Settings, isolation: Isolation) -> EmbeddedPostgres | None:
    """The embedded server of these settings; None where they name another one."""
    return EmbeddedPostgres(settings.pg_dir, settings.pg_run_dir, isolation.database) if settings.embedded else None


def superuser_password(settings: Settings) -> str:
    """The embedded server's superuser's. Raises SecretRefused."""
    return str(make_url(Secret(settings.superuser_file).read()).password)


def prepare_schema(installation: Installation) -> None:
    """Roles and schema, on a database that answers; each role's URL goes to the file of the user that needs it."""
    settings, isolation = installation.settings, installation.isolation
    owners = {VAULT: ("vault", isolation.vault), LOG: ("log", isolation.log)}
    admin_url = None
    if installation.postgres is not None:
        owners[OWNER] = ("owner", isolation.officer)
        admin_url = installation.postgres.url(SUPERUSER, superuser_password(installation.settings), "postgres")
    if all(settings.url_file(name).exists() for name, _ in owners.values()):
        step.call(settings, isolation.officer, "prepare_schema", admin_url=None, owner_url=settings.owner_url(), passwords={})
        return
    passwords = {role: new_password() for role in owners}
    urls = {role: _role_url(installation, role, password) for role, password in passwords.items()}
    owner_url = urls.get(OWNER) or settings.owner_url()
    step.call(settings, isolation.officer, "prepare_schema", admin_url=admin_url, owner_url=owner_url, passwords=passwords)
    for role, (name, account) in owners.items():
        account.file(settings.url_file(name), urls[role] + "\n")


def issue_client(settings: Settings, request: bytes, name: str) -> bytes:
    """A client's certificate (PEM) for a PKCS #10 request (PEM), from the authority in the officer token."""
    answer = step.call(settings, Account.current(), "issue", request=request.decode(errors="replace"), client=name)
    return str(answer["pem"]).encode()


def _role_url(installation: Installation, role: str, password: str) -> str:
    if installation.postgres is not None:
        return installation.postgres.url(role, password)
    url = make_url(installation.settings.owner_url()).set(username=role, password=password)
    return url.render_as_string(hide_password=False)


def _folders(settings: Settings, isolation: Isolation) -> None:
    """Each folder to its owner; where users differ, the way to them may be walked but not listed."""
    officer = isolation.officer
    passage = 0o711 if isolation.separate or isolation.database.uid != officer.uid else 0o700
    officer.own(settings.state_dir, passage)
    isolation.vault.folder(settings.link_dir)
    for folder in (settings.run_dir, settings.state_dir / "tokens", settings.state_dir / "db"):
        officer.folder(folder, passage)
    for folder in (settings.officer_dir, settings.log_dir, settings.state_dir / "clients"):
        officer.folder(folder)
    isolation.edge.folder(settings.tls_dir)
    isolation.log.folder(settings.checkpoint_file.parent)


@contextmanager
def _token(settings: Settings, name: str, isolation: Isolation) -> Iterator[Callable[[], None]]:
    """Begin to make one token under its owner's user, unless it is there; what is yielded waits until it is whole."""
    place, owner, officer = settings.token_dir(name), isolation.owner(name), isolation.officer
    if place.exists():
        yield lambda: _whole(settings, place, owner)
        return
    if name == "serving" and settings.roster_file.exists():
        # The cluster knows this token: another in its place would hold none of the keys that stored voices need.
        masters = ", ".join(master.label for master in Site.load(settings.site_file).masters) or "this site's keys"
        raise HalfMade(
            f"{place} is gone, and with it {masters}: no new key is made in its place",
            fix=f"Restore {place} from a backup, or let officers replace this site (`glottis approvals`).",
        )
    if name == ROTATION and settings.roster_file.exists():
        raise HalfMade(
            f"{place} is missing: without it no master is made and no key re-wrapped",
            fix="Restore it from a backup. An installation keeps the GLOTTIS_PKCS11_PROFILE that it was founded with.",
        )
    unfinished = place.with_name(f"{name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    owner.folder(unfinished)
    so_pin, user_pin = new_password(), new_password()
    making = step.begun(settings, owner, "make_token", name=name, folder=str(unfinished), so_pin=so_pin, user_pin=user_pin)
    with making as answer:

        def finish() -> None:
            answer()
            officer.file(settings.officer_dir / f"{name}.so-pin", so_pin + "\n")
            unfinished.rename(place)
            _whole(settings, place, owner)

        yield finish


def _whole(settings: Settings, place: Path, owner: Account) -> None:
    """Raise HalfMade where a part of the token is missing; make sure that all of it is its owner's alone."""
    for part in ("token.json", "softhsm2.conf", "objects"):
        if not (place / part).exists():
            raise HalfMade(
                f"{place} lacks {part}: the token is not whole",
                fix=f"Restore {place} from a backup. Without it every voice stays shut; to begin anew delete {settings.state_dir}.",
            )
    owner.own_tree(place)


def _site(settings: Settings, isolation: Isolation) -> Site:
    names = _tokens(settings)
    tokens = {name: token_facts(json.loads((settings.token_dir(name) / "token.json").read_text())) for name in names}
    site = Site(_cluster(settings), tokens, settings.site)
    isolation.officer.file(settings.site_file, site.to_json(), mode=0o644)
    return site


def _cluster(settings: Settings) -> UUID:
    """The cluster that this folder belongs to: by its roster, by its facts, or a new one. Raises HalfMade."""
    known = Site.load(settings.site_file).cluster if settings.site_file.exists() else uuid4()
    return UUID(read_roster(settings.roster_file).cluster) if settings.roster_file.exists() else known


def _certificates(settings: Settings, isolation: Isolation, site: Site) -> None:
    """The authority's certificate once; the server's whenever it is missing, old, or names other hosts than are served."""
    officer, authority = isolation.officer, settings.officer_dir / "ca.pem"
    if not authority.exists():
        answer = step.call(settings, officer, "make_authority", installation=str(site.cluster))
        officer.file(authority, answer["pem"], mode=0o644)
    certificate, key = settings.tls_dir / "server.pem", settings.tls_dir / "server.key"
    hosts = certificates.hosts(settings.public_base_url, settings.bind)
    whole = certificate.exists() and key.exists() and (settings.tls_dir / "ca.pem").exists()
    if whole and not certificates.needs_renewal(certificate.read_bytes(), authority.read_bytes(), hosts, datetime.now(UTC)):
        return
    private, request = certificates.new_request()
    answer = step.call(settings, officer, "issue", request=request.decode(), hosts=hosts)
    certificate.unlink(missing_ok=True)  # a key beside another key's certificate must not look whole
    isolation.edge.file(key, private)
    isolation.edge.file(settings.tls_dir / "ca.pem", authority.read_bytes(), mode=0o644)
    isolation.edge.file(certificate, answer["pem"], mode=0o644)


def _postgres(settings: Settings, isolation: Isolation) -> EmbeddedPostgres | None:
    postgres = embedded_postgres(settings, isolation)
    if postgres is None:
        return None
    if not settings.superuser_file.exists():
        if settings.pg_dir.exists():
            raise HalfMade(
                f"{settings.superuser_file} is missing, and the cluster in {settings.pg_dir} opens with nothing else",
                fix=f"Restore it from a backup. To begin with an empty database, move {settings.pg_dir} away.",
            )
        isolation.officer.file(settings.superuser_file, postgres.url(SUPERUSER, new_password(), "postgres") + "\n")
    postgres.create(superuser_password(settings))
    return postgres
