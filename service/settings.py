"""Settings: one frozen object, read once from `GLOTTIS_` variables, with defaults that work; and the state folder's paths."""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from service.errors import SettingsRefused
from service.secrets import Secret
from service.urls import LOCAL_ORIGIN, is_origin, names_no_password

PREFIX = "GLOTTIS_"
LOG_LEVELS = ("debug", "info", "warning", "error")


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`/var/lib/glottis` for root, `~/.local/state/glottis` for everybody else."""
    if os.geteuid() == 0:
        return Path("/var/lib/glottis")
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local/state")
    return Path(state) / "glottis"


@dataclass(frozen=True)
class Settings:
    """Everything that can be set. Each field `x` is read from `GLOTTIS_X`; anything else with that prefix is refused."""

    state_dir: Path
    """The folder with everything of this installation. Each command that asks a running one needs the same."""
    bind: str = "127.0.0.1"
    """The address at which the edge listens."""
    port: int = 8443
    """The port at which the edge listens."""
    public_base_url: str = "https://localhost:8443"
    """What clients call, without a slash at the end: the `htu` of their proofs starts with it. Unset, it follows `port`."""
    edge_socket: Path | None = None
    """A Unix socket at which a proxy on this machine reaches the edge, in a folder of its own choice; unset, there is none.
    Whoever may connect to it is believed about clients' certificates (RFC 9440)."""
    edge_socket_group: str | None = None
    """The operating system's group that may connect to that socket: the proxy's. Unset, its owner alone may."""
    edge_tcp: bool = True
    """Whether the edge listens at `bind` and `port`; `no` leaves it to the proxy at `edge_socket`."""
    proxy_thumbprints: str | None = None
    """x5t#S256 of the certificates with which proxies elsewhere come over mutual TLS, separated by commas."""
    browser_origins: str | None = None
    """Origins of pages (https://host[:port], separated by commas) whose browsers may call with a key of their own and no
    certificate; unset, no browser may."""
    territory: str = "XX"
    """Where this installation speaks, ISO 3166 alpha-2; `XX` is no country: only consents for everywhere (`*`) then hold."""
    vault_workers: int = 2
    """How many processes open voices."""
    edge_workers: int = 1
    """How many processes answer at the port."""
    log_level: str = "info"
    """The least that is written to `log/` in the state folder: debug, info, warning or error."""
    pkcs11_module: Path | None = None
    """The HSM's PKCS#11 library; unset, it is SoftHSM's, where the system keeps it."""
    pkcs11_profile: str | None = None
    """Which quirks the module has (softhsm, cloudhsm, generic, …); unset, it is found by what the module says of itself. A
    profile without TRUSTED masters (generic-split, luna, softhsm-split) is used only where it is named, from the founding on."""
    serving_pin_file: Path | None = None
    """A file with the serving token's PIN, which its owner alone may read; unset, it lies beside the token."""
    serving_pin_command: str | None = None
    """A command that prints the serving token's PIN, in place of a file; no shell reads it."""
    log_pin_file: Path | None = None
    """A file with the PIN of the audit log's token; unset, it lies beside the token."""
    log_pin_command: str | None = None
    """A command that prints the PIN of the audit log's token, in place of a file."""
    database_url: str | None = None
    """Owner's URL of a Postgres of your own; unset, an embedded one is started. It holds no password: use one of the next two."""
    database_url_file: Path | None = None
    """A file with that URL, password included, which its owner alone may read."""
    database_url_command: str | None = None
    """A command that prints that URL."""
    site: str = "a"
    """This site's name in the roster: a or b."""
    sites: int = 2
    """How many sites the cluster has; 1 is a development mode, in which no key is ever held twice."""
    serves: bool = True
    """Whether vault and edge run here. A site that does not serve keeps keys, votes and signs all the same."""
    site_bind: str = "127.0.0.1"
    """The address at which the other site reaches this one."""
    site_port: int = 0
    """Where the other site reaches this one; 0 is any free port, which is enough while both are on one machine."""
    peer: str = "embedded"
    """`embedded`: site a starts site b in its own state folder; `external`: the other site runs elsewhere, at `peer_url`."""
    peer_url: str | None = None
    """Where the other site is reached, https://host:port, if it is `external`."""
    peer_port: int = 0
    """The port at which an embedded site b serves too; 0 leaves serving to site a."""
    peer_age_hours: int = 72
    """A site that heard nothing of the other for so long serves no more, unless officers break the glass."""
    destroy_delay_hours: int = 168
    """How long a master's destruction, once approved, must wait at least: time to find out that it was a mistake."""
    signer_days: int = 0
    """The age at which a signing key is followed by its next version, by itself; 0 leaves it to `glottis keys signer rotate`."""
    vault_openings: int = 400_000
    """After how many keys opened a vault worker is replaced: SoftHSM leaks about 250 bytes with each, 100 MB by then."""
    worker: str = "0"
    """Set by the supervisor: which of its kind this process is."""
    listen_fd: int | None = None
    """Set by the supervisor: the listening socket this process inherits."""
    supervisor_fd: int | None = None
    """Set by the supervisor: the pipe on which a worker says that it serves, or that it should be replaced."""
    peer_fd: int | None = None
    """Set by the supervisor: the socket at which the other site's calls arrive."""

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Self:
        """Read `environ`. Raises SettingsRefused for an unknown name (with the nearest known one) or a value that does not hold."""
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, object] = {"state_dir": default_state_dir(environ)}
        for name in sorted(environ):
            if not name.startswith(PREFIX):
                continue
            if not environ[name]:
                raise SettingsRefused(f"{name} is empty: unset it to use the default")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SettingsRefused(f"unknown setting {name}{hint}")
            values[known[name]] = _parsed(name, known[name], environ[name])
        values.setdefault("public_base_url", f"https://localhost:{values.get('port', cls.port)}")
        # A link may lead to the folder, by its owner's wish; below it nothing is followed.
        values["state_dir"] = Path(os.path.realpath(str(values["state_dir"])))
        settings = cls(**values)  # type: ignore[arg-type]
        _check(settings)
        return settings

    def environ(self, **changes: object) -> dict[str, str]:
        """The variables from which `load` makes these settings again, with `changes`: how a child process is configured."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        return {PREFIX + name.upper(): _written(value) for name, value in values.items() if value not in {None, ""}}

    def of_site_b(self, **changes: object) -> Settings:
        """The settings of the second site that this one starts on its own machine: an installation of its own, inside."""
        inner: dict[str, object] = {"state_dir": self.state_dir / "site-b", "site": "b", "peer": "external"}
        inner |= {"serves": self.peer_port != 0, "port": self.peer_port or self.port, "vault_workers": 1, "peer_port": 0}
        own = {"site_port": 0, "peer_url": None, "public_base_url": f"https://localhost:{self.peer_port or self.port}"}
        shared = {name: getattr(self, name) for name in ("bind", "territory", "log_level", "browser_origins")}
        shared |= {name: getattr(self, name) for name in ("pkcs11_module", "pkcs11_profile")}
        shared |= {name: getattr(self, name) for name in ("peer_age_hours", "destroy_delay_hours", "signer_days")}
        return replace(Settings(**inner | own | shared), **changes)  # type: ignore[arg-type]

    @property
    def starts_peer(self) -> bool:
        """Whether the other site is one that `glottis up` starts here."""
        return self.sites == 2 and self.peer == "embedded"

    @property
    def proxies(self) -> tuple[str, ...]:
        """The pinned thumbprints of proxies' certificates."""
        return tuple(self.proxy_thumbprints.split(",")) if self.proxy_thumbprints else ()

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of pages whose browsers may call."""
        return tuple(self.browser_origins.split(",")) if self.browser_origins else ()

    @property
    def embedded(self) -> bool:
        """Whether the database is the embedded one."""
        return not (self.database_url or self.database_url_file or self.database_url_command)

    def owner_url(self) -> str:
        """The database URL of the role that migrates. Raises SecretRefused."""
        if self.database_url:
            return self.database_url
        if self.embedded:
            return Secret(self.url_file("owner")).read()
        return Secret(self.database_url_file, self.database_url_command).read()

    def role_url(self, role: str) -> str:
        """The database URL of a serving role: `vault` or `log`. Raises SecretRefused."""
        return Secret(self.url_file(role)).read()

    @property
    def serving_pin(self) -> Secret:
        """Where the vault finds the serving token's PIN."""
        return Secret(self.serving_pin_file or self.pin_file("serving"), self.serving_pin_command)

    @property
    def log_pin(self) -> Secret:
        """Where the log finds its token's PIN."""
        return Secret(self.log_pin_file or self.pin_file("log"), self.log_pin_command)

    def token_dir(self, token: str) -> Path:
        """`serving`, `log`, `officer` or `rotation`: the token's own folder."""
        return self.state_dir / "tokens" / token

    def pin_file(self, token: str) -> Path:
        return self.token_dir(token) / "pin"

    @property
    def checkpoint_file(self) -> Path:
        """The log's own copy of its newest checkpoint, outside the database."""
        return self.state_dir / "audit" / "checkpoint"

    @property
    def hand_overs_file(self) -> Path:
        """How the log's checkpoint key was followed by others, line by line."""
        return self.state_dir / "audit" / "hand-overs"

    @property
    def officer_dir(self) -> Path:
        return self.state_dir / "officer"

    @property
    def tls_dir(self) -> Path:
        return self.state_dir / "tls"

    def client_dir(self, name: str) -> Path:
        return self.state_dir / "clients" / name

    @property
    def run_dir(self) -> Path:
        return self.state_dir / "run"

    @property
    def vault_sockets(self) -> tuple[Path, ...]:
        """One Unix socket a vault worker, in order."""
        return tuple(self.run_dir / f"vault-{number}.sock" for number in range(self.vault_workers))

    @property
    def admin_socket(self) -> Path:
        """Where the site process takes the operator's commands."""
        return self.run_dir / "site.sock"

    @property
    def link_dir(self) -> Path:
        """The site process's own: keys and certificates of its link to the other site, and when that was last heard."""
        return self.state_dir / "link"

    @property
    def roster_file(self) -> Path:
        """The roster that the cluster began with: the anchor of every check of its history."""
        return self.state_dir / "roster"

    @property
    def pg_dir(self) -> Path:
        return self.state_dir / "pg"

    @property
    def pg_run_dir(self) -> Path:
        return self.run_dir / "pg"

    def url_file(self, role: str) -> Path:
        return self.state_dir / "db" / f"{role}.url"

    @property
    def superuser_file(self) -> Path:
        """The embedded database's superuser: used to make roles and extension, and to ask whether the server answers."""
        return self.url_file("superuser")

    @property
    def site_file(self) -> Path:
        return self.state_dir / "site.json"

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"


