"""`glottis keys`: master versions, their states and their end; re-wrap; schedules; and the ceremony that makes a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from keyvault.hsm import DEFAULT_RING
from keyvault.states import KeyState
from service.cli.asking import confirmed
from service.cli.loading import loading
from service.cli.output import json_option, say, say_awaiting
from service.cli.versions import MasterType
from service.errors import NothingToInstall
from service.settings import Settings
from service.sync.admin import ask

_dry = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")
_reason = click.option("--reason", required=True, help="Why, in a sentence: it stands in the audit log and beside the version.")
_master = click.argument("master", metavar="VERSION", type=MasterType())
_ring = click.argument("ring", default=DEFAULT_RING)


_LATER = {
    "ceremony": ("service.cli.ceremony", "Make a master at two sites: two officers, two hosts, files between them."),
    "rewrap": ("service.cli.rewrap", "Move every key of a ring under the version that serves."),
    "rotation": ("service.cli.rotation_token", "The token that re-wraps, where masters are not TRUSTED."),
    "schedule": ("service.cli.schedules", "What happens to keys by itself."),
    "break-glass": ("service.cli.glass", "Ask officers to let voices open under a compromised version for a while."),
    "signer": ("service.cli.signers", "Keys that sign tokens and receipts: list, rotate with an overlap, retire."),
}


@click.group(cls=loading(_LATER))
def keys() -> None:
    """Ring masters: the keys in the token under which every voice's key is wrapped. Glottis must be running here.

    A version is written like main/2. States are those of NIST SP 800-57: only an active one wraps new keys; a deactivated one
    still opens what it wrapped; a suspended one does nothing for a while; a compromised one only lets its keys be moved away.

    To rotate: `keys ceremony` makes a version at both sites, `keys rotate` lets it serve, `keys rewrap` moves every voice's
    key under it, and `keys destroy` ends the old one once nothing refers to it.
    """


@keys.command("list")
@click.option("--ring", help="Only this ring's.")
@json_option
def list_(ring: str | None, as_json: bool) -> None:
    """Show every version: its state, and how many keys it wraps here. Each row's MAC is checked."""
    found = ask(_settings(), "keys", ring=ring)
    say(found, _table(found["versions"]), as_json=as_json)


@keys.command()
@_master
@json_option
def show(master: str, as_json: bool) -> None:
    """Show one version: state, reason, age, the keys that refer to it, and a destruction that is pending."""
    found = _version(_settings(), master)
    lines = [f"{found['name']}: {found['state']}", f"  since its start {found['created_at']}"]
    lines += [f"  because: {found['reason']}"] if found["reason"] else []
    lines += [f"  wraps {found['keys']} keys at this site; {'in' if found['held_here'] else 'NOT IN'} this site's token"]
    lines += [f"  destroyed at {found['destroy_at']} unless cancelled: glottis keys cancel {master}"] if found["destroy_at"] else []
    if found["peer_destroy_at"]:
        lines += [f"  destroyed at {found['peer_destroy_at']} by the other site's schedule; cancel it there"]
    lines += [f"  ALERT: {found['alert']}"] if found["alert"] else []
    say(found, lines, as_json=as_json)


# --- rotation


