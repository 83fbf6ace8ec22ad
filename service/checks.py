"""What `glottis doctor` looks at: each part tried for real, with what was found and how to mend it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

from sqlalchemy import text

from service import bringup, holding, site_checks, step
from service.audit_bundles import check_records
from service.authority_checks import authorities
from service.errors import AlreadyRunning, StateFolderRefused, own_code, words
from service.exits import Exit, exit_for
from service.findings import Finding
from service.hsm_figures import hsm_finding, worker_figures
from service.isolation import Account, Isolation, establish
from service.programs import edge_serves, listening, unix_serves
from service.schema import check_versions, opened
from service.settings import Settings
from service.site import ROTATION, Site, module
from synth.hibari_engine import HibariEngine
from synth.models import require_one_runtime
from voiceprints.models import GE2E, SILERO


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at every part. Nothing is changed; a database that is down is started for the look, if nobody holds the folder."""
    yield _try("libraries", _libraries)
    yield _try("models", _models)
    yield _try("pkcs11", lambda: str(module(settings)))
    if not settings.site_file.exists():
        yield _try("port", lambda: _port_free(settings))
        yield _never_started(settings)
        return
    isolation = establish(settings.state_dir, settings.site)
    yield Finding("state", "ok", str(settings.state_dir))
    yield _isolation(isolation)
    yield from _tokens(settings, isolation)
    yield from site_checks.certificates(settings)
    yield from authorities(settings)
    yield site_checks.backups(settings)
    yield from _running(settings, isolation)


