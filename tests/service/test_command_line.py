"""What a newcomer reads: whole sentences, what to give instead of an answer, one exit code while officers are awaited."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from uuid import UUID

import click
import pytest
from canned_site import CannedSite, canned_site
from cli_here import glottis_here
from click.testing import CliRunner
from whole_service import PYTHON_PATH

from policies.authority import VoiceState, VoiceTerm
from policies.grants import Purpose
from service import clients, demo
from service.cli import voices
from service.cli.headers import NEEDED
from service.cli.main import cli
from service.client import VoiceClient
from service.exits import BY_CODE, Exit
from service.settings import Settings
from service.transcript import Transcript

LONGEST = 130
"""Of a command's first sentence: two lines of a list of commands."""
REQUEST = "abcdef" + "0" * 58
VOICE = "8c5ab1ad-58ec-4e1b-a0a9-6f7bd0d7f1ce"
VERSION = {"name": "ring/main/1", "state": "deactivated", "keys": 0, "held_here": True, "destroy_at": None, "alert": None}


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, *path, name)


EVERY = list(commands(cli))


@pytest.fixture
def site(state_dir: Path) -> Iterator[CannedSite]:
    with canned_site(Settings.load({"GLOTTIS_STATE_DIR": str(state_dir)})) as found:
        found.answers["key"] = VERSION
        yield found


def run(site: CannedSite, *arguments: object, answer: str | None = None) -> CompletedProcess[str]:
    done = glottis_here(*arguments, environ=PYTHON_PATH | site.settings.environ(), answer=answer)
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("path", [path for path, found in EVERY if isinstance(found, click.Group)], ids=" ".join)
def test_a_list_of_commands_has_whole_sentences(path: tuple[str, ...]) -> None:
    said = CliRunner().invoke(cli, [*path, "--help"]).output.partition("Commands:")[2]
    assert said
    assert "..." not in said, said


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(path) for path, _ in EVERY])
def test_every_command_begins_with_a_sentence_that_fits_its_list(path: tuple[str, ...], command: click.Command) -> None:
    said = command.get_short_help_str(LONGEST)
    assert said
    assert not said.endswith("..."), said


# --- questions


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("keys", "suspend", "main/1", "--reason", "r"), "give --yes"),
        (("keys", "destroy", "main/1", "--reason", "r"), "give --yes"),
        (("keys", "signer", "hand-over"), "give --yes"),
        (("clients", "distrust-ca", "acme"), "give --yes"),
        (("clients", "revoke", "app"), "give --yes"),
    ],
)
def test_a_question_that_nobody_answers_names_the_option(site: CannedSite, arguments: tuple[str, ...], instead: str) -> None:
    done = run(site, *arguments)
    assert (done.returncode, "[nobody_answers]" in done.stderr, instead in done.stderr) == (Exit.LOCAL, True, True)
    assert [call for call, _ in site.asked if call != "key"] == [], "nothing was done"


def test_no_is_an_answer_and_nothing_is_done(site: CannedSite) -> None:
    done = run(site, "keys", "destroy", "main/1", "--reason", "r", answer="n\n")
    assert (done.returncode, "nothing was done" in done.stderr) == (Exit.LOCAL, True)
    assert [call for call, _ in site.asked] == ["key"]


def test_a_passphrase_that_nobody_types_is_no_crash(site: CannedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("click.termui.hidden_prompt_func", ended)
    done = run(site, "officers", "new", "eve", "--key", str(site.settings.state_dir / "eve.pem"))
    assert (done.returncode, "give --no-passphrase" in done.stderr) == (Exit.LOCAL, True)
    assert not (site.settings.state_dir / "eve.pem").exists()


# --- officers


AWAITED: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
    (("keys", "destroy", "main/1", "--reason", "r", "--yes"), "key_destroy", {**VERSION, "request": REQUEST}),
    (("keys", "break-glass", "main/1", "--reason", "r"), "break_glass", {"request": REQUEST, "ends_at": "later"}),
    (("policy", "reset"), "policy_propose", {"request": REQUEST, "needed": 2, "version": 1, "set": "00", "shipped": False}),
    (("officers", "change", "--threshold", "3"), "approval_roster", {"id": REQUEST, "needed": 2}),
    (("site", "break-glass", "--reason", "r"), "break_glass", {"request": REQUEST, "ends_at": "later"}),
    (("site", "end", "--reason", "r"), "approval_act", {"id": REQUEST, "needed": 2}),
    (("clients", "roles", "app", "--role", "enroller"), "change_client_roles", {"request": REQUEST, "needed": 2}),
]


@pytest.mark.parametrize(("arguments", "call", "answer"), AWAITED, ids=[" ".join(row[0][:2]) for row in AWAITED])
def test_while_officers_are_awaited_every_command_ends_with_75_and_says_where_they_read_it(
    site: CannedSite, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], call: str, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr(clients, "require_running", lambda _: None)
    site.answers[call] = answer
    done = run(site, *arguments)
    assert done.returncode == Exit.TEMPORARY, done.stderr
    assert f"glottis approvals show {REQUEST[:16]}" in done.stdout
    as_json = run(site, *arguments, "--json")
    assert as_json.returncode == Exit.TEMPORARY
    assert REQUEST in json.loads(as_json.stdout).values()


def test_a_new_key_for_a_voice_awaits_officers_too(site: CannedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "_ask", lambda *_, **__: {"request": REQUEST, "voices": []})
    assert run(site, "voices", "rekey", VOICE, "--yes").returncode == Exit.TEMPORARY


