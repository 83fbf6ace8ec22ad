"""Putting a site back from a backup, and officers' word on using what is older than what this site signed for.

Restoring happens while nothing runs. The database is replaced whole; token files only where they are asked for, and what was
there is kept beside. Afterwards the anchor in the token and the log's last checkpoint say whether the store is older than what
was signed: then nothing serves until M of N officers adopt exactly this pair (`restore.adopt`), and nothing is logged until they
let the log go on from where the restored database ends (`log.reanchor`). Both are entries of the log.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import text

from keyvault.approval_kinds import Facts, Kind, Request, statement_fact
from keyvault.key_uses import Place
from keyvault.sync.durable import DurableSite, SiteParts
from keyvault.sync.errors import ApprovalInvalid, StatementMalformed
from keyvault.sync.node import SiteNode
from policies.audit.checkpoint import HandOvers
from policies.audit.store import AuditStore
from service import bringup, log_anchor, schema, step
from service.backups import DUMP, Backup, database_name, postgres_tool, run_tool, unpacked
from service.embedded import SUPERUSER
from service.errors import AdoptionIncomplete, BackupRefused, NothingToAdopt, RequestUnreadable
from service.holding import held
from service.inboxes import asked_by_site, joined, roster_in_force
from service.isolation import Isolation, establish
from service.key_events import KeyEventRecorder
from service.masters import connect, serving_token
from service.settings import Settings
from service.site import ROTATION, Site

TOKEN_FOLDERS = ("serving", "log", "officer", ROTATION)


@dataclass(frozen=True)
class Restored:
    """What was put back, and where the things that were there before lie now."""

    backup: Backup
    database: bool
    kept: tuple[str, ...]
    left: tuple[str, ...] = ()
    """Token folders that stay as they are, though they were asked for: nothing could sign with what the backup has."""


def apply(settings: Settings, backup: Backup, *, database: bool, tokens: bool) -> Restored:
    """Put this site's database, its token files, or both, back. Nothing may run here.

    Raises BackupRefused for another site's or cluster's, HalfMade where this folder is of no site yet, BackupFailed.

    A part that was cut off is begun again by restoring again: the database appears whole or is empty, and then nothing starts.
    """
    if (settings.site, _cluster(settings)) != (backup.site, backup.cluster):
        raise BackupRefused(f"{backup.folder} is of site {backup.site} of cluster {backup.cluster}, not of this one")
    with held(settings):
        isolation = establish(settings.state_dir, settings.site)
        kept, left = _tokens(settings, isolation, backup) if tokens else ((), ())
        if database:
            with _database(settings) as postgres:
                _replace_database(settings, postgres, backup)
    return Restored(backup, database, kept, left)


def requests(settings: Settings, reason: str) -> dict[str, bytes]:
    """The requests, in this site's name, that officers must approve before this site starts: `database` where store or token is
    older than the other, `log` where the audit log's signed end is not in the database. `glottis approvals sign` takes each.

    Raises NothingToAdopt where store, token and log belong together.
    """
    isolation = establish(settings.state_dir, settings.site)
    found: dict[str, bytes] = {}
    with held(settings), _database(settings):
        answer = step.call(settings, isolation.vault, "adoption_request", groups=_groups(settings), reason=reason)
        if answer["older"]:
            found["database"] = base64.b64decode(answer["request"])
        ends = step.call(settings, isolation.log, "log_ends", groups=_groups(settings))
        if ends["parted"]:
            asked = step.call(settings, isolation.vault, "reanchor_request", groups=_groups(settings), ends=ends, reason=reason)
            found["log"] = base64.b64decode(asked["request"])
    if not found:
        raise NothingToAdopt
    return found


def adopt(settings: Settings, signed: Sequence[bytes]) -> dict[str, Any]:
    """Carry out approved requests: the sync state, then the log. `signed` are copies of them, each as somebody signed it.

    Raises what the approvals lack, by its own code, RequestUnreadable, and AdoptionIncomplete where the log needs a request too.
    """
    gathered = _gathered(signed)
    isolation, groups = establish(settings.state_dir, settings.site), _groups(settings)
    done: dict[str, Any] = {"epoch": None, "recovers_to": None, "log": None}
    with held(settings), _database(settings):
        if Kind.REANCHOR not in gathered and step.call(settings, isolation.log, "log_ends", groups=groups)["parted"]:
            raise AdoptionIncomplete  # before anything is adopted: what is half adopted does not start
        if (asked := gathered.get(Kind.ADOPT)) is not None:
            done |= step.call(settings, isolation.vault, "adopt_restored", groups=groups, request=_text(asked))
        if (asked := gathered.get(Kind.REANCHOR)) is not None:
            ends = step.call(settings, isolation.log, "log_ends", groups=groups)
            named = {name: ends[name] for name in ("kept", "database")}
            step.call(settings, isolation.vault, "reanchor_approved", groups=groups, request=_text(asked), ends=named)
            done["log"] = step.call(
                settings, isolation.log, "move_log", groups=groups, **named, operation=asked.operation.digest.hex()
            )
    return done


def _gathered(signed: Sequence[bytes]) -> dict[str, Request]:
    """By kind, one request with everybody's signatures. Raises RequestUnreadable."""
    try:
        given = [Request.decode(data) for data in signed]
    except StatementMalformed as error:
        raise RequestUnreadable(f"this is no request for approval: {error}") from error
    kinds = sorted({one.operation.kind for one in given})
    try:
        found = {kind: joined([one for one in given if one.operation.kind == kind]) for kind in kinds}
    except ApprovalInvalid as error:
        raise RequestUnreadable("the files are of different requests", fix="Let every officer sign the same file.") from error
    if unknown := found.keys() - {Kind.ADOPT, Kind.REANCHOR}:
        raise RequestUnreadable(f"a {min(unknown)} request is not carried out here")
    return found


