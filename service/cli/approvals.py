"""`glottis approvals`: what officers are asked, what it would do, and their signatures."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from keyvault.approval_kinds import MEANINGS, Kind, Request
from keyvault.approvals import signed_by
from keyvault.sync.errors import ApprovalExpired, RequesterApproved, StatementMalformed
from keyvault.sync.roster import Roster
from service.cli.asking import confirmed
from service.cli.loading import Listing
from service.cli.officer_keys import key_option, officer_key
from service.cli.output import json_option, say
from service.errors import RequestUnreadable
from service.officers import OfficerKey, grouped, person_of, read_roster
from service.settings import Settings
from service.sync.admin import ask

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_yes = click.option("--yes", is_flag=True, help="It was read and compared: do not ask.")


@click.group(cls=Listing, invoke_without_command=True)
@click.pass_context
def approvals(context: click.Context) -> None:
    """See what needs officers' approval, and approve it with your own key. Without a command: what waits now.

    An approval is an officer's signature over one exact request. Whoever asked does not count, a person counts once, and a
    request is over when it says. On a host without your key: `export`, carry the file, `sign` at your console, `add`.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_, everything=False, as_json=False)


@approvals.command("list")
@click.option("--all", "everything", is_flag=True, help="Also what is done, cancelled or over.")
@json_option
def list_(everything: bool, as_json: bool) -> None:
    """Show the requests that wait for officers."""
    found = _ask("approvals")["requests"]
    shown = [one for one in found if everything or one["outcome"] == "open"]
    lines = [
        f"{one['id'][:16]}  {one['kind'].ljust(20)}  {len(one['approved_by'])} of {one['needed']}  {one['outcome'].ljust(9)}"
        f"  until {one['expires_at'][:16]}Z  by {one['requester']}"
        for one in shown
    ]
    say({"requests": shown}, lines or ["nothing waits for officers"], as_json=as_json)


@approvals.command()
@click.argument("name", metavar="ID")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show request ID: what it does, what it touches, whether it can be undone, who asked, who approved. Its first digits do."""
    found = _ask("approval", name=name)
    request = _decoded(found["request"])
    say({**found, "means": _meant(request)}, list(_lines(request, found)), as_json=as_json)


@approvals.command()
@click.argument("name", metavar="ID")
@key_option
@_yes
@json_option
def approve(name: str, key: Path | None, yes: bool, as_json: bool) -> None:
    """Read request ID and approve it with your key. Needs both the running site and the key file on one host."""
    signer = officer_key(key)
    found = _ask("approval", name=name)
    request = _decoded(found["request"])
    for line in _lines(request, found):
        click.echo(line, err=True)
    signed = _signed(request, Roster.decode(base64.b64decode(found["roster"])), signer, yes=yes)
    added = _ask("approval_add", request=_encoded(signed))
    say(added, [_counted(added)], as_json=as_json)


@approvals.command()
@click.argument("name", metavar="ID")
@click.option("--out", type=click.Path(path_type=Path), help="Where the request goes.  [default: standard output]")
def export(name: str, out: Path | None) -> None:
    """Write request ID with its signatures so far as a file, for an officer's console."""
    data = base64.b64decode(_ask("approval", name=name)["request"])
    if out is None:
        sys.stdout.buffer.write(data)
    else:
        out.write_bytes(data)


@approvals.command()
@click.argument("file", type=_FILE)
@key_option
@click.option("--roster", type=_FILE, help="The cluster's roster.  [default: `roster` in the state folder]")
@click.option("--out", type=click.Path(path_type=Path), help="Where the signed request goes.  [default: FILE with .signed]")
@_yes
def sign(file: Path, key: Path | None, roster: Path | None, out: Path | None, yes: bool) -> None:
    """Read the request in FILE and approve it with your key: works offline. Carry the result back, for `add`."""
    signer = officer_key(key)
    request = _read(file)
    known = read_roster(roster or Settings.load(os.environ).roster_file)
    for line in _lines(request, {}):
        click.echo(line, err=True)
    signed = _signed(request, known, signer, yes=yes)
    place = out or file.with_name(f"{file.name}.signed")
    place.write_bytes(signed.encode())
    click.echo(f"signed: {place}")


@approvals.command()
@click.argument("file", type=_FILE)
@json_option
def add(file: Path, as_json: bool) -> None:
    """Enter the signatures of FILE, as `sign` wrote it. A request that an officer made and signed himself is entered too."""
    request = _read(file)
    known = any(one["id"] == request.operation.digest.hex() for one in _ask("approvals")["requests"])
    added = _ask("approval_add" if known else "approval_file", request=_encoded(request))
    say(added, [_counted(added)], as_json=as_json)


