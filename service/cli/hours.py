"""Hours of the week, as options that clients and voices share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from policies.errors import HoursInvalid
from policies.hours import Hours

Command = TypeVar("Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--days", help="Days on which the span begins: mon-fri, or sat,sun. Default: every day."),
    click.option("--from", "opens", metavar="HH:MM", help="When it begins."),
    click.option("--to", "closes", metavar="HH:MM", help="When it ends; 24:00 is the end of the day."),
    click.option("--zone", help="A zone of the IANA database, such as Europe/Zurich. Default: UTC."),
    click.option("--always", is_flag=True, help="No hours any more."),
)


def hours_options(command: Command) -> Command:
    """The options, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def hours_asked(
    *, days: str | None, opens: str | None, closes: str | None, zone: str | None, always: bool
) -> tuple[bool, Hours | None]:
    """Whether hours are to be set, and which. Raises UsageError."""
    if always and (days or opens or closes or zone):
        raise click.UsageError("--always goes with no other option.")
    if always or not (days or opens or closes or zone):
        return always, None
    if not opens or not closes:
        raise click.UsageError("Hours need --from and --to.")
    try:
        return True, Hours.of(days or "mon-sun", opens, closes, zone or "UTC")
    except HoursInvalid as refusal:
        raise click.UsageError(f"{refusal.detail}. {refusal.fix}") from None


def hours_said(hours: str | None) -> str:
    """For people."""
    return "at any time" if hours is None else f"{hours}, and at no other time"
