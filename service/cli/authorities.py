"""`glottis clients trust-ca`, `distrust-ca` and `list-cas`: customers' own authorities."""

from __future__ import annotations

import os
from typing import BinaryIO

import click

from service import authorities
from service.cli.asking import confirmed
from service.cli.output import json_option, say
from service.settings import Settings


@click.command("trust-ca")
@click.argument("certificate", type=click.File("rb"))
@click.option("--name", required=True, help="What to call it here.")
@json_option
def trust(certificate: BinaryIO, name: str, as_json: bool) -> None:
    """Take clients' certificates that this authority issued (CERTIFICATE, PEM), beside those of Glottis' own.

    It counts from the next connection on, at every edge worker. It gives nobody a right: each client's own certificate is
    registered with `glottis clients add NAME --certificate FILE`. Compare the fingerprint that this prints with the customer's.
    A proxy that ends TLS before Glottis has a list of its own.
    """
    found = authorities.trust(Settings.load(os.environ), name, certificate.read())
    say(found, [f"{name} is trusted: {found['subject']}", f"  SHA-256 {found['sha256']}"], as_json=as_json)


@click.command("distrust-ca")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@json_option
def distrust(name: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Take no certificate of the authority NAME any more. Its clients' rows stay: `glottis clients revoke` ends those.

    It counts from the next connection on; a connection that is open goes on until it ends.
    """
    settings = Settings.load(os.environ)
    if dry_run:
        known = [one for one in authorities.listed(settings) if one["name"] == name]
        found = {"name": name, "changed": False, "would_change": bool(known)}
        say(found, [f"{name} would no longer be trusted" if known else f"there is no authority {name}"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Trust {name} no longer?")
    found = authorities.distrust(settings, name)
    say(found, [f"{name} is no longer trusted"], as_json=as_json)


@click.command("list-cas")
@json_option
def list_(as_json: bool) -> None:
    """Show which authorities are trusted beside Glottis' own: name, subject, end, fingerprint."""
    found = authorities.listed(Settings.load(os.environ))
    lines = [f"{one['name']}  {one['subject']}  until {one['not_after'][:10]}  SHA-256 {one['sha256']}" for one in found]
    say({"authorities": found}, lines or ["no authority but Glottis' own is trusted"], as_json=as_json)
