"""Which key an officer signs with at this console."""

from __future__ import annotations

import os
from pathlib import Path

import click

from service.cli.asking import typed
from service.officers import OfficerKey
from service.settings import Settings
from service.sites import DEVELOPMENT_OFFICERS

key_option = click.option(
    "--key",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Your officer's key file; it is never looked for. A development installation's lie in `officer/` of its state folder.",
)


def officer_key(path: Path | None) -> OfficerKey:
    """The key of this file. Raises UsageError where none is named, and OfficerKeyRefused."""
    if path is None:
        raise click.UsageError(f"Name your officer's key file with --key.{_known_here()}")
    return OfficerKey.load(path, lambda: typed("passphrase of the key file", instead="pipe the passphrase into it"))


def _known_here() -> str:
    folder = Settings.load(os.environ).officer_dir
    known = [folder / f"{name}.pem" for name in DEVELOPMENT_OFFICERS]
    here = [str(path) for path in known if path.exists()]
    return f" This development installation's are {', '.join(here)}." if here else ""