_YES_NO: Mapping[str, bool] = types.MappingProxyType({"yes": True, "no": False})
_PARSERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "Path": lambda text: Path(text).expanduser().absolute(),
    "str": str,
    "bool": lambda text: _YES_NO[text.lower()],
}


def _parsed(variable: str, name: str, text: str) -> object:
    kind = Settings.__annotations__[name].split(" | ")[0]
    try:
        return _PARSERS[kind](text)
    except KeyError as error:
        raise SettingsRefused(f"{variable} must be yes or no, not {text!r}") from error
    except ValueError as error:
        raise SettingsRefused(f"{variable} must be a whole number, not {text!r}") from error


def _written(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _check(settings: Settings) -> None:
    rules: Mapping[str, bool] = types.MappingProxyType(
        {
            "GLOTTIS_TERRITORY must be two capital letters (ISO 3166)": re.fullmatch("[A-Z]{2}", settings.territory) is not None,
            "GLOTTIS_PORT must be between 1 and 65535": 1 <= settings.port <= 65535,
            "GLOTTIS_VAULT_WORKERS must be between 1 and 64": 1 <= settings.vault_workers <= 64,
            "GLOTTIS_VAULT_OPENINGS must be at least 1": settings.vault_openings >= 1,
            "GLOTTIS_EDGE_WORKERS must be between 1 and 64": 1 <= settings.edge_workers <= 64,
            f"GLOTTIS_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}": settings.log_level in LOG_LEVELS,
            "GLOTTIS_EDGE_TCP can be no only where GLOTTIS_EDGE_SOCKET names a socket": settings.edge_tcp
            or settings.edge_socket is not None,
            "GLOTTIS_EDGE_SOCKET must be a path of at most 100 bytes": len(os.fsencode(settings.edge_socket or "")) <= 100,
            "GLOTTIS_PROXY_THUMBPRINTS must be x5t#S256 (43 characters of base64url), separated by commas": all(
                re.fullmatch("[A-Za-z0-9_-]{43}", thumbprint) for thumbprint in settings.proxies
            ),
            "GLOTTIS_SITE must be a or b": settings.site in ("a", "b"),
            "GLOTTIS_SITES must be 1 or 2": settings.sites in (1, 2),
            "GLOTTIS_PEER must be embedded, which site a alone may have, or external": settings.peer == "external"
            or (settings.peer == "embedded" and (settings.site == "a" or settings.sites == 1)),
            "GLOTTIS_PEER_PORT and GLOTTIS_SITE_PORT must be between 0 and 65535": 0 <= settings.peer_port <= 65535
            and 0 <= settings.site_port <= 65535,
            "GLOTTIS_PEER_URL must be https://host:port and nothing more": settings.peer_url is None
            or is_origin(settings.peer_url),
            "GLOTTIS_PEER_AGE_HOURS must be at least 1": settings.peer_age_hours >= 1,
            "GLOTTIS_DESTROY_DELAY_HOURS must not be negative": settings.destroy_delay_hours >= 0,
            "GLOTTIS_SIGNER_DAYS must not be negative": settings.signer_days >= 0,
            "GLOTTIS_BROWSER_ORIGINS must be origins, https://host[:port] (or http://localhost:port), separated by commas": all(
                is_origin(origin) or LOCAL_ORIGIN.fullmatch(origin) for origin in settings.origins
            ),
            "GLOTTIS_PUBLIC_BASE_URL must be https://host[:port] and nothing more": is_origin(settings.public_base_url),
            "GLOTTIS_DATABASE_URL must be a URL without password: put it into GLOTTIS_DATABASE_URL_FILE": names_no_password(
                settings.database_url
            ),
        }
    )
    for rule, holds in rules.items():
        if not holds:
            raise SettingsRefused(rule)
