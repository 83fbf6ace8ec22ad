"""`glottis keys signer`: versions of the keys that sign, with an overlap in which two of them are accepted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from keyvault.hsm import ROTATING
from keyvault.signing.versions import LEAST_OVERLAP, OVERLAP, SignerState
from service import step
from service.cli.asking import confirmed
from service.cli.loading import Listing
from service.cli.output import json_option, say
from service.isolation import establish
from service.settings import Settings
from service.sync.admin import SiteRefused, ask

_dry = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")


class VersionType(click.ParamType[tuple[str, int]]):
    """`token-signer/2`."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        name, _, number = str(value).partition("/")
        if name not in {one.value for one in ROTATING} or not number.isdecimal() or int(number) < 1:
            self.fail(f"{value!r} is no version of a signing key; one is written like token-signer/2", param, ctx)
        return name, int(number)


@click.group(cls=Listing)
def signer() -> None:
    """Keys that sign: access tokens (token-signer), receipts (provenance-signer), the audit log. Each site has its own.

    A version is written like token-signer/2. The next one is published before it signs, and the one before is accepted for the
    same time after; then it is destroyed in the token by itself. Nothing is restarted.
    """


@signer.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show every version, what it does now, and until when."""
    found = ask(Settings.load(os.environ), "signers")
    lost = "is in the token and in no row: it never signs, and the next rotation destroys it"
    unknown = [f"{label} {lost}" for label in found["unknown"]]
    say(found, [*(_line(one) for one in found["signers"]), *unknown], as_json=as_json)


@signer.command()
@click.argument("name", type=click.Choice([one.value for one in ROTATING]), default=ROTATING[0].value)
@click.option(
    "--overlap-seconds",
    type=click.FloatRange(min=LEAST_OVERLAP.total_seconds()),
    default=OVERLAP.total_seconds(),
    show_default=True,
    help="How long the next version is published before it signs, and the one before is accepted after.",
)
@_dry
@_yes
@json_option
def rotate(name: str, overlap_seconds: float, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Make the next version of NAME in the token and publish it; it begins to sign by itself.

    The default leaves copies of the published keys time to follow. Where a key may be known to others, name the least overlap, and
    `keys signer retire` the old version as soon as it lets you. Ends with 6 while a version is on its way already.
    """
    settings = Settings.load(os.environ)
    serving = [one for one in ask(settings, "signers")["signers"] if one["name"] == name and _accepted(one)]
    now = " and ".join(f"{one['name']}/{one['version']} ({one['state']})" for one in serving) or "none"
    if dry_run:
        said = f"accepted now: {now}; a next version would be published, and would sign {overlap_seconds:g} seconds later"
        say({"changed": False, "accepted": serving, "overlap_seconds": overlap_seconds}, [said], as_json=as_json)
        return
    if not yes:
        confirmed(f"Make the next version of {name}?")
    done = ask(settings, "signer_rotate", name=name, overlap_seconds=overlap_seconds)
    say({"changed": True, **done}, [_line(done)], as_json=as_json)


@signer.command()
@click.argument("version", type=VersionType())
@_dry
@_yes
@json_option
def retire(version: tuple[str, int], dry_run: bool, yes: bool, as_json: bool) -> None:
    """End the overlap of VERSION now: nothing that it signed is accepted any more, and it is destroyed in the token.

    Refused (4) for the version that signs, and until the one after it has signed for longer than a token lives.
    """
    settings = Settings.load(os.environ)
    name, number = version
    found = [one for one in ask(settings, "signers")["signers"] if (one["name"], one["version"]) == version]
    if not found:
        raise SiteRefused("key_version_not_found", f"there is no {name}/{number}", "See `glottis keys signer list`.")
    if dry_run:
        say({"changed": False, **found[0]}, [f"{_line(found[0])}; it would be destroyed"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Destroy {name}/{number}? Nothing that it signed is accepted afterwards.")
    done = ask(settings, "signer_retire", name=name, version=number)
    changed = found[0]["state"] != SignerState.DESTROYED.value
    say({"changed": changed, **done}, [_line(done)], as_json=as_json)


@signer.command("hand-over")
@_dry
@_yes
@json_option
def hand_over(dry_run: bool, yes: bool, as_json: bool) -> None:
    """Give the audit log another checkpoint key. Auditors go on with the fingerprint that they have.

    The next key is made in the log's token. The running log signs with the old one that the new one follows, writes that into every
    checkpoint from then on, and destroys the old one in the token. Whoever has the state folder of the log's user can do this.
    """
    settings = Settings.load(os.environ)
    if dry_run:
        said = "the log's next checkpoint key would be made, and the one that signs now destroyed"
        say({"changed": False}, [said], as_json=as_json)
        return
    if not yes:
        confirmed("Make the log's next checkpoint key, and destroy the one that signs now?")
    done = step.call(settings, establish(settings.state_dir, settings.site).log, "make_checkpoint_key")
    said = f"checkpoint-signer/{done['version']} is made: the running log takes it up within seconds"
    say({"changed": True, **done}, [said], as_json=as_json)


def _accepted(one: Mapping[str, Any]) -> bool:
    return one["state"] in (SignerState.NEXT.value, SignerState.SIGNING.value, SignerState.OVERLAPPING.value)


def _line(one: Mapping[str, Any]) -> str:
    until = {
        SignerState.NEXT.value: f"signs from {one['signs_at']}",
        SignerState.SIGNING.value: f"signs since {one['signs_at']}",
        SignerState.OVERLAPPING.value: f"accepted until {one['retires_at']}",
        SignerState.RETIRED.value: f"accepted until {one['retires_at']}; about to be destroyed",
        SignerState.DESTROYED.value: f"destroyed at {one['destroyed_at']}",
    }[one["state"]]
    lost = "" if one["held_here"] or one["state"] == SignerState.DESTROYED.value else "; NOT IN this site's token"
    return f"{one['name']}/{one['version']}  {one['state']}  {until}  kid {one['kid']}{lost}"
