"""`glottis policy propose`, `activate`, `reset` and `list` (`--active`): which set of policies decides, and who may change it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from keyvault.approval_kinds import Kind, Request
from policies.errors import PolicySetInvalid
from policies.sets.policy_set import PolicySet, changes
from service.cli.asking import confirmed
from service.cli.output import json_option, say, say_awaiting
from service.errors import PolicySetRefused
from service.policy_sets import REQUEST_HOURS, proposed_of
from service.settings import Settings
from service.sync.admin import ask

_hours = click.option(
    "--hours", type=click.IntRange(1, 24 * 365), default=REQUEST_HOURS, show_default=True, help="How long officers may take."
)
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_hours
@_dry_run
@json_option
def propose(folder: Path, hours: int, dry_run: bool, as_json: bool) -> None:
    """Check the set in FOLDER and ask officers to activate it at this site.

    FOLDER holds roles.cedar (the permissions; it replaces the one that ships), further *.cedar, cases/*.json that say what each
    must decide, and where wanted officers.json. The prohibitions and the schema that ship are always loaded; copies of them may
    lie there unchanged. Officers sign the set's version and SHA-256; then: glottis policy activate ID. Ends with 75 until then,
    and with 0 where this set is in force already.
    """
    _propose(_read(folder), hours, dry_run=dry_run, as_json=as_json)


@click.command()
@_hours
@_dry_run
@json_option
def reset(hours: int, dry_run: bool, as_json: bool) -> None:
    """Ask officers to go back to the set that ships.

    It is an activation like any other, and ends with 75 until officers approved it; where that set is in force already, with 0.
    """
    _propose(PolicySet(), hours, dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("name", metavar="ID")
@_dry_run
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def activate(name: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Make the set of approved request ID the active one: each worker decides by it from its next request on.

    The request names the set that it follows: if another was activated meanwhile, propose it again. At the other site, bring the
    same signed request (glottis approvals export, add) and give this again there.
    """
    settings = Settings.load(os.environ)
    found = ask(settings, "approval", name=name)
    request = Request.decode(base64.b64decode(found["request"], validate=True))
    if dry_run or not yes:
        for said in changes_of(request):
            click.echo("  ".join(said), err=True)
    if dry_run:
        say(found, ["nothing was done"], as_json=as_json)
        return
    if not yes:
        confirmed("Activate this set?")
    done = ask(settings, "policy_activate", name=found["id"])
    done.pop("policies")
    say(done, [_line(done)], as_json=as_json)


@click.command("list")
@click.option("--active", "newest", is_flag=True, help="Only the one that decides now.")
@json_option
def list_(newest: bool, as_json: bool) -> None:
    """Show every activation at this site, oldest first, each checked again: the last is active. No line: the set that ships."""
    found = ask(Settings.load(os.environ), "policy_activations")
    if newest:
        found["activations"] = found["activations"][-1:]
    lines = [
        _line(one) if one["code"] is None else f"{one['version']}  DOES NOT HOLD: {one['said']}" for one in found["activations"]
    ]
    say(found, lines or ["none was ever activated: the set that ships decides"], as_json=as_json)


def active(settings: Settings) -> tuple[PolicySet, dict[str, Any]]:
    """The active set of the running site, and what the site says of it."""
    found = ask(settings, "policy_active")
    return PolicySet.decode(base64.b64decode(found.pop("policies"), validate=True)), found


def changes_of(request: Request) -> Iterator[tuple[str, str]]:
    """What a request about policies changes, for officers to read, from the bytes that they sign; nothing for other kinds.

    Raises PolicySetRefused for a set that this version of Glottis could not load: then there is nothing to sign.
    """
    if request.operation.kind != Kind.POLICY:
        return
    try:
        before, after = proposed_of(request)
        found = changes(before, after)
        yield "officers for", ", ".join(sorted(after.approved_roles)) or "no role of clients"
    except PolicySetInvalid as error:
        raise PolicySetRefused(error.detail) from error
    for change in found:
        yield change.how, f"{change.policy.id}, which {change.policy.effect}s: {change.policy.sentence}"
    if not found:
        yield "changes", "no policy"


def _propose(policies: PolicySet, hours: int, *, dry_run: bool, as_json: bool) -> None:
    settings, data = Settings.load(os.environ), base64.b64encode(policies.encode()).decode()
    if dry_run:
        try:
            engine = policies.check()
        except PolicySetInvalid as error:
            raise PolicySetRefused(error.detail) from error
        facts = {"set": policies.digest.hex(), "policies": len(engine.policies), "request": None}
        say(facts, [f"{len(engine.policies)} policies hold, set {policies.digest.hex()}"], as_json=as_json)
        return
    filed = ask(settings, "policy_propose", policies=data, hours=hours)
    if filed["request"] is None:
        say(filed, [f"{'the set that ships' if filed['shipped'] else 'this set'} is in force already"], as_json=as_json)
        return
    lines = [f"version {filed['version']}, set {filed['set']}"]
    say_awaiting(filed, lines, filed["request"], filed["needed"], as_json=as_json)


def _read(folder: Path) -> PolicySet:
    try:
        return PolicySet.of_folder(folder)
    except PolicySetInvalid as error:
        raise PolicySetRefused(error.detail) from error


def _line(found: Mapping[str, Any]) -> str:
    what = "the set that ships" if found["shipped"] else f"set {found['set'][:16]}"
    by = f", approved by {', '.join(found['approved_by'])}" if found["approved_by"] else ""
    return f"version {found['version']}: {what}{by}"
