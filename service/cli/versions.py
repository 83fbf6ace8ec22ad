"""How a master version is written on the command line."""

from __future__ import annotations

from typing import Any

import click

from keyvault.hsm import RingMaster


class MasterType(click.ParamType[str]):
    """`main/2` or `ring/main/2`; the command gets the label."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        label = str(value) if str(value).startswith("ring/") else f"ring/{value}"
        try:
            return RingMaster.named(label).label
        except ValueError:
            self.fail(f"{value!r} is no version; one is written like main/2", param, ctx)
