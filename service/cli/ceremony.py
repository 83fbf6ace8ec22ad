"""`glottis keys ceremony`: one new master version at two sites, by two officers who pass files to each other."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from keyvault.ceremony_messages import Step, Transcript
from keyvault.errors import CeremonyMessageInvalid, CeremonyRefused
from keyvault.hsm import RingMaster
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from service.ceremonies import OAEP, Desk, Offer, TokenPins, open_ones
from service.cli.asking import confirmed
from service.cli.ceremony_output import file_name, say_story, story_facts, story_lines, tell
from service.cli.loading import Listing
from service.cli.main import say_json
from service.cli.officer_keys import key_option, officer_key
from service.cli.output import json_option
from service.cli.pins import pin, rotation_option, rotation_pin
from service.errors import NotRunning
from service.isolation import establish
from service.lone_ceremonies import rehearse
from service.officers import read_roster
from service.settings import Settings
from service.site import announce as announced
from service.sites import development_officers
from service.sync.admin import ask

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_LOOK_S = 0.5


_ROSTER = click.option("--roster", type=_FILE, help="The cluster's roster.  [default: `roster` in the state folder]")
_OUT = click.option("--out", type=click.Path(path_type=Path), help="Where the message goes.  [default: a name by version and step]")
_COMPARED = click.option("--yes", is_flag=True, help="The fingerprints were compared: do not ask.")
_DESK = (
    key_option,
    click.option("--pin-file", help="The token user's PIN: a file, or - for a line of standard input.  [default: the site's]"),
    rotation_option,
)
_SO_PIN = click.option(
    "--so-pin-file", help="The security officer's PIN: a file, or - for a line of standard input.  [default: asked, not shown]"
)


def _at_desk(*more: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Options that make a desk, which the command gets as its first argument, and `more`."""

    def decorated(command: Callable[..., None]) -> Any:
        @wraps(command)
        def run(
            key: Path | None,
            roster: Path | None,
            pin_file: str | None,
            rotation_pin_file: str | None,
            so_pin_file: str | None = None,
            **rest: Any,
        ) -> None:
            command(_open_desk(key, roster, pin_file, so_pin_file, rotation_pin_file), **rest)

        for option in reversed((*_DESK, _ROSTER, *more, json_option)):
            run = option(run)
        return run

    return decorated


@click.group(cls=Listing, invoke_without_command=True)
@click.option("--verify", "verified", type=_FILE, help="The same as the command `verify`, with the roster of the state folder.")
@click.pass_context
def ceremony(context: click.Context, verified: Path | None) -> None:
    """Make a master at two sites: two officers, two hosts, files between them.

    \b
    maker's host               receiver's host
    begin --with OFFICER  -->
                          <--  offer PLAN      (stays open until the answer is there)
    send OFFER            -->  (takes the answer by itself)
                          <--  the receipt
    close RECEIPT         -->  keep TRANSCRIPT

    Every message is signed by its officer's own key. Both consoles show its fingerprint: compare it by telephone before you
    say yes. What is cut off can be begun again; a version number is never used twice.
    """
    if verified is not None:
        context.invoke(verify, file=verified, roster=None, as_json=False)
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@ceremony.command()
@_at_desk(_OUT)
@click.option("--ring", default="main", show_default=True, help="The ring that gets a new version.")
@click.option("--with", "receiver", required=True, help="The officer at the other site.")
@click.option("--version", type=click.IntRange(min=1), help="The new version's number.  [default: the lowest never used here]")
@click.option("--oaep", type=click.Choice(["SHA_1", "SHA256"]), default=OAEP, show_default=True, help="The transport's hash.")
def begin(desk: Desk, ring: str, receiver: str, version: int | None, oaep: str, out: Path | None, as_json: bool) -> None:
    """Plan a new version, to be made at this site. Give the file to the other officer."""
    tell(desk.begin(ring, receiver, version, oaep), out, as_json=as_json)


