"""`glottis audit`: the check of its records, bundles for auditors, and the fingerprint that they pin."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

import policies.audit.verify
from policies.audit.export import Range
from service.audit_bundles import check_records, export_bundle
from service.cli.exits import Ended, Exit
from service.cli.main import say_json
from service.errors import RecordsTampered
from service.settings import Settings
from service.site import Site


@click.group()
def audit() -> None:
    """Check the audit log, and export it for somebody who checks it without trusting us."""


@audit.command()
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def check(*, as_json: bool) -> None:
    """Check with the serving token that a vault wrote every record, that none is missing, and that the log holds them so.

    Ends with 3 and names the row if one was added, changed or deleted in the database.
    """
    try:
        rows = check_records(Settings.load(os.environ))
    except RecordsTampered as found:
        if not as_json:
            raise
        say_json({"holds": False, "code": found.code, "said": str(found)})
        raise Ended(Exit.INTEGRITY) from None
    if as_json:
        say_json({"holds": True, "records": rows})
    else:
        click.echo(f"{rows} records: all hold")


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "start", type=click.IntRange(min=0), default=0, show_default=True, help="First entry.")
@click.option("--to", "end", type=click.IntRange(min=0), default=None, help="Entry after the last; default: all that is signed.")
@click.option(
    "--since", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A checkpoint to prove consistency with."
)
@click.option("--unchecked", is_flag=True, help="Export records that `glottis audit check` does not vouch for.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def export(file: Path, start: int, end: int | None, since: Path | None, *, unchecked: bool, as_json: bool) -> None:
    """Write a bundle: entries as they were hashed, the newest checkpoint, and the proofs.

    First it checks the records (`glottis audit check`) and ends with 3 if one does not hold; --unchecked exports them as they
    are, as evidence. It never overwrites a file.

    Give the auditor the bundle and the verifier (`glottis audit verifier`); the fingerprint
    (`glottis audit fingerprint`) must reach them another way.
    """
    if os.path.lexists(file):
        raise click.UsageError(f"{file} exists; name another file")
    settings, kept = Settings.load(os.environ), None if since is None else _text(since)
    if not unchecked:
        check_records(settings)
    size = export_bundle(settings, file, wanted=Range(start, end), since=kept)
    facts = {"bundle": str(file), "checkpoint_size": size, "checked": not unchecked}
    if as_json:
        say_json(facts)
    else:
        click.echo(f"{file}: entries up to {size}, under the newest checkpoint")


def _text(checkpoint: Path) -> str:
    try:
        return checkpoint.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.UsageError(f"--since: {checkpoint} is not a checkpoint: a signed note is text") from None


@audit.command()
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def fingerprint(*, as_json: bool) -> None:
    """The fingerprint of the key that signs this log: what an auditor pins, once, from a source they trust."""
    site = Site.load(Settings.load(os.environ).site_file)
    facts = {"origin": site.origin, "key": str(site.audit_key), "fingerprint": site.audit_key.fingerprint}
    if as_json:
        say_json(facts)
    else:
        click.echo(site.audit_key.fingerprint)


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def verifier(file: Path) -> None:
    """Write the stand-alone verifier: one Python file that needs nothing but Python.

    Use: python3 FILE BUNDLE --fingerprint HEX
    """
    if file.exists():
        raise click.UsageError(f"{file} exists; name another file")
    shutil.copyfile(policies.audit.verify.__file__, file)
    click.echo(f"python3 {file} BUNDLE --fingerprint HEX")
