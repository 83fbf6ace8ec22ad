"""`glottis`: one command a file. An error is one message and one line that says what to do, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from service.cli.loading import loading
from service.errors import own_code, words
from service.exits import Exit, exit_for

COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("service.cli.up", "Start everything and keep it running; Ctrl-C stops it."),
    "doctor": ("service.cli.doctor", "Check every part and say how to mend what fails."),
    "clients": ("service.cli.clients", "Register, list, rotate and revoke clients."),
    "keys": ("service.cli.keys", "Master keys: ceremony, rotation, re-wrap, states, destruction, schedules."),
    "voices": ("service.cli.voices", "List voices, erase them, give them new keys, certify an erasure."),
    "policy": ("service.cli.policy", "Check, test, explain and show the policies."),
    "headers": ("service.cli.headers", "Fetch a token for one request and print its headers, for curl."),
    "audit": ("service.cli.audit", "Check the audit log, and export it for auditors."),
    "site": ("service.cli.site", "See both sites, compare them, and repair or resume what is open between them."),
    "verify": ("service.cli.verify", "Check the two sites' history offline, with public keys alone."),
    "approvals": ("service.cli.approvals", "See what needs officers' approval, and approve it with your own key."),
    "officers": ("service.cli.officers", "Make an officer's key; see or change whom the roster names."),
    "backup": ("service.cli.backup", "Back this site up: database, token files, roster, transcripts."),
    "restore": ("service.cli.backup", "Put a site back from a backup, and adopt what is older than the token."),
    "demo": ("service.cli.demo", "Run the main job on real speech, with attacks that are refused."),
}
"""Name, module (whose attribute of that name is the command), and what `--help` says."""


@click.group(cls=loading(COMMANDS), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="glottis", message="glottis %(version)s")
def cli() -> None:
    """Glottis: voiceprints under hardware keys, and speech that proves it may.

    Settings are GLOTTIS_ variables, each with a working default (docs/settings.md). Exit codes: 0 ok, 1 usage or this machine,
    2 HSM, 3 integrity, 4 refused, 5 partial, 6 conflict, 75 not yet: officers are awaited, or something is away.
    """


def main() -> None:
    """Entry point of the program."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # `doctor` and `demo` load models too
    try:
        _require_text(sys.argv[1:])
        code = cli.main(prog_name="glottis", standalone_mode=False)
    except click.exceptions.Abort:
        code = 128 + 2
    except KeyboardInterrupt:
        code = 128 + 2
    except click.ClickException as error:
        error.show()
        code = int(Exit.LOCAL)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = int(Exit.LOCAL)
    except Exception as error:  # noqa: BLE001 — the last door: whatever it is, the user reads one message
        code = _report(error)
    sys.exit(code if isinstance(code, int) else int(Exit.OK))


def _require_text(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument whose bytes are no text in this locale: nothing could store or print it."""
    for number, argument in enumerate(arguments, 1):
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise click.UsageError(f"argument {number} is not text in this terminal's encoding: {argument!a}")


def say_json(facts: Mapping[str, Any]) -> None:
    """Print facts as one JSON object."""
    click.echo(json.dumps(facts, indent=2, sort_keys=False))


def _report(error: Exception) -> Exit:
    """One message and one mend on standard error."""
    if code := own_code(error):
        # A step or process that failed counts as what ended it.
        click.echo(f"glottis: {error} [{getattr(error, 'cause', code)}]", err=True)
        mend = getattr(error, "mend", None) or getattr(error, "fix", None)
        if mend:
            click.echo(f"  To mend it: {mend}", err=True)
        return exit_for(error)
    if isinstance(error, OSError) and error.filename:
        click.echo(f"glottis: {error.filename}: {error.strerror}", err=True)
        click.echo("  To mend it: name a file or folder that exists and that you may use.", err=True)
        return Exit.LOCAL
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
    said = words(error).removeprefix(type(error).__name__)
    click.echo(f"glottis: unexpected {type(error).__name__} in {where}{said}", err=True)
    click.echo("  To mend it: run `glottis doctor`; if it finds nothing, report this line.", err=True)
    return Exit.LOCAL


if __name__ == "__main__":
    main()
