"""How a command answers: facts as JSON, or sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from service.cli.main import say_json
from service.exits import Ended, Exit

json_option = click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")


def say(facts: Mapping[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    """Print the facts, or the lines."""
    if as_json:
        say_json(facts)
    else:
        for line in lines:
            click.echo(line)


def say_awaiting(
    facts: Mapping[str, Any], lines: Sequence[str], request: str, needed: int | None = None, *, as_json: bool
) -> NoReturn:
    """Say what was asked of officers, where they read it, and end with 75: nothing is done yet, and nothing was refused."""
    whom = "officers" if needed is None else f"{needed} officers" if needed > 1 else "an officer"
    say(facts, [*lines, f"request {request[:16]} waits for {whom}: glottis approvals show {request[:16]}"], as_json=as_json)
    raise Ended(Exit.TEMPORARY)
