"""How a command answers: facts as JSON, or sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from service.cli.main import say_json

json_option = click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")


def say(facts: Mapping[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    """Print the facts, or the lines."""
    if as_json:
        say_json(facts)
    else:
        for line in lines:
            click.echo(line)
