"""What a site does by itself, and how each turn of it goes."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import structlog

from keyvault.key_uses import Place, acting
from keyvault.records import RecordMac
from keyvault.sync.errors import PeerUnavailable
from keyvault.sync.pruning import FIRST, Pruning
from keyvault.sync.store import lasting
from keyvault.tombstones import Tombstones
from service.sync.assembly import SiteService
from service.sync.work import COMPARE_S, PUMP_S, Task

REFUSED_S = 5.0
"""How long rows that were refused wait before they are offered again: somebody has to mend them first."""

DUE_S = 2.0
"""How often destructions and schedules are looked at: what officers approved is done at once."""
SHRED_S = 15.0
"""How often it is looked up which erased voices no old copy opens any more."""

COSIGN_S = 10.0
"""How often the other site is shown the newest checkpoint of this site's log."""
PRUNE_S, PRUNED_S = 60.0, 3600.0
"""How often receipts are looked through for those that later ones replaced, page by page, and how long after the last page."""

_log = structlog.get_logger()


def tasks(site: SiteService) -> list[Task]:
    """The tasks of this site. With one site nothing is sent; what a crash left open is finished all the same."""
    keys, signers = site.keys(), site.signers()

    def due() -> float:
        keys.turn()
        return DUE_S

    @acting(Place.SITE_SIGNERS)
    def signing() -> float:
        signers.turn()
        return DUE_S

    own = [Task("due", due), Task("signers", signing), Task("shred", _Shredding(site).turn)]
    always = [Task("compare", _Comparing(site).turn), *own]
    if not site.peer:
        return always
    cosigning = site.cosigning(site.peer)

    def cosign() -> float:
        cosigning.turn()
        return COSIGN_S

    theirs = (("send", _Sending(site).turn), ("tell", _Telling(site).turn), ("prune", _Pruning(site).turn), ("cosign", cosign))
    return [*always, *(Task(name, turn) for name, turn in theirs)]


class _Sending:
    """Ships what the other site has not signed for."""

    def __init__(self, site: SiteService) -> None:
        self._site = site
        self._refused: Mapping[UUID, str] = {}

    def turn(self) -> float:
        pumped = self._site.batches.pump()
        if pumped.refused != self._refused:
            _log.warning("keys_refused", rows={str(row): code for row, code in pumped.refused.items()})
            self._refused = dict(pumped.refused)
        return REFUSED_S if pumped.refused else PUMP_S


class _Telling:
    """Tells the other site who may no longer call, or was registered, and what was withdrawn or suspended."""

    def __init__(self, site: SiteService) -> None:
        self._site = site
        self._refused: Mapping[str, str] = {}

    def turn(self) -> float:
        told = self._site.rows.send()
        if told.refused != self._refused:
            _log.warning("rows_refused", rows=told.refused)
            self._refused = dict(told.refused)
        return REFUSED_S if told.refused else PUMP_S


class _Pruning:
    """Lets go of receipts that later ones replaced, a page at a time."""

    def __init__(self, site: SiteService) -> None:
        self._pruning = Pruning(site.node.parts)
        self._after = FIRST

    def turn(self) -> float:
        found = self._pruning.prune(self._after)
        if found.tampered:
            _log.warning("receipts_tampered", batches=[str(batch) for batch in found.tampered])
        self._after = found.after or FIRST
        return PRUNE_S if found.after else PRUNED_S


class _Shredding:
    """Finds which erased voices no old copy opens any more, once ring versions are destroyed."""

    def __init__(self, site: SiteService) -> None:
        self._site = site
        self._tampered: tuple[UUID, ...] = ()

    def turn(self) -> float:
        parts = self._site.node.parts
        with lasting(parts.database) as transaction:
            found = Tombstones(RecordMac(parts.hsm), parts.recorder).shred_due(transaction, now=parts.clock())
        if found.tampered != self._tampered:
            _log.warning("tombstones_tampered", voices=[str(voice) for voice in found.tampered])
            self._tampered = found.tampered
        return SHRED_S


class _Comparing:
    """Lets both sites hear each other, finishes what is open, and after every start or gap takes what this site lacks."""

    def __init__(self, site: SiteService) -> None:
        self._site = site
        self._level = False

    def turn(self) -> float:
        try:
            if self._due():
                with self._site.driving:
                    self._site.coordinator.resume()
            if not self._level:
                self._site.batches.reconcile()
                self._site.rows.reconcile()
                self._level = True
        except PeerUnavailable:
            self._level = False
            raise
        return COMPARE_S

    def _due(self) -> bool:
        """Both hear each other in one exchange, so the second site begins one only when the first has not for a while."""
        age = self._site.coordinator.age()
        first = self._site.node.ledger.roster.names[0] == self._site.node.name
        return first or not self._level or age is None or age > 2 * COMPARE_S
