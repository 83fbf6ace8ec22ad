"""What a new installation does once: its first master, by the ceremony, and the cluster's first two transactions.

The roster is endorsed, which both HSMs and the development officers sign, and the first master is installed: it is ACTIVE once
both sites have proved to each other that they hold it, and no vault serves before that. Idempotent: a start that was cut off
goes on where it stopped.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from keyvault.approvals import Operation, signed_by
from keyvault.ceremony_messages import Transcript
from keyvault.hsm import DEFAULT_RING, RingMaster
from keyvault.states import KeyState
from keyvault.sync.statement import Proposal
from service import ceremonies, lone_ceremonies
from service.bringup import Installation
from service.errors import CeremonyAwaited, NotRunning, SiteBusy
from service.isolation import establish
from service.officers import read_roster
from service.settings import Settings
from service.site import Site, announce
from service.sites import DEVELOPMENT_OFFICERS, development_officers
from service.sync.admin import ask


def first_master(installation: Installation) -> None:
    """Both development officers make the first master at both sites, unless it is there. Needs no process and no database.

    A ceremony that was cut off is abandoned: its number stays used, and the next one is made.
    """
    settings, second = installation.settings, installation.second
    if settings.sites == 1 and not installation.site.masters:  # else made together with its one token
        lone_ceremonies.first_alone(settings, RingMaster(DEFAULT_RING, 1))
    if second is None or (installation.site.masters and Site.load(second.site_file).masters):
        return
    made = _whole(second) or _whole(settings) or _played(settings, second).plan.master
    for site in (settings, second):
        announce(site, establish(site.state_dir, site.site), made)


def found(installation: Installation, tend: Callable[[], None]) -> None:
    """The cluster's first transactions, once its site processes run; `tend` looks after them meanwhile and takes a moment.

    Does nothing where a ring is active already: the second site may then be away. Raises SiteRefused with what a site refuses.
    """
    settings = installation.settings
    if settings.site != "a" or _active(settings):
        return
    if installation.second is not None:
        while not _answers(installation.second):
            tend()
    asked = ask(settings, "propose_roster")["proposal"]
    if asked is not None:
        proposal = approved(settings, Proposal.decode(base64.b64decode(asked)))
        ask(settings, "transact", proposal=base64.b64encode(proposal.encode()).decode())
    masters = Site.load(settings.site_file).masters
    if not masters:
        raise CeremonyAwaited
    ask(settings, "install", masters=[masters[-1].label])


def approved(settings: Settings, proposal: Proposal) -> Proposal:
    """The development officers' approval: the first requests, the others approve."""
    keys, manifest = development_officers(settings), proposal.manifest
    requester, *others = keys
    ends = datetime.now(UTC) + timedelta(hours=1)
    operation = Operation(manifest.cluster, f"sync.{manifest.op}", manifest.digest, requester, os.urandom(16), ends)
    roles = [(requester, "request"), *((person, "approve") for person in others)]
    approvals = tuple(signed_by(operation, person, role, keys[person]) for person, role in roles)
    return replace(proposal, operation=operation, approvals=approvals)


def _answers(settings: Settings) -> bool:
    try:
        ask(settings, "status", timeout_s=0.5)
    except (NotRunning, SiteBusy):
        return False
    return True


def _active(settings: Settings) -> bool:
    """Whether a master that both sites agreed on serves."""
    return any(version["state"] == KeyState.ACTIVE.value for version in ask(settings, "status")["versions"])


def _played(settings: Settings, second: Settings) -> Transcript:
    roster, keys = read_roster(settings.roster_file), development_officers(settings)
    desks = [
        ceremonies.Desk(site, roster, keys[person], ceremonies.TokenPins.of_development(site))
        for site, person in zip((settings, second), DEVELOPMENT_OFFICERS, strict=False)
    ]
    for desk in desks:
        for story in desk.open_ones():
            desk.abandon(story.plan.master)
    return ceremonies.play(desks[0], desks[1], DEFAULT_RING)


def _whole(settings: Settings) -> RingMaster | None:
    """The master of a ceremony that is whole here; that both sites hold it is what its transcript says."""
    return next((story.plan.master for story in ceremonies.begun(settings) if story.complete), None)