@approvals.command()
@click.argument("name", metavar="ID")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def cancel(name: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """End request ID: its signatures are used for nothing from then on."""
    found = _ask("approval", name=name)
    if dry_run:
        say(found, [f"request {found['id'][:16]} would be cancelled"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Cancel request {found['id'][:16]} ({found['kind']})?")
    done = _ask("approval_cancel", name=found["id"])
    say(done, [f"request {done['id'][:16]} is cancelled"], as_json=as_json)


@approvals.command("carry-out")
@click.argument("name", metavar="ID")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def carry_out(name: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Carry out approved request ID, where it holds its whole transaction: a roster, or an act for an absent site.

    Both sites check every signature again. Other requests are carried out by giving the command again that filed them.
    """
    found = _ask("approval", name=name)
    request = _decoded(found["request"])
    if dry_run or not yes:
        for line in _lines(request, found):
            click.echo(line, err=True)
    if dry_run:
        say(found, ["nothing was done"], as_json=as_json)
        return
    if not yes:
        confirmed("Carry this out?")
    done = _ask("approval_carry", name=found["id"])
    say(done, [f"request {done['id'][:16]} is carried out: epoch {done['epoch']}"], as_json=as_json)


@approvals.command()
@json_option
def kinds(as_json: bool) -> None:
    """List everything that takes officers' approval."""
    facts = {kind.value: {"does": meaning.sentence, "undone": meaning.undone} for kind, meaning in MEANINGS.items()}
    lines = [f"{kind.value.ljust(20)}  {meaning.sentence} Undone: {meaning.undone}" for kind, meaning in MEANINGS.items()]
    say({"kinds": facts}, lines, as_json=as_json)


def _counted(standing: Mapping[str, Any]) -> str:
    """How many signatures there are now, and what comes next."""
    given, needed = len(standing["approved_by"]), standing["needed"]
    then = "" if given < needed else ": enough; `glottis approvals show` says what it does, and the command that filed it does it"
    return f"signatures of {given} of {needed} officers are there{then}"


def _ask(call: str, **request: Any) -> dict[str, Any]:
    return ask(Settings.load(os.environ), call, **request)


def _signed(request: Request, roster: Roster, signer: OfficerKey, *, yes: bool) -> Request:
    """The request with this officer's approval. Raises what would be refused anyway, before anything is signed."""
    person = person_of(signer, roster)
    if datetime.now(UTC) >= request.operation.expires_at:
        raise ApprovalExpired
    if person == request.operation.requester:
        raise RequesterApproved
    request.meaning()
    if not yes:
        confirmed(f"Approve this as {person}?")
    others = tuple(one for one in request.approvals if (one.person, one.role) != (person, "approve"))
    return replace(request, approvals=(*others, signed_by(request.operation, person, "approve", signer)))


def _lines(request: Request, told: Mapping[str, Any]) -> Iterator[str]:
    """The request as it is read before it is signed. `told` are the site's own words: what is touched, and who has approved."""
    operation, meaning = request.operation, request.meaning()
    words = MEANINGS[meaning.kind]
    yield _line("request", grouped(operation.digest))
    yield _line("does", f"{words.sentence} [{operation.kind}]")
    for name, said in (*meaning.signed, *_changes_of(request)):
        yield _line(name, said)
    if "touches" in told:
        yield _line("touches", _touched(told["touches"]))
    yield _line("undone", words.undone)
    yield _line("asked by", operation.requester)
    for name, said in meaning.claims:
        yield _line(f"({name}", f"{said})")
    if meaning.claims:
        yield _line("(in brackets", "the requester's words, no part of what is signed)")
    yield _line("cluster", operation.cluster)
    yield _line("until", operation.expires_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    people = told.get("approved_by", [one.person for one in request.approvals if one.role == "approve"])
    needed = f" of {told['needed']} needed" if "needed" in told else ""
    yield _line("approved", f"{len(people)}{needed}: {', '.join(people) or 'nobody yet'}")


def _line(name: str, said: str) -> str:
    # Another person's words must not move the cursor or turn the direction of what is read before a signature.
    return f"{name.ljust(16)}{said}".translate(_PLAIN)


def _changes_of(request: Request) -> Sequence[tuple[str, str]]:
    """What other policies a request would bring, where it is about that."""
    if request.operation.kind != Kind.POLICY:
        return ()
    from service.cli.policy_sets import changes_of  # only this kind needs the policies' library

    return tuple(changes_of(request))


class _Plain(dict[int, str]):
    def __missing__(self, character: int) -> str:
        return chr(character) if chr(character).isprintable() else f"\\u{character:04x}"


_PLAIN = _Plain()


def _touched(facts: Mapping[str, Any]) -> str:
    keys = [f"{count} voices' keys under {label}" for label, count in facts["keys"].items()]
    voices = [f"{facts['voices']} voices"] if facts["voices"] else []
    sites = facts["sites"]
    where = f"{'sites' if len(sites) > 1 else 'site'} {' and '.join(sites)}"
    return ", ".join([*facts["reaches"], *keys, *voices, where])


def _meant(request: Request) -> dict[str, Any]:
    meaning = request.meaning()
    words = MEANINGS[meaning.kind]
    return {"does": words.sentence, "undone": words.undone, "signed": dict(meaning.signed), "claims": dict(meaning.claims)}


def _read(path: Path) -> Request:
    try:
        return Request.decode(path.read_bytes())
    except StatementMalformed as error:
        raise RequestUnreadable(f"{path} is no request for approval: {error}") from error


def _decoded(text: str) -> Request:
    return Request.decode(base64.b64decode(text, validate=True))


def _encoded(request: Request) -> str:
    return base64.b64encode(request.encode()).decode()
