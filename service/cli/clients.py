"""`glottis clients`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

import click

from policies.authority import BROWSER_ROLES, ClientState, Role
from policies.one_time import MAX_LIFETIME_S
from policies.quotas import EVERYONE
from service import clients as registered
from service.cli import authorities
from service.cli.asking import confirmed
from service.cli.hours import hours_asked, hours_options, hours_said
from service.cli.loading import Listing
from service.cli.main import say_json
from service.cli.output import json_option, say, say_awaiting
from service.errors import ClientAwaitsOfficers, ClientMissing
from service.settings import Settings

DEFAULT_TENANT = "default"


@click.group(cls=Listing)
def clients() -> None:
    """Register clients: who may call, and what for. Glottis must be running."""


for authority_command in (authorities.trust, authorities.update_crl, authorities.distrust, authorities.list_):
    clients.add_command(authority_command)


@clients.command()
@click.argument("name")
@click.option("--tenant", show_default="default", help="Whose voices the client works with.")
@click.option(
    "--role", "roles", type=click.Choice([role.value for role in Role]), multiple=True, help="May be repeated. Needed once."
)
@click.option("--replace", is_flag=True, help="The same as `rotate`, without --tenant and --role: both stay.")
@click.option("--certificate", type=click.File("rb"), help="A certificate (PEM) that NAME has already, of a trusted authority.")
@click.option("--jkt", help="With --certificate: the RFC 7638 thumbprint of NAME's DPoP key.")
@click.option("--request", metavar="ID", help="Register the keys that waited for officers, as they approved in request ID.")
@json_option
def add(
    name: str,
    tenant: str | None,
    roles: tuple[str, ...],
    replace: bool,
    certificate: BinaryIO | None,
    jkt: str | None,
    request: str | None,
    as_json: bool,
) -> None:
    """Make keys and a certificate for NAME, for development, and register them; or register the certificate that NAME has.

    With --certificate and --jkt no key is made, and none is needed here. The certificate is of Glottis' own authority, or of one
    that `glottis clients trust-ca` took.

    Where the active set of policies marks one of the roles, this asks officers and ends with 75: keys and certificate wait, and
    open nothing. Once they approved: glottis clients add NAME --request ID.
    """
    if request is not None:
        if replace or tenant is not None or roles or certificate or jkt:
            raise click.UsageError("--request registers exactly what officers approved: leave out the other options.")
        _made(name, registered.finish(Settings.load(os.environ), name, request), as_json=as_json)
        return
    if (certificate is None) != (jkt is None) or (certificate is not None and replace):
        raise click.UsageError("--certificate needs --jkt, and goes with no --replace.")
    if replace and (tenant is not None or roles):
        raise click.UsageError("--replace keeps tenant and roles: leave out --tenant and --role.")
    if not replace and not roles:
        raise click.UsageError("Missing option '--role'.")
    settings = Settings.load(os.environ)
    given = DEFAULT_TENANT if tenant is None else tenant
    if certificate is not None and jkt is not None:
        _accepted(name, certificate, jkt, given, roles, as_json=as_json)
        return
    with _awaiting(name, as_json=as_json):
        folder = registered.add(settings, name, tenant=given, roles=[Role(role) for role in roles], replace=replace)
    _made(name, folder, as_json=as_json)


def _made(name: str, folder: Path, *, as_json: bool) -> None:
    if as_json:
        known = json.loads((folder / "client.json").read_text())
        say_json({"client": name, "tenant": known["tenant"], "roles": known["roles"], "folder": str(folder)})
    else:
        click.echo(f"{name} is registered; its keys are in {folder}")


@clients.command()
@click.argument("name")
@click.option("--certificate", type=click.File("rb"), required=True, help="The client's certificate (PEM).")
@click.option("--jkt", required=True, help="RFC 7638 thumbprint of its DPoP key.")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Whose voices the client works with.")
@click.option(
    "--role", "roles", type=click.Choice([role.value for role in Role]), multiple=True, required=True, help="May be repeated."
)
@json_option
def accept(name: str, certificate: BinaryIO, jkt: str, tenant: str, roles: tuple[str, ...], as_json: bool) -> None:
    """Register NAME by a certificate that it has, of an authority that is trusted here (`trust-ca`). The other site hears of it."""
    _accepted(name, certificate, jkt, tenant, roles, as_json=as_json)


def _accepted(name: str, certificate: BinaryIO, jkt: str, tenant: str, roles: Sequence[str], *, as_json: bool) -> None:
    named = [Role(role) for role in roles]
    with _awaiting(name, as_json=as_json):
        row = registered.accept(Settings.load(os.environ), name, certificate.read(), tenant=tenant, roles=named, jkt=jkt)
    say(row, [f"{name} is registered"], as_json=as_json)


@clients.command("roles")
@click.argument("name")
@click.option(
    "--role", "roles", type=click.Choice([role.value for role in Role]), multiple=True, required=True, help="May be repeated."
)
@json_option
def roles_(name: str, roles: tuple[str, ...], as_json: bool) -> None:
    """Give NAME exactly these roles; they hold from its next request on, at every worker.

    A role that officers marked and that NAME does not have yet asks them first: give the same command again once they approved.
    """
    with _awaiting(name, as_json=as_json):
        row = registered.change_roles(Settings.load(os.environ), name, [Role(role) for role in roles])
    say(row, [f"{name} has the roles {', '.join(row['roles'])}"], as_json=as_json)


@clients.command()
@click.argument("name")
@click.option("--request", metavar="ID", help="Register the keys that waited for officers, as they approved in request ID.")
@json_option
def rotate(name: str, request: str | None, as_json: bool) -> None:
    """Give NAME new keys, for development; the old ones end with its next request. Tenant and roles stay."""
    with _awaiting(name, as_json=as_json):
        settings = Settings.load(os.environ)
        folder = registered.finish(settings, name, request) if request else registered.rotate(settings, name)
    if as_json:
        say_json({"client": name, "folder": str(folder)})
    else:
        click.echo(f"{name} has new keys in {folder}; the old ones are refused from now on")


@clients.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def revoke(name: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """End NAME for good: every worker refuses its next request, also with a token in hand. A revoked name stays taken."""
    settings = Settings.load(os.environ)
    if dry_run:
        found = next((client for client in registered.listed(settings) if client["client"] == name), None)
        if found is None:
            raise ClientMissing(f"there is no client {name}")
        found |= {"changed": False, "would_change": found["state"] == ClientState.ACTIVE.value}
        say(found, [f"{name} would be revoked" if found["would_change"] else f"{name} was revoked before"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Revoke {name}? This cannot be undone.")
    done = registered.revoke(settings, name)
    say(done, [f"{name} is revoked" if done["changed"] else f"{name} was revoked before"], as_json=as_json)


@clients.command()
@click.argument("name")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Whose voices the browser works with.")
@click.option(
    "--role",
    "roles",
    type=click.Choice([role.value for role in BROWSER_ROLES]),
    multiple=True,
    default=[Role.READER.value],
    show_default=True,
    help="May be repeated.",
)
@click.option("--voice", type=click.UUID, help="The one voice that the browser may read, and speak with if it is a speaker.")
@click.option("--minutes", type=click.IntRange(1, MAX_LIFETIME_S // 60), default=MAX_LIFETIME_S // 60, show_default=True)
@json_option
def invite(name: str, tenant: str, roles: tuple[str, ...], voice: UUID | None, minutes: int, as_json: bool) -> None:
    """Make a one-time code with which one browser registers a key of its own, and is the client NAME from then on.

    The page makes the key (WebCrypto, not extractable) and sends the code with a proof to POST /v1/browser-keys. The code is shown
    once, on standard output, and works once. Only pages of the origins in GLOTTIS_BROWSER_ORIGINS may use it, which is read when
    `glottis up` starts; any other page is answered certificate_required. To end it: glottis clients revoke NAME.
    """
    named = [Role(role) for role in roles]
    made = registered.invite(Settings.load(os.environ), name, tenant=tenant, roles=named, voice=voice, lifetime_s=60 * minutes)
    say({"client": name, "tenant": tenant, "roles": list(roles), **made}, [made["code"]], as_json=as_json)
    click.echo(f"it works once, until {made['expires_at']}, for pages of {', '.join(made['origins']) or 'no origin'}", err=True)
    if not made["origins"]:
        click.echo("to let a page use it: GLOTTIS_BROWSER_ORIGINS=https://the.page's.origin glottis up", err=True)


@clients.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the clients as JSON.")
def list_(as_json: bool) -> None:
    """Show who is registered: name, tenant, state, roles. Each row's MAC is checked; the reading is recorded."""
    found = registered.listed(Settings.load(os.environ))
    if as_json:
        say_json({"clients": found})
    elif not found:
        click.echo("no client is registered; glottis clients add NAME --role ROLE makes one")
    else:
        for line in _table(found):
            click.echo(line)


