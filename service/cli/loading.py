"""Groups of commands: their help shows whole sentences, and what they load is loaded only when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

_WHOLE = 1000
"""Longer than any first sentence: the list of commands breaks lines and cuts none."""


class Listing(click.Group):
    """A group whose help says of each command its whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

    def summary(self, ctx: click.Context, name: str) -> str:
        """What the list of commands says of one."""
        command = self.get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(_WHOLE)


def loading(later: Mapping[str, tuple[str, str]]) -> type[click.Group]:
    """A group whose further commands stand in `later`: name, module whose attribute of that name is the command, and help.

    `--help` of all need not wait for the libraries of each. Where the name is a word of Python's own, the attribute has an
    underscore behind it.
    """

    class Loading(Listing):
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

        def summary(self, ctx: click.Context, name: str) -> str:
            return later[name][1] if name in later else super().summary(ctx, name)

    return Loading