def test_too_few_signatures_are_no_refusal() -> None:
    assert BY_CODE["approvals_missing"] is BY_CODE["client_awaits_officers"] is Exit.TEMPORARY


def test_the_set_that_is_in_force_needs_nobody(site: CannedSite) -> None:
    site.answers["policy_propose"] = {"request": None, "needed": 2, "version": 0, "set": "00", "shipped": True}
    done = run(site, "policy", "reset")
    assert (done.returncode, done.stdout) == (Exit.OK, "the set that ships is in force already\n")


def test_cancelling_says_what_was_withdrawn_or_that_nothing_was_there(site: CannedSite) -> None:
    cancel = ("keys", "cancel", "main/1", "--reason", "r")
    site.answers["key_cancel"] = {**VERSION, "changed": True, "scheduled": False, "withdrawn": [REQUEST]}
    assert f"request {REQUEST[:16]} is withdrawn" in run(site, *cancel).stdout
    site.refuse("key_cancel", "nothing_pending")
    assert run(site, *cancel).returncode == Exit.REFUSED


def test_approvals_alone_is_the_inbox(site: CannedSite) -> None:
    site.answers["approvals"] = {"requests": []}
    assert run(site, "approvals").stdout == "nothing waits for officers\n"


def test_whoever_approves_without_a_key_reads_where_keys_lie(site: CannedSite) -> None:
    key = site.settings.officer_dir / "officer-1.pem"
    key.parent.mkdir()
    key.touch()
    done = run(site, "approvals", "approve", REQUEST)
    assert (done.returncode, done.stderr.count(str(key)), site.asked) == (Exit.LOCAL, 1, [])


def test_open_ceremonies_are_listed_without_a_key(site: CannedSite) -> None:
    done = run(site, "keys", "ceremony", "list")
    assert (done.returncode, done.stdout) == (Exit.OK, "no ceremony is open here\n")


# --- clients, voices, the demo


@pytest.mark.parametrize(("origins", "words"), [([], "GLOTTIS_BROWSER_ORIGINS="), (["https://a.example"], "https://a.example")])
def test_an_invitation_says_until_when_and_for_which_pages(
    site: CannedSite, monkeypatch: pytest.MonkeyPatch, origins: list[str], words: str
) -> None:
    monkeypatch.setattr(clients, "require_running", lambda _: None)
    site.answers["invite_browser"] = {"code": "c0de", "expires_at": "2030-01-01T00:00:00+00:00", "origins": origins}
    done = run(site, "clients", "invite", "page")
    assert done.stdout == "c0de\n", "what is piped is the code alone"
    assert "once, until 2030-01-01T00:00:00+00:00" in done.stderr
    assert words in done.stderr


def test_headers_know_every_purpose_and_name_the_option_that_is_missing(site: CannedSite) -> None:
    assert NEEDED.keys() == set(Purpose)
    for purpose, needed in NEEDED.items():
        done = run(site, "headers", "nobody", purpose, "POST", "/v1/any")
        assert done.returncode == Exit.LOCAL
        assert f"--{needed[0]} is needed for {purpose}" in done.stderr if needed else "[part_missing]" in done.stderr
    whole = ("--voice", VOICE, "--text", "Hello.", "--speaker", "app")
    assert "[part_missing]" in run(site, "headers", "nobody", "approve", "POST", "/v1/approvals", *whole).stderr


def test_a_client_s_folder_is_text_or_a_path(tmp_path: Path) -> None:
    for folder in (tmp_path, str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=re.escape("client.json")):
            VoiceClient.from_folder(folder)


def shown(monkeypatch: pytest.MonkeyPatch, site: CannedSite, **row: Any) -> str:
    found = {"voice": VOICE, "tenant": "acme", "stage": "stored", "name": "One", "keys": 1, "sealed_rows": 2, "findings": []}
    monkeypatch.setattr(voices, "_ask", lambda *_, **__: {**found, **row})
    return run(site, "voices", "show", UUID(VOICE)).stdout


@pytest.mark.parametrize("term", VoiceTerm)
def test_a_voice_says_each_term_that_it_has(site: CannedSite, monkeypatch: pytest.MonkeyPatch, term: VoiceTerm) -> None:
    plain = shown(monkeypatch, site, state="active", terms=[], hours=None)
    assert "opens at any time" in plain
    assert "proof by the client's own key" in plain
    said = shown(monkeypatch, site, state="active", terms=[term], hours=None)
    assert len(set(said.splitlines()) - set(plain.splitlines())) == 1


def test_a_voice_says_its_state_and_hours_and_a_row_that_is_not_believed_says_nothing(
    site: CannedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown(monkeypatch, site, state=VoiceState.SUSPENDED, terms=[], hours="mon 08:00-18:00 UTC")
    assert "suspended: it neither speaks nor is compared" in said
    assert "opens mon 08:00-18:00 UTC, and at no other time" in said
    assert "opens" not in shown(monkeypatch, site, state=None, terms=None, hours=None)


def test_where_the_demo_fails_its_folder_is_kept_and_named() -> None:
    said = io.StringIO()
    transcript = Transcript(lambda line: print(line, file=said))
    with demo._state_folder(transcript) as state:
        kept = state.parent
    assert not kept.exists(), "the control"
    with pytest.raises(ValueError, match="a step"), demo._state_folder(transcript) as state:
        raise ValueError("a step")
    assert state.parent.exists()
    assert f"rm -r {state.parent}" in said.getvalue()
    state.parent.rmdir()
