"""Commands that are loaded when they are called: `--help` of all need not wait for the libraries of each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click


def loading(later: Mapping[str, tuple[str, str]]) -> type[click.Group]:
    """A group whose further commands stand in `later`: name, module whose attribute of that name is the command, and help.

    Where the name is a word of Python's own, the attribute has an underscore behind it.
    """

    class Loading(click.Group):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return [*later, *super().list_commands(ctx)]

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in later:
                return super().get_command(ctx, cmd_name)
            module = importlib.import_module(later[cmd_name][0])
            attribute = cmd_name.replace("-", "_")
            command = getattr(module, attribute, None) or getattr(module, f"{attribute}_")
            assert isinstance(command, click.Command)
            return command

        def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
            own = [(name, command.get_short_help_str(80)) for name, command in sorted(self.commands.items())]
            with formatter.section("Commands"):
                formatter.write_dl([*((name, said) for name, (_, said) in later.items()), *own])

    return Loading
