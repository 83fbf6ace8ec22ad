"""What a vault worker knows of the two sites: whether there are two, and whether the other one's word is young enough to serve by.

The site process writes both under the record MAC; a worker reads them and never steps the protocol.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from keyvault.database import Database
from keyvault.sync.errors import SiteUnfounded
from keyvault.sync.roster import Roster
from keyvault.sync.state import SiteState, require_fresh
from keyvault.sync.store import SyncStore, lasting

LOOK_S = 2.0
"""How old a worker's look at the database may be."""


@dataclass(frozen=True)
class AgreementParts:
    """`broken_glass` says whether officers let this site serve now although the other one was not heard for too long."""

    database: Database
    store: SyncStore
    site: str
    age_limit_s: float
    broken_glass: Callable[[Roster, datetime], bool]
    clock: Callable[[], datetime]


class Agreement:
    """One worker's view. Safe from any thread."""

    def __init__(self, parts: AgreementParts) -> None:
        """Raises SiteUnfounded, RecordTampered, and what `SiteState.require_whole` raises."""
        self._parts = parts
        self._lock = threading.Lock()
        self._looked = 0.0
        self._roster, self._heard = self._look()

    @property
    def alone(self) -> bool:
        """Whether the cluster has one site, so that no key waits for another's receipt."""
        return self._roster.development

    def require_fresh(self) -> None:
        """Raise StaleEpoch where the other site was not heard for longer than the set age, unless officers broke the glass.

        Raises what `SiteState.require_whole` raises where this site may not serve at all.
        """
        with self._lock:
            if time.monotonic() - self._looked > LOOK_S:
                self._roster, self._heard = self._look()
            roster, heard, now = self._roster, self._heard, self._parts.clock()
        if roster.development:
            return
        age = None if heard is None else (now - heard).total_seconds()
        # Officers are asked for only when it matters: their signatures take time to check.
        fresh = age is not None and 0 <= age <= self._parts.age_limit_s
        require_fresh(age, self._parts.age_limit_s, break_glass=not fresh and self._parts.broken_glass(roster, now))

    def _look(self) -> tuple[Roster, datetime | None]:
        with lasting(self._parts.database) as transaction:
            data = self._parts.store.state(transaction, self._parts.site)
            heard = self._parts.store.heard(transaction)
        if data is None:
            raise SiteUnfounded
        state = SiteState.decode(data)
        state.require_whole()
        self._looked = time.monotonic()
        return state.ledger.roster, heard[1] if heard else None