def _never_started(settings: Settings) -> Finding:
    folder = settings.state_dir
    if folder.exists() and not (folder / holding.LOCK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        refused = StateFolderRefused(f"{folder} holds files that are not of Glottis")
        return Finding("state", "fails", str(refused), refused.mend, exit_for(refused))
    mend = "Start it once: glottis up. If it runs elsewhere, name its folder in GLOTTIS_STATE_DIR in this terminal too."
    return Finding("state", "note", f"{folder} was never started", mend)


def worst(findings: list[Finding]) -> Exit:
    """What the command ends with: the gravest of what failed."""
    order = (Exit.INTEGRITY, Exit.HSM, Exit.CONFLICT, Exit.REFUSED, Exit.LOCAL, Exit.PARTIAL, Exit.TEMPORARY)
    failed = {finding.exit for finding in findings if finding.state == "fails"}
    return next((code for code in order if code in failed), Exit.OK)


def _try(part: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, "ok", look())
    except Exception as error:  # noqa: BLE001 — a doctor reports whatever is broken, and goes on to the next part
        mend = getattr(error, "mend", None) or getattr(error, "fix", "")
        said = str(error) if own_code(error) else words(error)
        return Finding(part, "fails", said, str(mend), exit_for(error))


def _guarded(part: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The same for looks that say themselves what they found."""
    findings: list[Finding] = []

    def all_of_it() -> str:
        findings.extend(look())
        return ""

    failed = _try(part, all_of_it)
    yield from findings if failed.state == "ok" else [failed]


def _libraries() -> str:
    require_one_runtime()
    return f"glottis {metadata.version('glottis')}, onnxruntime {metadata.version('onnxruntime')} and no other runtime"


def _models() -> str:
    for model in (GE2E, SILERO):
        model.read()
    return f"{GE2E.model_id}, {SILERO.model_id}, {HibariEngine().model_id}: every file has its pinned SHA-256"


def _isolation(isolation: Isolation) -> Finding:
    if isolation.separate:
        return Finding("isolation", "ok", isolation.describe())
    mend = "Run `glottis up` as root, from a folder that other users may enter, to give each process its own user."
    return Finding("isolation", "note", isolation.describe(), mend)


def _tokens(settings: Settings, isolation: Isolation) -> Iterator[Finding]:
    """Each token opened under its user: PIN, audit, probes of what it must refuse, and a real unwrap."""
    for name in (name for name in ("serving", "log", "officer", ROTATION) if settings.token_dir(name).exists()):
        yield _try(f"token {name}", partial(_token, settings, name, isolation.owner(name)))
    if Site.load(settings.site_file).split:
        told = "by the other site's comparison alone" if settings.sites == 2 else "by nothing, with one site"
        said = f"masters are not TRUSTED (profile {settings.pkcs11_profile}): one planted with the serving PIN is told {told}"
        yield Finding("masters", "note", said, "Re-wraps and destructions need the rotation token's PIN: docs/key-management.md")


def _token(settings: Settings, name: str, owner: Account) -> str:
    found = step.call(settings, owner, "probe_token", name=name)
    opens, masters = f"opens (profile {found['profile']})", ", ".join(found["masters"])
    if not masters:
        return f"{opens}; holds nothing that it should not"
    if name == ROTATION:
        return f"{opens}; refuses every weaker request; re-wraps under {masters}"
    return f"{opens}; refuses every weaker request; sealed, wrapped, unwrapped and opened under {masters}"


def _running(settings: Settings, isolation: Isolation) -> Iterator[Finding]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(holding.held(settings))
        except AlreadyRunning:
            yield Finding("processes", "ok", "glottis up is running")
            yield _try("database", lambda: _database(settings))
            yield from _guarded("clock", lambda: iter([site_checks.clock(settings)]))
            yield _try("audit", lambda: _audit(settings))
            yield from _guarded("sites", lambda: site_checks.sites(settings))
            yield from _guarded("policies", lambda: site_checks.policies(settings))
            yield from _sockets(settings)
            return
        yield Finding("processes", "note", "not running", "Start them: glottis up")
        yield from _database_started(settings, isolation)
        yield _try("port", lambda: _port_free(settings))


def _database_started(settings: Settings, isolation: Isolation) -> Iterator[Finding]:
    """The database and the audit records in it; an embedded one is started once for both."""
    audit: list[Finding] = []

    def look() -> str:
        postgres, how = bringup.embedded_postgres(settings, isolation), ""
        with contextlib.ExitStack() as stack:
            if postgres is not None:
                stack.enter_context(postgres.serving(bringup.superuser_password(settings)))
                how = " (started for this look)"
            said = _database(settings) + how
            audit.append(_try("audit", lambda: _audit(settings)))
            return said

    yield _try("database", look)
    yield from audit


def _audit(settings: Settings) -> str:
    return f"{check_records(settings)} records: each was written by a vault, none is missing, and the log holds them as written"


def _database(settings: Settings) -> str:
    with opened(settings.owner_url()) as engine, engine.connect() as connection:
        server, vector = check_versions(connection)
        step = connection.scalar(text("SELECT version_num FROM alembic_version"))
    for role in ("vault", "log"):
        with opened(settings.role_url(role)) as engine, engine.connect() as connection:
            connection.execute(text("SELECT 1 FROM intent LIMIT 1"))
    return f"Postgres {server}, pgvector {vector}, schema {step}; vault and log log in"


def _sockets(settings: Settings) -> Iterator[Finding]:
    if not settings.serves:
        yield Finding("serving", "ok", "this site keeps keys and does not serve: GLOTTIS_SERVES=no")
        return
    for path in settings.vault_sockets:
        serves = unix_serves(path)
        mend = f"Read {settings.log_dir / path.stem}.log"
        yield Finding(path.stem, "ok", "ready") if serves else Finding(path.stem, "fails", "is not ready", mend, Exit.TEMPORARY)
        if figures := worker_figures(path):
            yield hsm_finding(path.stem, figures, settings.log_dir)
    if settings.edge_tcp and edge_serves(settings):
        yield Finding("edge", "ok", f"serves {settings.public_base_url} over TLS")
    elif settings.edge_tcp:
        yield Finding(
            "edge", "fails", f"does not answer on port {settings.port}", f"Read {settings.log_dir}/edge-0.log", Exit.TEMPORARY
        )
    if settings.edge_socket is None:
        return
    mend = f"Read {settings.log_dir}/edge-proxied-0.log"
    if unix_serves(settings.edge_socket, "/healthz"):
        yield Finding("edge for a proxy", "ok", f"serves at {settings.edge_socket}; who may connect there is believed (RFC 9440)")
    else:
        yield Finding("edge for a proxy", "fails", f"does not answer at {settings.edge_socket}", mend, Exit.TEMPORARY)


def _port_free(settings: Settings) -> str:
    if not settings.edge_tcp:
        return "none is needed: GLOTTIS_EDGE_TCP=no"
    with listening(settings.bind, settings.port, "GLOTTIS_PORT"):
        return f"{settings.bind} port {settings.port} is free"
