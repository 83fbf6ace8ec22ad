"""`glottis keys schedule`: what happens to keys by itself, and what officers are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from keyvault.hsm import DEFAULT_RING
from keyvault.schedules import Action
from service.cli.loading import Listing
from service.cli.output import json_option, say
from service.settings import Settings
from service.sync.admin import ask


@click.group(cls=Listing)
def schedule() -> None:
    """What happens to keys by itself. What needs officers is only asked of them, and they are reminded every day."""


@schedule.command("list")
@json_option
def schedules(as_json: bool) -> None:
    """Show every schedule, when it last did something, and what is due."""
    found = ask(Settings.load(os.environ), "key_schedules")
    say(found, [_scheduled(one) for one in found["schedules"]] or ["there is no schedule"], as_json=as_json)


@schedule.command("set")
@click.argument("name")
@click.option("--ring", default=DEFAULT_RING, show_default=True)
@click.option("--action", type=click.Choice([action.value for action in Action]), required=True)
@click.option(
    "--after-days", type=click.IntRange(min=1), help="rotate: age of the serving version; destroy: since it was followed."
)
@click.option(
    "--after-keys", type=click.IntRange(min=1), help="rotate: keys wrapped under the serving version; openings don't count."
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="rewrap: keys a second at most.")
@json_option
def set_(as_json: bool, **plan: Any) -> None:
    """Set the schedule NAME; one of that name is replaced.

    rotate asks officers for a ceremony when the serving version is old or wraps many keys. rewrap moves keys by itself, whenever
    an older version wraps any. destroy asks officers to end versions that wrap nothing any more.

    \b
    glottis keys schedule set yearly --action rotate --after-days 365
    glottis keys schedule set follow --action rewrap --rate 200
    """
    found = ask(Settings.load(os.environ), "key_schedule_set", **plan)
    say(found, [_scheduled(found)], as_json=as_json)


@schedule.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """End the schedule NAME."""
    found = ask(Settings.load(os.environ), "key_schedule_remove", name=name)
    say(found, [f"{name} is removed"], as_json=as_json)


def _scheduled(found: Mapping[str, Any]) -> str:
    limits = [f"after {found['after_days']} days"] if found["after_days"] else []
    limits += [f"after {found['after_keys']} keys"] if found["after_keys"] else []
    limits += [f"at most {found['rate']:g} keys/s"] if found["rate"] else []
    ran = f"; last {found['last_run_at']}" if found["last_run_at"] else ""
    due = f"; DUE: {found['due']}" if found["due"] else ""
    return f"{found['name']}: {found['action']} ring {found['ring']} {' or '.join(limits)}".rstrip() + ran + due
