"""Putting a site back from a backup, and officers' word on using what is older than what this site signed for.

Restoring happens while nothing runs. The database is replaced whole; token files only where they are asked for, and what was
there is kept beside. Afterwards the anchor in the token and the log's last checkpoint say whether the store is older than what
was signed: then nothing serves until M of N officers adopt exactly this pair (`restore.adopt`). The adoption is an entry of the
log, and the log goes on from where the restored database ends: whoever holds a newer checkpoint sees the fork, and the entry
that explains it.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

from keyvault.approval_kinds import Kind, Request, described, statement_fact
from keyvault.approvals import Operation, signed_by
from keyvault.hsm import KeyName
from keyvault.key_uses import Place
from keyvault.sync.durable import DurableSite, SiteParts
from keyvault.sync.errors import StatementMalformed
from keyvault.sync.node import SiteNode
from keyvault.sync.roster import machine
from policies.audit import store as log_store
from policies.audit.checkpoint import LastCheckpoint
from policies.audit.store import AuditStore
from service import bringup, schema, steps
from service.backups import DUMP, Backup, database_name, postgres_tool, run_tool, unpacked
from service.embedded import SUPERUSER
from service.errors import BackupRefused, NothingToAdopt, RequestUnreadable
from service.isolation import Isolation, establish
from service.key_events import KeyEventRecorder
from service.log.process import engine
from service.masters import connect, serving_token
from service.settings import Settings
from service.site import Site

SUPERSEDED = "superseded"
TOKEN_FOLDERS = ("serving", "log", "officer")
_REQUEST_DAYS = 14


@dataclass(frozen=True)
class Restored:
    """What was put back, and where the things that were there before lie now."""

    backup: Backup
    database: bool
    kept: tuple[str, ...]


def apply(settings: Settings, backup: Backup, *, database: bool, tokens: bool) -> Restored:
    """Put this site's database, its token files, or both, back. Nothing may run here. Raises BackupRefused, BackupFailed.

    A part that was cut off is begun again by restoring again: the database appears whole or is empty, and then nothing starts.
    """
    if settings.roster_file.exists() and (settings.site, _cluster(settings)) != (backup.site, backup.cluster):
        raise BackupRefused(f"{backup.folder} is of site {backup.site} of cluster {backup.cluster}, not of this one")
    with bringup.held(settings):
        isolation = establish(settings.state_dir, settings.site)
        kept = _tokens(settings, isolation, backup) if tokens else ()
        if database:
            with _database(settings) as postgres:
                _replace_database(settings, postgres, backup)
    return Restored(backup, database, kept)


def request(settings: Settings, reason: str) -> bytes:
    """The request, in this site's name, that officers adopt what is here; `glottis approvals sign` takes it, as a file.

    Raises NothingToAdopt where store, token and log belong together.
    """
    isolation = establish(settings.state_dir, settings.site)
    with bringup.held(settings), _database(settings):
        answer = steps.call(settings, isolation.vault, "adoption_request", groups=_groups(settings), reason=reason)
        behind = steps.call(settings, isolation.log, "log_is_behind", groups=_groups(settings))["behind"]
    if not answer["older"] and not behind:
        raise NothingToAdopt
    return base64.b64decode(answer["request"])


def adopt(settings: Settings, signed: Sequence[bytes]) -> dict[str, Any]:
    """Carry out an approved adoption: the sync state, then the log. `signed` are copies of one request, each as somebody signed it.

    Raises what the approvals lack, by its own code, and RequestUnreadable.
    """
    text_ = base64.b64encode(_gathered(signed).encode()).decode()
    isolation = establish(settings.state_dir, settings.site)
    with bringup.held(settings), _database(settings):
        adopted = steps.call(settings, isolation.vault, "adopt_restored", groups=_groups(settings), request=text_)
        log = steps.call(settings, isolation.log, "adopt_log", groups=_groups(settings))
    return adopted | log


def _gathered(signed: Sequence[bytes]) -> Request:
    """One request with everybody's signatures."""
    try:
        requests = [Request.decode(data) for data in signed]
    except StatementMalformed as error:
        raise RequestUnreadable(f"this is no request for approval: {error}") from error
    if len({request.operation for request in requests}) != 1:
        raise RequestUnreadable("the files are of different requests", fix="Let every officer sign the same file.")
    return replace(requests[0], approvals=tuple({one for request in requests for one in request.approvals}))


# --- what the steps do, each under the user that owns what it touches


