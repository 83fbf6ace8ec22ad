"""`glottis clients`."""

from __future__ import annotations

import os

import click

from policies.authority import Role
from service import clients as registered
from service.cli.main import say_json
from service.settings import Settings


@click.group()
def clients() -> None:
    """Register clients: who may call, and what for."""


@clients.command()
@click.argument("name")
@click.option("--tenant", default="default", show_default=True, help="Whose voices the client works with.")
@click.option(
    "--role", "roles", type=click.Choice([role.value for role in Role]), multiple=True, required=True, help="May be repeated."
)
@click.option("--replace", is_flag=True, help="Give a client that exists new keys; its old ones end.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def add(name: str, tenant: str, roles: tuple[str, ...], replace: bool, as_json: bool) -> None:
    """Make keys and a certificate for NAME, for development, and register them. Glottis must be running."""
    settings = Settings.load(os.environ)
    folder = registered.add(settings, name, tenant=tenant, roles=[Role(role) for role in roles], replace=replace)
    if as_json:
        say_json({"client": name, "tenant": tenant, "roles": list(roles), "folder": str(folder)})
    else:
        click.echo(f"{name} is registered; its keys are in {folder}")
