"""`glottis keys rotation`: the token that re-wraps, at a site whose masters are not TRUSTED."""

from __future__ import annotations

import os

import click

from keyvault.errors import KeyStateForbids
from keyvault.hsm import RingMaster
from keyvault.states import KeyState
from keyvault.sync.errors import KeyStillReferenced
from service.ceremony_steps import token_process
from service.cli.asking import confirmed
from service.cli.loading import Listing
from service.cli.output import json_option, say
from service.cli.pins import rotation_option, rotation_pin
from service.cli.versions import MasterType
from service.errors import NoRotationToken
from service.isolation import establish
from service.settings import Settings
from service.site import ROTATION, Site, forget
from service.sync.admin import ask

_TO_SERVE = (KeyState.PRE_ACTIVATION, KeyState.ACTIVE, KeyState.SUSPENDED)


@click.group(cls=Listing)
def rotation() -> None:
    """The token that re-wraps, where masters are not TRUSTED: it holds every version once more, under a PIN of its own.

    Before a version can be destroyed at the sites, each site takes it out of this token.
    """


@rotation.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show the versions that this site's rotation token holds, as far as ceremonies and `destroy` said."""
    held = [master.label for master in _site(Settings.load(os.environ)).tokens[ROTATION].masters]
    say({"versions": held}, held or ["the rotation token holds no master"], as_json=as_json)


@rotation.command()
@click.argument("version", type=MasterType())
@rotation_option
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def destroy(version: str, rotation_pin_file: str | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Destroy VERSION, such as main/1, in this site's rotation token, for good. No key may lie under it any more.

    Voices open as before; keys still under VERSION elsewhere could no longer be moved, so it is refused while there are any, and
    for a version that serves or may come to serve: first `glottis keys deactivate`, or `compromise` for one that never served.
    """
    settings = Settings.load(os.environ)
    _site(settings)
    master = RingMaster.named(version)
    found = ask(settings, "key", master=master.label)
    if found["state"] in _TO_SERVE:
        raise KeyStateForbids(f"{master.label} is {found['state']}: its keys must be movable as long as it serves or may serve")
    if keys := found["keys"]:
        raise KeyStillReferenced(f"{keys} keys at this site are still wrapped under {master.label}")
    if dry_run:
        say({"version": master.label, "changed": False}, [f"{master.label} would go from the rotation token"], as_json=as_json)
        return
    if not yes:
        confirmed(f"Destroy {master.label} in this site's rotation token?")
    isolation, pin = establish(settings.state_dir, settings.site), rotation_pin(settings, rotation_pin_file)
    about = {"ring": master.ring, "version": master.version, "token": ROTATION}
    with token_process(settings, isolation.owner(ROTATION), "remove") as token:
        objects = int(token.ask(**about, user_pin=pin())["objects"])
    forget(settings, isolation, master)
    said = f"{objects} objects of {master.label} are destroyed in the rotation token"
    say({"version": master.label, "changed": objects > 0, "objects": objects}, [said], as_json=as_json)


def _site(settings: Settings) -> Site:
    site = Site.load(settings.site_file)
    if not site.split:
        raise NoRotationToken
    return site
