"""What `glottis doctor` says of the two sites: what they agree on, how old the other's word is, certificates, clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from sqlalchemy import text

from keyvault.sync.errors import LogForked
from service.certificates import RENEW_DAYS
from service.errors import NotRunning, SiteBusy
from service.exits import Exit
from service.findings import Finding
from service.hsm_figures import hsm_finding
from service.schema import opened
from service.settings import Settings
from service.sync.admin import SiteRefused, ask

_CLOCK_SECONDS = 2.0
_BACKUP_AGE = timedelta(days=7)


def sites(settings: Settings) -> Iterator[Finding]:
    """What this site knows, from its own process; the other site is asked once, and may be away."""
    try:
        found = ask(settings, "status", timeout_s=10.0)
    except (NotRunning, SiteBusy) as error:
        yield Finding("sites", "fails", str(error), f"Read {settings.log_dir}/site.log", Exit.TEMPORARY)
        return
    except SiteRefused as refused:
        yield Finding("sites", "fails", str(refused), refused.fix, Exit.INTEGRITY)
        return
    yield hsm_finding("site", found["hsm"], settings.log_dir)
    if found["frozen"]:
        mend = "Find which site was copied or restored, and replace it by M of N officers."
        yield Finding("sites", "fails", "a site signed two histories; nothing changes any more", mend, Exit.INTEGRITY)
    elif found["development"]:
        said = "one site: a development roster; a lost token is a lost ring"
        yield Finding("sites", "note", said, "Found the cluster with two sites for production: GLOTTIS_SITES=2.")
    else:
        yield Finding("sites", "ok", f"{' and '.join(found['sites'])} agree on epoch {found['epoch']}")
    if found["quarantined"]:
        names = " ".join(found["quarantined"])
        mend = f"See which site lacks them, then: glottis site repair {names}"
        yield Finding("quarantine", "fails", f"the sites disagree about {names}", mend, Exit.INTEGRITY)
    if found["open"]:
        yield Finding("transaction", "note", found["open"], "It goes on by itself once both sites answer: glottis site resume.")
    if not found["development"]:
        yield from _peer(settings, found)
        yield _log(found["log"])


def _peer(settings: Settings, found: dict[str, object]) -> Iterator[Finding]:
    peer, limit_s = found["peer"], settings.peer_age_hours * 3600
    mend = "Start the other site and mend the link; voices speak until the set age, new ones wait."
    if not isinstance(peer, dict):
        yield Finding("other site", "note", "was never heard", mend)
        return
    age_s = float(peer["age_s"])
    said = f"heard {age_s:.0f} s ago at epoch {peer['epoch']}; {found['awaiting_sync']} voices wait for it"
    if age_s > limit_s:
        yield Finding("other site", "fails", f"{said}: too long ago to serve", mend, Exit.TEMPORARY)
    elif age_s > 60:
        yield Finding("other site", "note", said, mend)
    else:
        yield Finding("other site", "ok", said)


def _log(log: Mapping[str, Any]) -> Finding:
    """How far the other site co-signed this site's log, and whether the other one's log showed two histories here."""
    said = f"the other site co-signed {log['cosigned']} of {log['size']} entries"
    if log["forks"]:
        last = log["forks"][-1]
        told = f"the other site's log showed two histories, last at {last['size']} entries on {last['seen_at'][:10]}"
        return Finding("co-signing", "fails", told, LogForked.fix, Exit.INTEGRITY)
    if log["cosigned_at"] is None:
        return Finding(
            "co-signing", "note", said, "It begins once both sites answer; the site process's log says what it was refused."
        )
    return Finding("co-signing", "ok", said)


def policies(settings: Settings) -> Iterator[Finding]:
    """Which set of policies decides at this site, who may change it, and whose clients need officers."""
    try:
        found = ask(settings, "policy_active", timeout_s=10.0)
    except SiteRefused as refused:
        yield Finding("policies", "fails", str(refused), refused.fix, Exit.INTEGRITY)
        return
    what = "the set that ships" if found["shipped"] else f"set {found['set'][:16]} of officers {', '.join(found['approved_by'])}"
    roles = ", ".join(found["approved_roles"]) or "no role"
    said = f"version {found['version']}, {what}; {found['needed']} activate another; clients need officers for {roles}"
    if found["needed"] < 2:
        yield Finding("policies", "note", said, "One officer alone is a development roster: use two sites in production.")
    elif not found["current_roster"]:
        yield Finding("policies", "note", said, "Its officers are not those of the roster in force: let these activate it again.")
    else:
        yield Finding("policies", "ok", said)


def certificates(settings: Settings) -> Iterator[Finding]:
    """When the certificates of this site's server, link and authority end."""
    mend = "Start again: glottis up renews what ends soon. A second site on another host enters anew: glottis site admit."
    places = {"server": settings.tls_dir, "link": settings.link_dir}
    ends = {name: _ends(folder / "server.pem") for name, folder in places.items()} | {
        "authority": _ends(settings.tls_dir / "ca.pem")
    }
    known = {name: end for name, end in ends.items() if end is not None}
    if not known:
        return
    name, first = min(known.items(), key=lambda item: item[1])
    said = f"the first to end is the {name}'s, on {first:%Y-%m-%d}"
    left = first - datetime.now(UTC)
    if left <= timedelta(0):
        yield Finding("certificates", "fails", said, mend, Exit.LOCAL)
    elif left < timedelta(days=RENEW_DAYS):
        yield Finding("certificates", "note", said, mend)
    else:
        yield Finding("certificates", "ok", said)


def backups(settings: Settings) -> Finding:
    """How old the newest backup in the state folder is; where backups lie elsewhere, only their keeper knows."""
    mend = "Make one, and keep it on another host: glottis backup."
    made = sorted((settings.state_dir / "backups").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not made:
        return Finding("backups", "note", f"none in {settings.state_dir / 'backups'}", mend)
    age = datetime.now(UTC) - datetime.fromtimestamp(made[-1].stat().st_mtime, UTC)
    said = f"the newest here is {age.days} days old"
    return Finding("backups", "note" if age > _BACKUP_AGE else "ok", said, mend if age > _BACKUP_AGE else "")


def clock(settings: Settings) -> Finding:
    """This host's clock beside the database's: tokens live five seconds, and both sites date what they hear."""
    with opened(settings.owner_url()) as engine, engine.connect() as connection:
        before = datetime.now(UTC)
        theirs = connection.scalar(text("SELECT clock_timestamp()"))
        after = datetime.now(UTC)
    assert isinstance(theirs, datetime)
    apart = max((before - theirs).total_seconds(), (theirs - after).total_seconds(), 0.0)
    if apart > _CLOCK_SECONDS:
        mend = "Let both hosts keep time by NTP, and start again."
        return Finding("clock", "fails", f"{apart:.1f} s from the database's", mend, Exit.LOCAL)
    return Finding("clock", "ok", "agrees with the database's")


def _ends(path: Path) -> datetime | None:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc if path.exists() else None
