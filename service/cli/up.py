"""`glottis up`."""

from __future__ import annotations

import os
import time

import click

from service.programs import running
from service.settings import Settings
from service.supervisor import Stopped


@click.command()
def up() -> None:
    """Start database, vault, log and edge, and keep them running until Ctrl-C.

    The first start makes the state folder: tokens, keys, certificates, database. A start that was cut off is taken up again.
    """
    began = time.monotonic()
    settings = Settings.load(os.environ)
    click.echo(f"starting in {settings.state_dir}")
    try:
        with running(settings, click.echo) as supervisor:
            where = (
                f"{settings.public_base_url} on {settings.bind}:{settings.port}" if settings.serves else f"as site {settings.site}"
            )
            click.echo(f"serving {where} after {time.monotonic() - began:.1f} s")
            supervisor.watch()
            click.echo("stopping")
    except Stopped:
        click.echo("stopped during the start; what was made is kept")
    else:
        click.echo("stopped")
