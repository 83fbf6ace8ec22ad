"""`glottis site`: this site and the other one, compared, repaired, resumed; and how a second site comes in."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from keyvault.sync.roster import Roster
from service import sites
from service.cli.asking import confirmed
from service.cli.loading import Listing
from service.cli.main import say_json
from service.cli.output import json_option, say, say_awaiting
from service.errors import IntroductionRefused, SiteBusy
from service.exits import Ended, Exit
from service.holding import held
from service.isolation import establish
from service.settings import Settings
from service.site import Site
from service.sync.admin import SiteRefused, ask

_AWAY = ("peer_unavailable", "peer_unheard", "site_busy")


@click.group(cls=Listing)
def site() -> None:
    """See both sites, compare them, and mend what is open between them. Glottis must be running here."""


@site.command()
@json_option
def status(as_json: bool) -> None:
    """Show what both sites agree on, what is open, and how far the other one lags.

    Ends with 75 where the other site does not answer (what is shown of it was heard before), and with 3 where a version is
    in quarantine or a site is frozen.
    """
    settings = Settings.load(os.environ)
    away: SiteRefused | SiteBusy | None = None
    try:
        ask(settings, "exchange", timeout_s=10.0)
    except (SiteRefused, SiteBusy) as refused:  # busy: a call to the other site is waiting for its answer
        away = refused
    found = ask(settings, "status")
    found["refused"] = None if away is None else {"code": away.code, "message": str(away)}
    if as_json:
        say_json(found)
    else:
        for line in _described(found):
            click.echo(line)
        if away is not None:
            click.echo(f"  {away} [{away.code}]")
            click.echo(f"  To mend it: {away.fix}")
    if found["frozen"] or found["quarantined"] or (away is not None and away.code not in _AWAY):
        raise Ended(Exit.INTEGRITY)
    if away is not None:
        raise Ended(Exit.TEMPORARY)


@site.command()
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Write every certificate and the roster there.")
@json_option
def verify(save: Path | None, as_json: bool) -> None:
    """Compare both sites now, and check both histories from the roster on, with public keys alone.

    What --save writes, anybody can check again elsewhere: `glottis verify --certificates DIR --roster DIR/roster`.
    """
    found = ask(Settings.load(os.environ), "verify")
    certificates, roster = found.pop("certificates"), found.pop("roster")
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        for epoch, certificate in certificates.items():
            (save / f"{int(epoch):08}.certificate").write_bytes(base64.b64decode(certificate))
        (save / "roster").write_bytes(base64.b64decode(roster))
    if as_json:
        say_json(found)
    else:
        for name, summary in found["sites"].items():
            click.echo(f"site {name}: {summary['completed']} transactions and {summary['void']} void epochs hold")
            click.echo(f"  epoch {summary['epoch']}, head {summary['head'][:16]}…")
        for mark in found["marks"]:
            click.echo(f"  done by officers with one site: {mark}")
        for name in found["quarantined"]:
            click.echo(f"  in quarantine: {name}; see `glottis site repair {name}`")
    if found["quarantined"]:
        raise Ended(Exit.INTEGRITY)


@site.command()
@json_option
def exchange(as_json: bool) -> None:
    """Let both sites hear each other now; certificates that one lacks go over, what differs goes into quarantine."""
    found = ask(Settings.load(os.environ), "exchange")
    if as_json:
        say_json(found)
    else:
        click.echo(f"epoch {found['epoch']}; {found['handed']} certificates handed over, {found['taken']} taken")


@site.command()
@json_option
def resume(as_json: bool) -> None:
    """Finish the transaction that is open, or end it where no certificate can come to be. It also runs by itself."""
    found = ask(Settings.load(os.environ), "resume")
    if as_json:
        say_json(found)
    else:
        click.echo(f"epoch {found['epoch']}; {found['open']}")


@site.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def repair(names: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool) -> None:
    """End the quarantine of master versions such as ring/main/2, by a transaction of both sites.

    A version that both tokens hold is proved again. One that a token lost is kept by the site that holds it, for opening only:
    what lies under it is then re-wrapped there, and nothing new goes under it.
    """
    settings = Settings.load(os.environ)
    if dry_run:
        facts = _before_repair(ask(settings, "status"), names)
        say(facts, [f"{fact['name']}: {fact['would']}" for fact in facts["repairs"]], as_json=as_json)
        return
    if not yes:
        confirmed(f"Repair {', '.join(names)}?")
    done = ask(settings, "repair", names=list(names))
    say(done, [f"repaired at epoch {done['epoch']}"], as_json=as_json)


@site.command("break-glass")
@click.option("--hours", type=click.FloatRange(min=0.1, max=168), default=8.0, show_default=True, help="For how long.")
@click.option("--reason", required=True, help="Why, in a sentence: it stands in the request.")
@json_option
def break_glass(hours: float, reason: str, as_json: bool) -> None:
    """Ask officers to let this site serve although the other was not heard for longer than GLOTTIS_PEER_AGE_HOURS.

    It holds as soon as enough officers approved (`glottis approvals`), and is over with the request's time. Ends with 75: they are
    awaited.
    """
    found = ask(Settings.load(os.environ), "break_glass", hours=hours, reason=reason)
    say_awaiting(found, [f"once approved it holds until {found['ends_at']}"], found["request"], as_json=as_json)


@site.command()
@click.argument("introduction", type=click.File())
@click.option("--reason", required=True, help="Why, in a sentence: it stays in the history for ever.")
@json_option
def replace(introduction: Any, reason: str, as_json: bool) -> None:
    """Ask officers to put the site of INTRODUCTION (a file, or - for standard input) in the place of one that is gone for good.

    Once they approved (`glottis approvals`), `glottis approvals carry-out` does it with this site as survivor. Then let the new
    one in: `site admit` here, `site enter` there. What old versions wrapped goes on opening here; nothing new goes under them
    until a ceremony has made a version that both sites hold. Ends with 75 while officers are awaited.
    """
    given = sites.Introduction.from_json(_read(introduction))
    facts = given.to_json()
    key = {name: facts[name] for name in ("site", "serial", "identity")}
    _asked(ask(Settings.load(os.environ), "approval_act", op="replace", reason=reason, replacement=key), as_json=as_json)


@site.command()
@click.option("--reason", required=True, help="Why, in a sentence: it stays in the history for ever.")
@json_option
def end(reason: str, as_json: bool) -> None:
    """Ask officers to end a transaction that the other site left in doubt, with this site as survivor.

    `site resume` finishes whatever can be finished; this is for a site that is gone with its vote. Ends with 75 while officers
    are awaited.
    """
    _asked(ask(Settings.load(os.environ), "approval_act", op="end", reason=reason), as_json=as_json)


def _asked(found: Mapping[str, Any], *, as_json: bool) -> None:
    say_awaiting(found, [], found["id"], found["needed"], as_json=as_json)


@site.command()
def introduce() -> None:
    """Print what this site tells the first one to be let in: public facts and two certificate requests, as JSON.

    For a second site on a host of its own: set GLOTTIS_SITE=b and GLOTTIS_PEER=external, and let `glottis up` make the folder
    once; it ends and says so.
    """
    settings = Settings.load(os.environ)
    isolation = establish(settings.state_dir, settings.site)
    say_json(sites.introduce(settings, isolation, Site.load(settings.site_file)).to_json())


@site.command()
@click.argument("introduction", type=click.File())
def admit(introduction: Any) -> None:
    """Let a second site in, from its INTRODUCTION (a file, or - for standard input), and print its welcome as JSON.

    The first time this makes the roster, which names both tokens and the officers: from then on nobody comes in but by a
    transaction that officers approve (`site replace`); then this runs beside the serving site, and the welcome holds the whole
    history. Set GLOTTIS_PEER=external here, and let `glottis up` make the folder once.
    """
    settings = Settings.load(os.environ)
    isolation, own = establish(settings.state_dir, settings.site), Site.load(settings.site_file)
    given = sites.Introduction.from_json(_read(introduction))
    if settings.admin_socket.exists() and settings.roster_file.exists():
        # A cluster at work: the site that comes in was named by a roster that officers approved.
        roster = Roster.decode(base64.b64decode(ask(settings, "roster")["roster"]))
        say_json(sites.admit(settings, isolation, given, roster, ask(settings, "history")["certificates"]))
        return
    roster = sites.compose(settings, isolation, own, (given.key,))
    say_json(sites.admit(settings, isolation, given, roster))


@site.command()
@click.argument("welcome", type=click.File())
def enter(welcome: Any) -> None:
    """Take the first site's WELCOME (a file, or - for standard input): certificates and roster. Then start: glottis up."""
    settings = Settings.load(os.environ)
    isolation, own = establish(settings.state_dir, settings.site), Site.load(settings.site_file)
    with held(settings):
        entered = sites.enter(settings, isolation, own, _read(welcome))
    click.echo(f"site {entered.name} belongs to cluster {entered.cluster}; the roster lies in {settings.roster_file}")


