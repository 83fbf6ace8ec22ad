"""A master version is read one way by every command, and a rotation token keeps what serves or may come to serve."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from keyvault.errors import KeyStateForbids
from keyvault.states import KeyState
from keyvault.sync.errors import KeyStillReferenced
from service.cli import rotation_token
from service.cli.main import cli

COMMANDS = [
    ["keys", "show"],
    ["keys", "suspend", "--reason", "r", "--yes"],
    ["keys", "break-glass", "--reason", "r"],
    ["keys", "rotation", "destroy", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("version", ["main", "main/", "main/x", "/1", "ring/1"])
def test_what_is_no_version_is_a_usage_error_everywhere(command: list[str], version: str) -> None:
    done = CliRunner().invoke(cli, [*command, version])
    assert (done.exit_code, "is no version; one is written like main/2" in done.output) == (2, True), done.output


@pytest.mark.parametrize("version", ["main/1", "ring/main/1"])
@pytest.mark.parametrize(
    ("state", "keys", "refused"),
    [
        *((state, 0, KeyStateForbids) for state in (KeyState.ACTIVE, KeyState.PRE_ACTIVATION, KeyState.SUSPENDED)),
        (KeyState.DEACTIVATED, 3, KeyStillReferenced),
        *((state, 0, None) for state in (KeyState.DEACTIVATED, KeyState.COMPROMISED, KeyState.DESTROYED)),
    ],
)
def test_a_rotation_token_gives_up_only_what_is_retired_and_wraps_nothing(
    monkeypatch: pytest.MonkeyPatch, version: str, state: KeyState, keys: int, refused: type[Exception] | None
) -> None:
    asked: list[dict[str, Any]] = []

    def ask(_: object, call: str, **given: Any) -> dict[str, Any]:
        asked.append({"call": call, **given})
        return {"state": state.value, "keys": keys}

    monkeypatch.setattr(rotation_token, "_site", lambda _: None)
    monkeypatch.setattr(rotation_token, "ask", ask)
    done = CliRunner().invoke(cli, ["keys", "rotation", "destroy", version, "--dry-run"])
    assert asked == [{"call": "key", "master": "ring/main/1"}]
    assert (type(done.exception) if done.exit_code else None) is refused, done.output
