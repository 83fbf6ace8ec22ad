"""What the workers read: each ring version's row follows what the sites agreed on, and is stricter where this site knows worse."""

from __future__ import annotations

from datetime import datetime

from keyvault.database import Transaction
from keyvault.hsm import RingMaster
from keyvault.records import RingVersion
from keyvault.rings import Rings
from keyvault.states import KeyState
from keyvault.sync.state import SiteState

QUARANTINED = "quarantined: the sites disagree about it, so it opens and wraps nothing new"
VOIDED = "its transaction came to nothing; the number stays used"
WAITING = "waits until both sites have proved that they hold it"


class Mirror:
    """The rows of ring versions in one transaction, as the workers will read them."""

    def __init__(self, rings: Rings, transaction: Transaction, now: datetime) -> None:
        self._rings, self._transaction, self._now = rings, transaction, now
        self._rows: dict[RingMaster, RingVersion] | None = None

    def write(self, name: str, state: KeyState, reason: str | None) -> bool:
        """This version's row gets this state; `reason` None keeps the one that stands. Whether that changed anything."""
        master, known = RingMaster.named(name), self._known()
        old = known.get(master)
        known[master] = self._rings.mirror_row(self._transaction, old, master, state, self._now, reason=reason)
        return known[master] != old

    def follow(self, after: SiteState, name: str) -> None:
        """The row of an agreed version: its state, or while it is in quarantine something stricter."""
        agreed = next(record.state for record in after.ledger.records if record.name == name)
        known = self._known().get(RingMaster.named(name))
        reason = None if known and known.state is agreed else _reason(after)
        if name in after.quarantined and agreed is not KeyState.DESTROYED:
            if known and known.state is KeyState.COMPROMISED:
                return  # reported here; the transaction that says so follows
            if agreed is KeyState.ACTIVE:
                agreed, reason = KeyState.DEACTIVATED, QUARANTINED
        self.write(name, agreed, reason)

    def _known(self) -> dict[RingMaster, RingVersion]:
        if self._rows is None:
            rows = self._rings.all_versions(self._transaction)
            self._rows = {RingMaster(row.ring, row.version): row for row in rows}
        return self._rows


def _reason(state: SiteState) -> str:
    return state.last.proposal.manifest.reason if state.last and state.last.proposal else ""