@keys.command()
@_ring
@click.option("--rewrap/--no-rewrap", "move", default=False, help="Then move every key under it, with two workers.")
@_dry
@_yes
@json_option
@click.pass_context
def rotate(ctx: click.Context, ring: str, move: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let RING's newest version, which a ceremony made, serve: both sites prove to each other that they hold the same key.

    Only this ring's master changes: no other ring, no voice's key, no signer, no PIN. The version before opens what it wrapped
    until `keys rewrap` has moved it. While the other site is away the old version goes on serving.
    """
    settings = _settings()
    waiting = [version for version in ask(settings, "keys", ring=ring)["versions"] if _installable(version)]
    if not waiting:
        raise NothingToInstall(f"ring {ring} has no new version in this site's token")
    label = waiting[-1]["name"]
    if dry_run:
        say({"changed": False, "would_serve": label}, [f"{label} would serve; the version before would only open"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Let {label} serve?")
    done = ask(settings, "install", masters=[label])
    say({"changed": True, "serves": label, **done}, [f"{label} serves since epoch {done['epoch']}"], as_json=as_json and not move)
    if move:
        command = keys.get_command(ctx, "rewrap")
        assert command is not None
        ctx.invoke(command, ring=ring, target=None, workers=2, rate=None, dry_run=False, rotation_pin_file=None, as_json=as_json)


def _installable(version: Mapping[str, Any]) -> bool:
    return bool(version["state"] == KeyState.PRE_ACTIVATION.value and version["held_here"])


# --- states


def _change(act: str, said: str, help_: str) -> None:
    """A command that changes one version's state."""

    @keys.command(act, help=help_)
    @_master
    @_reason
    @_dry
    @_yes
    @json_option
    def command(master: str, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
        settings = _settings()
        found = _version(settings, master)
        if dry_run:
            line = f"{master} is {found['state']} and wraps {found['keys']} keys; it would be {said}"
            say({**found, "changed": False}, [line], as_json=as_json)
            return
        if not yes:
            confirmed(f"{master} wraps {found['keys']} keys and is {found['state']}. Go on: {act}?")
        done = ask(settings, "key_change", act=act, master=master, reason=reason)
        say({**done, "changed": done["state"] != found["state"]}, [f"{master} is {done['state']}"], as_json=as_json)


_change("suspend", "suspended", "Stop all use of VERSION for a while: its voices neither open nor get keys. `resume` ends it.")
_change("resume", "active again", "End a suspension: VERSION serves again. A version that was retired never does: rotate instead.")
_change("deactivate", "deactivated", "Let VERSION wrap nothing new. It still opens what it wrapped, and lets it be moved.")
_change(
    "compromise",
    "compromised",
    "Say that VERSION's key may be known to others. Nothing is wrapped under it from now on, also while the other site is away,"
    " and nothing opens without officers' break-glass. Then rotate and re-wrap: its keys go first. The voices' own keys may be"
    " known too: give each a new one.",
)


@keys.command()
@_master
@_reason
@click.option("--delay-days", type=click.FloatRange(min=0), default=7, show_default=True, help="Time in which it can be cancelled.")
@_dry
@_yes
@json_option
def destroy(master: str, reason: str, delay_days: float, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Destroy VERSION at both sites after a delay. Officers approve it first; then give this command again.

    It is carried out only when no stored key refers to it, at either site; until then it stays due. Each use meanwhile is an
    alert in the audit log. Ends with 75 while officers are awaited.
    """
    settings = _settings()
    found = _version(settings, master)
    if dry_run:
        line = f"{master} is {found['state']} and wraps {found['keys']} keys; it would be destroyed {delay_days:g} days from now"
        say({**found, "changed": False}, [line], as_json=as_json)
        return
    if not yes:
        confirmed(f"Destroy {master} in {delay_days:g} days? It wraps {found['keys']} keys.")
    done = ask(settings, "key_destroy", master=master, reason=reason, delay_hours=delay_days * 24)
    if done["request"]:
        say_awaiting(done, [f"{master} stays until officers approved and this is given again"], done["request"], as_json=as_json)
    say(done, [f"{master} is destroyed at {done['destroy_at']} unless cancelled"], as_json=as_json)


@keys.command()
@_master
@_reason
@json_option
def cancel(master: str, reason: str, as_json: bool) -> None:
    """Stop the destruction of VERSION, pending or only asked for.

    The officers' request for it ends too, whoever signed it: another destruction needs new signatures. Ends with 4 where there is
    nothing to cancel.
    """
    done = ask(_settings(), "key_cancel", master=master, reason=reason)
    lines = [f"{master} stays", *(f"request {request[:16]} is withdrawn" for request in done["withdrawn"])]
    say(done, lines, as_json=as_json)


# --- what they share


def _settings() -> Settings:
    return Settings.load(os.environ)


def _version(settings: Settings, master: str) -> dict[str, Any]:
    found = ask(settings, "key", master=master)
    return dict(found)


def _table(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for version in versions:
        flags = [] if version["held_here"] or version["state"] == KeyState.DESTROYED.value else ["not in this token"]
        flags += [f"destroyed at {version['destroy_at']}"] if version["destroy_at"] else []
        flags += [f"destroyed at {version['peer_destroy_at']} by the other site"] if version["peer_destroy_at"] else []
        flags += ["ALERT: still in use"] if version["alert"] else []
        rows.append((version["name"], version["state"], f"{version['keys']} keys", "; ".join(flags)))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*(row[column].ljust(widths[column]) for column in range(3)), row[3]]).rstrip() for row in rows]
