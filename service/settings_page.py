"""`docs/settings.md`, made from `service/settings.py`: `python -m service.settings_page > docs/settings.md`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from textwrap import dedent

from service import settings
from service.settings import PREFIX, Settings

_KINDS = {"str": "text", "int": "number", "bool": "yes or no", "Path": "path"}
_OWN = "Set by the supervisor"
"""So begins what is said of a setting that one process of Glottis gives to another."""
_HEAD = """
    # Settings

    Every setting is an environment variable, read once when a command or `glottis up` starts, and each has a default that works. An
    unknown name with this prefix is refused, and so is an empty value: unset it instead. This page is made from
    `service/settings.py`.

    | variable | what it is | default | meaning |
    |---|---|---|---|
"""
_STATE_DIR = "`/var/lib/glottis` for root, else `~/.local/state/glottis`"


def page() -> str:
    """The whole page in Markdown. Raises KeyError for a setting that says nothing of itself."""
    said = meanings()
    rows = [_row(one.name, str(one.type), one.default, said[one.name]) for one in fields(Settings)]
    return dedent(_HEAD).lstrip() + "".join(row for row in rows if _OWN not in row)


def meanings() -> dict[str, str]:
    """What stands below each setting in its source, by its name."""
    classes = (node for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef))
    (found,) = (node for node in classes if node.name == Settings.__name__)
    return dict(_said(found.body))


def _said(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _row(name: str, kind: str, default: object, said: str) -> str:
    known = {one.name for one in fields(Settings)}
    linked = re.sub(r"`(\w+)`", lambda at: f"`{PREFIX}{at[1].upper()}`" if at[1] in known else at[0], said)
    cells = (f"`{PREFIX}{name.upper()}`", _KINDS[kind.split(" | ")[0]], _default(default), linked.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


def _default(value: object) -> str:
    if value is MISSING:
        return _STATE_DIR
    if value is None:
        return "unset"
    return f"`{('yes' if value else 'no') if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 — this is what the module is run for