def _read(file: Any) -> dict[str, Any]:
    try:
        found = json.load(file)
    except ValueError as error:
        raise IntroductionRefused(f"{file.name} is no JSON") from error
    if not isinstance(found, dict):
        raise IntroductionRefused(f"{file.name} holds no JSON object")
    return found


def _described(found: Mapping[str, Any]) -> list[str]:
    """The status for people: what matters first."""
    mode = " (one site: a development roster)" if found["development"] else ""
    lines = [f"site {found['site']} of {', '.join(found['sites'])}{mode}: epoch {found['epoch']}, head {found['head'][:16]}…"]
    if found["frozen"]:
        lines.append("  FROZEN: a site signed two histories; officers must replace it")
    if found["open"]:
        lines.append(f"  open: {found['open']}")
    for version in found["versions"]:
        flags = [flag for flag, is_so in (("QUARANTINED", version["quarantined"]), ("not here", not version["held_here"])) if is_so]
        where = f", held by {', '.join(version['holders'])}" if version["holders"] else ""
        lines.append(f"  {version['name']}: {version['state']}{where}; {version['keys']} keys  {' '.join(flags)}".rstrip())
    if not found["development"]:
        lines.append(f"  {found['awaiting_sync']} voices wait for the other site, {found['unsynced']} keys are to be sent")
        peer = found["peer"]
        heard = "was never heard" if peer is None else f"epoch {peer['epoch']}, heard {peer['age_s']} s ago"
        lines.append(f"  the other site: {heard}")
        lines.append(f"  audit log: {found['log']['size']} entries, co-signed up to {found['log']['cosigned']}")
        lines += [f"  FORK of the other site's log, seen {fork['seen_at']}" for fork in found["log"]["forks"]]
    return lines + [f"  done by officers with one site: {mark}" for mark in found["marks"]]


def _before_repair(found: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    known = {version["name"]: version for version in found["versions"]}
    repairs = []
    for name in names:
        if name not in known:
            would = "nothing: this site knows no such version"
        elif not known[name]["quarantined"]:
            would = "be proved again, though it is in no quarantine here"
        else:
            would = "be proved again" if known[name]["held_here"] else "be kept for opening by the site that still holds it"
        repairs.append({"name": name, "would": would})
    return {"changed": False, "repairs": repairs}