@ceremony.command()
@click.argument("plan", type=_FILE)
@_at_desk(_SO_PIN, _OUT, _COMPARED)
@click.option("--reply", type=click.Path(path_type=Path), help="Where the maker's answer will lie.  [default: its own name, here]")
def offer(desk: Desk, plan: Path, out: Path | None, reply: Path | None, yes: bool, as_json: bool) -> None:
    """Offer a one-time key for PLAN and wait for the maker's answer; then put the master into this site's token.

    The one-time key lives in this command alone: when it ends, nothing can open the answer any more. If that happens before
    the maker has sent it, offer again; afterwards both sites `abandon` the version and begin a new one.
    """
    story = _read(plan)
    _compare(desk, story, yes=yes)
    desk.announce(story)
    _expect(story.plan.master)
    with desk.offer(story) as offered:
        tell(offered.message, out, as_json=as_json)
        wanted = reply or Path(file_name(offered.message, Step.MASTER))
        click.echo(f"waiting for the maker's answer in {wanted} (Ctrl-C gives up)", err=True)
        answer = _awaited(wanted, offered)
        _compare(desk, answer, yes=yes)
        received = offered.take(answer)
    tell(received, None if out is None else out.with_name(f"{out.name}-receipt"), as_json=as_json)


@ceremony.command()
@click.argument("offered", metavar="OFFER", type=_FILE)
@_at_desk(_SO_PIN, _OUT, _COMPARED)
def send(desk: Desk, offered: Path, out: Path | None, yes: bool, as_json: bool) -> None:
    """Make the master in this site's token and wrap it for OFFER's one-time key, once. Give the file to the other officer."""
    story = _read(offered)
    _compare(desk, story, yes=yes)
    desk.announce(story)
    _expect(story.plan.master)
    tell(desk.send(story), out, as_json=as_json)


@ceremony.command()
@click.argument("receipt", type=_FILE)
@_at_desk(_OUT, _COMPARED)
def close(desk: Desk, receipt: Path, out: Path | None, yes: bool, as_json: bool) -> None:
    """Sign that both tokens hold the master. The file is the transcript: give it to the other officer, and to auditors."""
    story = _read(receipt)
    _compare(desk, story, yes=yes)
    tell(desk.close(story), out, as_json=as_json)


@ceremony.command()
@click.argument("transcript", type=_FILE)
@_at_desk()
def keep(desk: Desk, transcript: Path, as_json: bool) -> None:
    """Check the whole TRANSCRIPT and keep it at the receiver's site too."""
    story = _read(transcript)
    desk.keep(story)
    say_story(story, f"{story.plan.master.label} is whole; the transcript is kept", as_json=as_json)


@ceremony.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show the ceremonies that were begun at this site and are not whole."""
    found = open_ones(Settings.load(os.environ))
    if as_json:
        say_json({"open": [story_facts(story) for story in found]})
        return
    for story in found:
        click.echo(f"{story.plan.master.label}: the {story.newest.step} was the last step here")
    if not found:
        click.echo("no ceremony is open here")


@ceremony.command()
@click.argument("ring")
@click.argument("version", type=click.IntRange(min=1))
@_at_desk()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def abandon(desk: Desk, ring: str, version: int, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove what a ceremony that came to nothing left in this site's token. The number stays used.

    The site must run: it says that the two sites never agreed on this version.
    """
    settings, master = Settings.load(os.environ), RingMaster(ring, version)
    named = [story for story in open_ones(settings) if story.plan.master == master]
    if not named:
        raise CeremonyRefused(f"no open ceremony of {master.label} was begun here")
    if dry_run:
        say_story(named[0], f"what this token holds of {master.label} would be destroyed", as_json=as_json)
        return
    if not yes:
        confirmed(f"Destroy what this token holds of {master.label}?")
    gone = desk.abandon(master, lambda wanted: _agreed(settings, wanted))
    say_story(named[0], f"{gone} objects of {master.label} are destroyed; the number stays used", as_json=as_json)


@ceremony.command()
@click.argument("plan", type=_FILE)
@_ROSTER
@json_option
def announce(plan: Path, roster: Path | None, as_json: bool) -> None:
    """At a serving host that is not the officer's console: let its processes meet PLAN's master in their token.

    Run it before the token gets the master; a process that starts with a master it was not told of refuses the token.
    """
    settings, story = Settings.load(os.environ), _read(plan)
    story.check(_roster(roster), verify_p256)
    announced(settings, establish(settings.state_dir, settings.site), story.plan.master)
    _expect(story.plan.master)
    say_story(story, f"this site may hold {story.plan.master.label}", as_json=as_json)


