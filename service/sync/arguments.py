"""What a command of the operator's socket is given: the names and types that it declares, and nothing else.

The commands themselves check what their arguments mean. What no command could make sense of (a number or a text that neither JSON
nor the database holds) is refused before any of them runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pydantic import ConfigDict, ValidationError, validate_call

from service.errors import CommandMalformed

Call = Callable[..., Mapping[str, Any]]
"""Takes the request's fields as keywords; what it answers is JSON."""
MOST = 2**53
"""No whole number beyond this is the same for every reader of JSON (RFC 8259 §6)."""


def typed(call: Call) -> Call:
    """The command, refusing what does not fit its declared arguments. Raises CommandMalformed; the command has not run then."""
    checked = validate_call(config=ConfigDict(strict=True))(call)

    def run(**given: Any) -> Mapping[str, Any]:
        try:
            return checked(**given)
        except ValidationError as problem:
            kinds = sorted({f"{_place(found['loc'])} ({found['type']})" for found in problem.errors(include_input=False)})
            raise CommandMalformed(f"it does not fit: {', '.join(kinds)[:300]}") from None

    return run


def arguments(body: bytes) -> dict[str, Any]:
    """The arguments in a command's body, a JSON object. Raises CommandMalformed."""
    try:
        given = json.loads(body or b"{}", parse_constant=_no_number)
        _check(given)
    except (ValueError, RecursionError):
        raise CommandMalformed("it is no JSON object of plain texts and numbers") from None
    if not isinstance(given, dict):
        raise CommandMalformed("it is no JSON object")
    return given


def _check(value: object) -> None:
    """Raise ValueError for a text or a number that the database cannot hold."""
    match value:
        case str():
            if "\0" in value:
                raise ValueError("a zero character")
            value.encode()  # a lone surrogate has no UTF-8
        case int() | float():
            if abs(value) > MOST:
                raise ValueError("a number beyond what JSON keeps")
        case list():
            for item in value:
                _check(item)
        case dict():
            for name, item in value.items():
                _check(name)
                _check(item)


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _place(path: tuple[int | str, ...]) -> str:
    return ".".join(ascii(part).strip("'") for part in path)[:80]
