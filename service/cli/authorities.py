"""`glottis clients trust-ca`, `distrust-ca` and `list-cas`: customers' own authorities."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import click

from service import authorities
from service.cli.asking import confirmed
from service.cli.output import json_option, say
from service.settings import Settings


@click.command("trust-ca")
@click.argument("certificate", type=click.File("rb"))
@click.option("--name", required=True, help="What to call it here.")
@click.option("--crl", type=click.File("rb"), help="Its list of revoked certificates (PEM).")
@click.option("--require-crl", is_flag=True, help="Take its certificates only while there is a current list.")
@json_option
def trust(certificate: BinaryIO, name: str, crl: BinaryIO | None, require_crl: bool, as_json: bool) -> None:
    """Take clients' certificates that this authority issued (CERTIFICATE, PEM), beside those of Glottis' own.

    It counts from the next connection on, at every edge worker. It gives nobody a right: each client's own certificate is
    registered with `glottis clients add NAME --certificate FILE`. Compare the fingerprint that this prints with the customer's.
    A file of several certificates is the issuing one and those above it; each of them is trusted to issue. A proxy that ends TLS
    before Glottis has a list of its own.
    """
    given = None if crl is None else crl.read()
    found = authorities.trust(Settings.load(os.environ), name, certificate.read(), crl=given, require_crl=require_crl)
    lines = [f"{name} is trusted: {found['subject']}", *(f"  SHA-256 {one}" for one in (found["sha256"], *found["above"]))]
    say(found, [*lines, *_crl_said(found)], as_json=as_json)


@click.command("update-crl")
@click.argument("name")
@click.argument("crl", type=click.File("rb"))
@json_option
def update_crl(name: str, crl: BinaryIO, as_json: bool) -> None:
    """Put the newest list of revoked certificates (CRL, PEM) of the authority NAME in place.

    It counts from the next request on, at every edge worker, also on connections that are open. A list that the authority did not
    sign, or an older one, is refused. Glottis fetches none by itself: have this run as often as the authority gives one out.
    """
    found = authorities.update_crl(Settings.load(os.environ), name, crl.read())
    say(found, [f"{name} has its newest list of revoked certificates", *_crl_said(found)], as_json=as_json)


def _crl_said(found: Mapping[str, Any]) -> list[str]:
    """Until when the list of revoked certificates holds, and what follows then."""
    if found["crl_until"] is None:
        return ["  revoked certificates: no list, so none of its certificates is taken"] if found["crl_required"] else []
    then = "then none of its certificates is taken" if found["crl_required"] else "its entries count after that too"
    return [f"  revoked certificates: list until {found['crl_until'][:16]} UTC; {then}"]


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
    lines = []
    for one in found:
        lines += [f"{one['name']}  {one['subject']}  until {one['not_after'][:10]}  SHA-256 {one['sha256']}", *_crl_said(one)]
    say({"authorities": found}, lines or ["no authority but Glottis' own is trusted"], as_json=as_json)