def adoption_request(settings: Settings, *, reason: str) -> dict[str, Any]:
    """Step: what this store and this token are, as a request signed by the site."""
    with _parts(settings) as parts:
        durable = DurableSite(parts)
        state, anchor = durable.adoption_state(), durable.anchor()
        name, now = machine(parts.name), datetime.now(UTC)
        operation = Operation(
            state.ledger.roster.cluster, Kind.ADOPT.value, state.digest, name, os.urandom(16), now + timedelta(days=_REQUEST_DAYS)
        )
        asked = signed_by(operation, name, "request", lambda data: parts.hsm.sign(KeyName.SITE_IDENTITY, data))
        facts = {"state": statement_fact(state), "reason": reason}
        older = anchor not in (state.anchor, state.before)
        return {"request": base64.b64encode(Request(operation, described(facts), (asked,)).encode()).decode(), "older": older}


def adopt_restored(settings: Settings, *, request: str) -> dict[str, Any]:
    """Step: adopt the store and token as approved, with the entry of the log that says so."""
    asked = Request.decode(base64.b64decode(request, validate=True))
    asked.meaning()
    with _parts(settings) as parts:
        node = SiteNode.adopt(parts, asked.operation, asked.approvals)
        recovering = node.current.recovering
        return {"epoch": node.ledger.epoch, "recovers_to": recovering.epoch if recovering else None}


def adopt_log(settings: Settings) -> dict[str, Any]:
    """Step: let the log go on from the newest checkpoint of the database; the newer one is kept beside it for auditors."""
    database, last = engine(settings.role_url("log")), LastCheckpoint(settings.checkpoint_file)
    with database.connect() as connection:
        row = log_store.last_checkpoint(connection)
    note = last.read()
    if note is None or row is None or note == row.note:
        return {"log": None}
    kept = settings.checkpoint_file.with_name(f"checkpoint.{_size(note)}.{SUPERSEDED}")
    LastCheckpoint(kept).write(note)
    last.write(str(row.note))
    return {"log": {"from": row.size, "superseded": _size(note), "kept": str(kept)}}


def log_is_behind(settings: Settings) -> dict[str, Any]:
    """Step: compare the log's file with the database."""
    database, last = engine(settings.role_url("log")), LastCheckpoint(settings.checkpoint_file)
    with database.connect() as connection:
        row = log_store.last_checkpoint(connection)
    note = last.read()
    return {"behind": note is not None and (row is None or _size(note) > row.size)}


@contextmanager
def _parts(settings: Settings) -> Iterator[SiteParts]:
    database = connect(settings.role_url("vault"))
    try:
        with serving_token(settings, database, Place.RESTORE) as hsm:
            serial = Site.load(settings.site_file).tokens["serving"].serial
            recorder = KeyEventRecorder(AuditStore(database, hsm))
            yield SiteParts(settings.site, serial, hsm, database, recorder, lambda: datetime.now(UTC))
    finally:
        database.dispose()


# --- the files and the database


@contextmanager
def _database(settings: Settings) -> Iterator[Any]:
    """The embedded server, serving for this block; None where the database is one of your own."""
    postgres = bringup.embedded_postgres(settings, establish(settings.state_dir, settings.site))
    with ExitStack() as stack:
        if postgres is not None:
            stack.enter_context(postgres.serving(bringup.superuser_password(settings)))
        yield postgres


def _replace_database(settings: Settings, postgres: Any, backup: Backup) -> None:
    name = database_name(settings)
    if postgres is not None:
        url = postgres.url(SUPERUSER, bringup.superuser_password(settings), "postgres")
        with schema.opened(url) as server, server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'))
            connection.execute(text(f'CREATE DATABASE "{name}" OWNER {schema.OWNER} TEMPLATE template0'))
    clean = [] if postgres is not None else ["--clean", "--if-exists"]
    with postgres_tool(settings, postgres, "pg_restore") as (program, environ):
        run_tool([*program, "--exit-on-error", *clean, f"--dbname={name}", str(backup.folder / DUMP)], environ)


def _tokens(settings: Settings, isolation: Isolation, backup: Backup) -> tuple[str, ...]:
    """Put token folders and the log's checkpoint back; those that are there move aside, and their PIN files stay in place."""
    owners = {"serving": isolation.vault, "log": isolation.log, "officer": isolation.officer}
    stamp, kept = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), []
    with unpacked(backup, settings.state_dir) as found:
        for name in TOKEN_FOLDERS:
            fresh, place = found / "tokens" / name, settings.token_dir(name)
            if not fresh.exists():
                continue
            if place.exists():
                aside = place.with_name(f"{name}.{stamp}")
                if (place / "pin").exists():
                    shutil.copyfile(place / "pin", fresh / "pin")
                place.rename(aside)
                kept.append(str(aside))
            fresh.rename(place)
            owners[name].own_tree(place)
    return tuple(kept)


def _cluster(settings: Settings) -> str:
    return str(Site.load(settings.site_file).cluster)


def _groups(settings: Settings) -> tuple[int, ...]:
    return establish(settings.state_dir, settings.site).database_groups(embedded=settings.embedded)


def _size(note: str) -> int:
    return int(note.split("\n")[1])
