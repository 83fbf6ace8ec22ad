"""`glottis audit`: bundles for auditors, and the fingerprint that they pin."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

import policies.audit.verify
from policies.audit.export import Range
from service.audit_bundles import export_bundle
from service.cli.main import say_json
from service.settings import Settings
from service.site import Site


@click.group()
def audit() -> None:
    """Export the audit log for somebody who checks it without trusting us."""


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "start", type=click.IntRange(min=0), default=0, show_default=True, help="First entry.")
@click.option("--to", "end", type=click.IntRange(min=0), default=None, help="Entry after the last; default: all that is signed.")
@click.option(
    "--since", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A checkpoint to prove consistency with."
)
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def export(file: Path, start: int, end: int | None, since: Path | None, *, as_json: bool) -> None:
    """Write a bundle: entries as they were hashed, the newest checkpoint, and the proofs.

    It never overwrites a file. Give the auditor the bundle and the verifier (`glottis audit verifier`); the fingerprint
    (`glottis audit fingerprint`) must reach them another way.
    """
    if file.exists():
        raise click.UsageError(f"{file} exists; name another file")
    size = export_bundle(
        Settings.load(os.environ), file, wanted=Range(start, end), since=since.read_text() if since is not None else None
    )
    facts = {"bundle": str(file), "checkpoint_size": size}
    if as_json:
        say_json(facts)
    else:
        click.echo(f"{file}: entries up to {size}, under the newest checkpoint")


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