@clients.command()
@click.argument("name")
@click.option("--voice", is_flag=True, help="NAME is a voice's id, and not a client's name.")
@click.option("--requests", type=click.IntRange(0, 10**12), help="Requests a minute; a token and its use are one each.")
@click.option("--characters", type=click.IntRange(0, 10**12), help="Characters of speech a day.")
@click.option("--seconds", type=click.IntRange(0, 10**12), help="Seconds of speech a day.")
@click.option("--attempts", type=click.IntRange(0, 10**12), help="Failed attempts a minute; counted for clients alone.")
@json_option
def quota(name: str, voice: bool, as_json: bool, **limits: int | None) -> None:
    """Show how much NAME may use, or set it: what is not given stays as it is. '*' is every client (or voice) without an own quota.

    A request beyond a minute's limit is refused as rate_limited, one beyond a day's as quota_exhausted, with the time to wait.
    Minutes and days are counted in UTC, once over all workers.
    """
    changes = {limit: value for limit, value in limits.items() if value is not None} or None
    found = registered.quota(Settings.load(os.environ), name, voice=voice, changes=changes)
    whose = "every other voice" if voice else "every other client"
    minute, day = f"{found['requests']} requests", f"{found['characters']} characters and {found['seconds']} seconds of speech"
    failing = "" if voice else f" and {found['attempts']} failed attempts"
    sentence = f"{whose if name == EVERYONE else name} may use {minute}{failing} a minute, {day} a day"
    say({"name": name, "scope": "voice" if voice else "client", **found}, [sentence], as_json=as_json)


