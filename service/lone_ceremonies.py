"""Ceremonies that one installation plays alone, with officers and PINs of its own: for development, and for a cluster of one."""

from __future__ import annotations

from collections.abc import Mapping

from keyvault.hsm import RingMaster
from keyvault.sync.roster import Roster
from service.ceremonies import OAEP, Desk, TokenPins, play
from service.ceremony_steps import token_process
from service.isolation import establish
from service.officers import OfficerKey
from service.settings import Settings
from service.site import ROTATION, Site, announce


def rehearse(settings: Settings, roster: Roster, keys: Mapping[str, OfficerKey], ring: str) -> RingMaster:
    """The next version of `ring`, made by the development installation's own officers and PINs at every site it has here."""
    if roster.development:
        return _made_alone(settings, ring)
    second = settings.of_site_b()
    desks = [
        Desk(site, roster, key, TokenPins.of_development(site))
        for site, key in zip((settings, second), keys.values(), strict=False)
    ]
    return play(desks[0], desks[1], ring, announced=True).plan.master


def _made_alone(settings: Settings, ring: str) -> RingMaster:
    pins, isolation = TokenPins.of_development(settings), establish(settings.state_dir, settings.site)
    with token_process(settings, isolation.vault, "versions") as token:
        held = token.ask(ring=ring, user_pin=pins.user())["versions"]
    serving = [master.version for master in Site.load(settings.site_file).masters if master.ring == ring]
    master = RingMaster(ring, 1 + max([0, *held, *serving]))
    announce(settings, isolation, master)
    make_alone(settings, pins, master)
    return master


def first_alone(settings: Settings, master: RingMaster) -> None:
    """The first master of one site that holds each in two tokens. What a start that was cut off left of it was never used."""
    isolation, pins = establish(settings.state_dir, settings.site), TokenPins.of_development(settings)
    for name in ("serving", ROTATION):
        with token_process(settings, isolation.owner(name), "remove") as token:
            token.ask(ring=master.ring, version=master.version, user_pin=pins.of(name, split=True)["user_pin"], token=name)
    make_alone(settings, pins, master)
    announce(settings, isolation, master)


def make_alone(settings: Settings, pins: TokenPins, master: RingMaster) -> None:
    """Make a master in a cluster of one site: it is carried to its own rotation token at most. Raises StepFailed."""
    isolation, about = establish(settings.state_dir, settings.site), {"ring": master.ring, "version": master.version}
    split = Site.load(settings.site_file).split
    serving = pins.of("serving", split=split)
    if not split:
        with token_process(settings, isolation.vault, "make") as token:
            token.ask(**about, **serving)
        return
    with token_process(settings, isolation.owner(ROTATION), "receive") as rotation:
        said = rotation.ask(**about, **pins.of(ROTATION, split=split), token=ROTATION, oaep=OAEP)
        with token_process(settings, isolation.vault, "send") as token:
            made = token.ask(**about, **serving, transport=said["transport"], oaep=OAEP)
        rotation.ask(wrapped=made["wrapped"])
