"""`glottis keys break-glass`."""

from __future__ import annotations

import os

import click

from service.cli.output import json_option, say_awaiting
from service.cli.versions import MasterType
from service.settings import Settings
from service.sync.admin import ask


@click.command("break-glass")
@click.argument("version", type=MasterType())
@click.option("--hours", type=click.FloatRange(min=0.1, max=168), default=2.0, show_default=True, help="For how long.")
@click.option("--reason", required=True, help="Why, in a sentence: it stands in the request.")
@json_option
def break_glass(version: str, hours: float, reason: str, as_json: bool) -> None:
    """Ask officers to let voices under compromised VERSION, such as main/1, open at this site for a while.

    It holds as soon as enough officers approved (`glottis approvals`), and is over with the request's time or when it is cancelled.
    Ends with 75: officers are awaited.
    Each voice that opens so is an entry of the log (key.glass_broken). To mend the damage instead: keys rotate, keys rewrap.
    """
    found = ask(Settings.load(os.environ), "break_glass", hours=hours, reason=reason, version=version)
    say_awaiting(found, [f"once approved it holds until {found['ends_at']}"], found["request"], as_json=as_json)