@clients.command("hours")
@click.argument("name")
@hours_options
@json_option
def hours_(name: str, as_json: bool, **said: Any) -> None:
    """Show in which hours NAME may call, or set them: --days mon-fri --from 08:00 --to 18:00 --zone Europe/Zurich.

    It holds from its next request on, at every worker: outside them it is 403 outside_hours. A span whose end is before its
    beginning ends the day after. Times are those of a clock on the wall in the zone.
    """
    change, hours = hours_asked(**said)
    row = registered.limit(Settings.load(os.environ), name, change=change, hours=hours)
    say(row, [f"{name} may call {hours_said(row['hours'])}"], as_json=as_json)


@contextmanager
def _awaiting(name: str, *, as_json: bool) -> Iterator[None]:
    """Say which request waits for officers, where one does, and end with 75."""
    try:
        yield
    except ClientAwaitsOfficers as waits:
        facts = {"client": name, "request": waits.request, "needed": waits.needed}
        lines = ["one of the roles is marked as needing officers"]
        say_awaiting(facts, lines, waits.request, waits.needed, as_json=as_json)


def _table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(client["client"], client["tenant"], client["state"], " ".join(client["roles"])) for client in found]
    widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
    return ["  ".join([*(str(row[column]).ljust(widths[column]) for column in range(3)), str(row[3])]) for row in rows]