def _text(request: Request) -> str:
    return base64.b64encode(request.encode()).decode()


# --- what the steps do, each under the user that owns what it touches


def adoption_request(settings: Settings, *, reason: str) -> dict[str, Any]:
    """Step: what this store and this token are, as a request signed by the site."""
    with _parts(settings) as parts:
        durable = DurableSite(parts)
        state, anchor = durable.adoption_state(), durable.anchor()
        facts: Facts = {"state": statement_fact(state), "reason": reason}
        asked = asked_by_site(parts, state.ledger.roster.cluster, Kind.ADOPT, state.digest, facts)
        return {"request": _text(asked), "older": anchor not in (state.anchor, state.before)}


def adopt_restored(settings: Settings, *, request: str) -> dict[str, Any]:
    """Step: adopt the store and token as approved, with the entry of the log that says so."""
    asked = Request.decode(base64.b64decode(request, validate=True))
    asked.meaning()
    with _parts(settings) as parts:
        node = SiteNode.adopt(parts, asked.operation, asked.approvals)
        recovering = node.current.recovering
        return {"epoch": node.ledger.epoch, "recovers_to": recovering.epoch if recovering else None}


def reanchor_request(settings: Settings, *, ends: Mapping[str, str], reason: str) -> dict[str, Any]:
    """Step: the request that this site's log goes on from where the database ends."""
    with _parts(settings) as parts:
        return {"request": _text(log_anchor.request(parts, roster_in_force(settings, parts.database, parts.hsm), ends, reason))}


def reanchor_approved(settings: Settings, *, request: str, ends: Mapping[str, str]) -> dict[str, Any]:
    """Step: check the officers' word on the log's end, and record it."""
    asked = Request.decode(base64.b64decode(request, validate=True))
    with _parts(settings) as parts:
        log_anchor.approve(parts, roster_in_force(settings, parts.database, parts.hsm), asked, ends)
    return {}


def log_ends(settings: Settings) -> dict[str, Any]:
    """Step: the log's end in its file and in the database."""
    return log_anchor.ends(settings, Site.load(settings.site_file).audit_key)


@contextmanager
def _parts(settings: Settings) -> Iterator[SiteParts]:
    database = connect(settings.role_url("vault"), site_wide=True)
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


def _tokens(settings: Settings, isolation: Isolation, backup: Backup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Put token folders back; those that are there move aside, and their PIN files are taken over. Which moved, which were left.

    The log's checkpoint and hand-overs stay: a log that is shorter than what it signed must be noticed. Its token stays too
    where the log went over to a newer key than the backup's token has, for with that one it would never start again.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    kept: list[str] = []
    left: list[str] = []
    with unpacked(backup, settings.state_dir) as found:
        for name in TOKEN_FOLDERS:
            fresh, place = found / "tokens" / name, settings.token_dir(name)
            if not fresh.exists():
                continue
            if name == "log" and place.exists() and _handed_over_since(settings, found):
                left.append(str(place))
                continue
            if (pin := _pin_beside(place)) is not None:
                shutil.copyfile(pin, fresh / "pin")
            if place.exists():
                aside = place.with_name(f"{name}.{stamp}")
                place.rename(aside)
                kept.append(str(aside))
            fresh.rename(place)
            isolation.owner(name).own_tree(place)
    return tuple(kept), tuple(left)


def _pin_beside(place: Path) -> Path | None:
    """A token's PIN file: in its folder or, where a restore was cut off after that moved aside, in the newest one beside it."""
    aside = sorted(place.parent.glob(f"{place.name}.*"), reverse=True)
    return next((folder / "pin" for folder in (place, *aside) if (folder / "pin").exists()), None)


def _handed_over_since(settings: Settings, found: Path) -> bool:
    """Whether this log's signing went over to a newer key after the backup was made."""
    now, then = HandOvers(settings.hand_overs_file).read(), HandOvers(found / "audit" / "hand-overs").read()
    return len(now) > len(then)


def _cluster(settings: Settings) -> str:
    return str(Site.load(settings.site_file).cluster)


def _groups(settings: Settings) -> tuple[int, ...]:
    return establish(settings.state_dir, settings.site).database_groups(embedded=settings.embedded)