@ceremony.command("rehearse")
@click.option("--ring", default="main", show_default=True, help="The ring that gets a new version.")
@json_option
def rehearsed(ring: str, as_json: bool) -> None:
    """Play both officers on this machine, with the development installation's own keys and PINs. No production does this.

    The version serves once `glottis keys rotate` has let both sites prove it to each other.
    """
    settings = Settings.load(os.environ)
    roster = Roster.decode(base64.b64decode(ask(settings, "roster")["roster"]))
    master = rehearse(settings, roster, development_officers(settings), ring)
    for site in (settings, settings.of_site_b()) if settings.starts_peer else (settings,):
        ask(site, "expect", master=master.label)
    if as_json:
        say_json({"ring": master.ring, "version": master.version, "name": master.label})
    else:
        click.echo(f"{master.label} is made; let it serve: glottis keys rotate {master.ring}")


@ceremony.command()
@click.argument("file", type=_FILE)
@_ROSTER
@json_option
def verify(file: Path, roster: Path | None, as_json: bool) -> None:
    """Check a transcript with public keys alone: every signature, the chain of messages, both tokens, both officers."""
    story, known = _read(file), _roster(roster)
    story.check(known, verify_p256)
    if not story.complete:
        raise CeremonyMessageInvalid(f"every message holds, but the ceremony is not whole: it ends with the {story.newest.step}")
    say_story(story, f"{story.plan.master.label}: the whole ceremony holds", as_json=as_json)


def _awaited(place: Path, offered: Offer) -> Transcript:
    """The maker's answer, once it lies there whole; what lies there instead is named, and another is waited for."""
    seen = (0, 0)
    while True:
        if place.exists() and (now := (place.stat().st_mtime_ns, place.stat().st_size)) != seen:
            seen = now
            try:
                answer = _read(place)
                offered.check(answer)
            except CeremonyMessageInvalid as error:
                click.echo(f"{place} is not the answer ({error}); still waiting", err=True)
            else:
                return answer
        time.sleep(_LOOK_S)


def _open_desk(key: Path | None, roster: Path | None, pin_file: str | None, so_pin_file: str | None, rotation: str | None) -> Desk:
    settings = Settings.load(os.environ)
    # Piped PINs come first: the officer's, the user's, the rotation token's; what is typed is asked for when a step needs it.
    officer = pin(so_pin_file, "the security officer's PIN", None, "--so-pin-file")
    user = pin(pin_file, "the token user's PIN", settings.serving_pin, "--pin-file")
    pins = TokenPins(officer, user, rotation_pin(settings, rotation))
    return Desk(settings, _roster(roster), officer_key(key), pins)


def _roster(path: Path | None) -> Roster:
    return read_roster(path or Settings.load(os.environ).roster_file)


def _read(path: Path) -> Transcript:
    return Transcript.read(path.read_bytes())


def _expect(master: RingMaster) -> None:
    """Tell the running site what its token gets. Where none runs here, `announce` does it at the host where one does."""
    try:
        ask(Settings.load(os.environ), "expect", master=master.label)
    except NotRunning:
        click.echo("no site runs here: give `glottis keys ceremony announce PLAN` at the host where it does", err=True)


def _agreed(settings: Settings, master: RingMaster) -> bool:
    told = ask(settings, "status")
    if told["open"] is not None:
        raise CeremonyRefused(f"a transaction of the sites is open ({told['open']}): finish it first, glottis site resume")
    return any(version["name"] == master.label and version["agreed"] for version in told["versions"])


def _compare(desk: Desk, story: Transcript, *, yes: bool) -> None:
    """Check every message so far, show them, and have the officer compare the newest with the other console."""
    desk.check(story)
    for line in story_lines(story):
        click.echo(line, err=True)
    if not yes:
        confirmed(
            f"Does the other officer's console show this fingerprint of the {story.newest.step}?",
            instead="give --yes once the fingerprints were compared",
        )
