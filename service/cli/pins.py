"""Where a command takes a PIN from: a file, a line of standard input, the place where the site keeps it, or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from service.cli.asking import typed
from service.secrets import Secret
from service.settings import Settings
from service.site import ROTATION

rotation_option = click.option(
    "--rotation-pin-file",
    help="The rotation token's PIN, where masters are not TRUSTED: a file, or - for a line of standard input.  [default: asked]",
)


def pin(source: str | None, what: str, default: Secret | None, option: str) -> Callable[[], str]:
    """What gives the PIN when a step needs it. A piped one is read at once: lines come in the order of the options.

    `option` is the one that names a `source`.
    """
    if source == "-":
        given = sys.stdin.readline().rstrip("\n")
        return lambda: given
    if source is not None:
        return Secret(Path(source)).read
    if default is not None and (default.command or (default.file and default.file.exists())):
        return default.read
    return cache(lambda: typed(what, instead=f"give {option}"))


def rotation_pin(settings: Settings, source: str | None) -> Callable[[], str]:
    """The rotation token's; the development installation keeps it beside the token."""
    return pin(source, "the rotation token's PIN", Secret(settings.pin_file(ROTATION)), "--rotation-pin-file")
