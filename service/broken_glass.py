"""What officers let a vault do although a rule forbids it, while their request lasts: `site.break-glass`, `keys.break-glass`.

Their signatures are read and checked at each use that needs them, so that a request that is over or cancelled counts no more. What
opens under a compromised version is an entry of the log before it opens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from keyvault.approval_kinds import Kind, break_glass_subject
from keyvault.approval_subjects import open_compromised_subject
from keyvault.database import Database
from keyvault.errors import KeyCompromised
from keyvault.events import KeyEvent
from keyvault.hsm import Hsm, RingMaster
from keyvault.keys import FoundKey
from keyvault.requests.store import ApprovalStore
from keyvault.sync.roster import Roster
from keyvault.sync.store import lasting
from policies.audit.store import AuditStore
from policies.store import durable
from service.inboxes import inbox_now, inbox_of, roster_in_force
from service.key_events import KeyEventRecorder
from service.settings import Settings

STALE_PEER, COMPROMISED_KEY = "stale-peer", "compromised-key"
"""What policies call the two (`break_glass.cedar`)."""
LOOK_S = 2.0
"""How old a worker's look at the officers' requests may be where a policy asks."""


@dataclass(frozen=True)
class BrokenGlass:
    """One vault worker's view of it."""

    settings: Settings
    database: Database
    hsm: Hsm
    audit: AuditStore

    def in_force(self) -> frozenset[str]:
        """What officers let this site do now, for policies to see. It permits nothing: `to_serve` and `to_open` do."""
        with lasting(self.database) as transaction:
            if all(found.outcome for found in ApprovalStore().requests(transaction)):
                return frozenset()
        roster = roster_in_force(self.settings, self.database, self.hsm)
        cluster, site, found = roster.cluster, self.settings.site, set()
        for standing in inbox_of(self.settings, self.database, self.hsm, self.audit, roster).all():
            if not standing.open or len(standing.approved_by) < standing.needed:
                continue
            subject = standing.request.operation.subject  # it says of which kind it is: each has a domain of its own
            if subject == break_glass_subject(cluster, site):
                found.add(STALE_PEER)
            elif subject == open_compromised_subject(cluster, site, str(standing.request.facts.get("version", ""))):
                found.add(COMPROMISED_KEY)
        return frozenset(found)

    def to_serve(self, roster: Roster, at: datetime) -> bool:
        """Whether this site may serve now although it heard nothing of the other for too long."""
        inbox = inbox_of(self.settings, self.database, self.hsm, self.audit, roster)
        found = inbox.approved(Kind.BREAK_GLASS, break_glass_subject(roster.cluster, self.settings.site), at)
        return found is not None and found.operation is not None

    def to_open(self, key: FoundKey) -> None:
        """Return if officers let keys under this compromised version open now, once that is on record. Raises KeyCompromised."""
        roster = roster_in_force(self.settings, self.database, self.hsm)
        version = RingMaster(key.ref.ring, key.ref.ring_version).label
        inbox = inbox_of(self.settings, self.database, self.hsm, self.audit, roster)
        subject = open_compromised_subject(roster.cluster, self.settings.site, version)
        found = inbox.approved(Kind.OPEN_COMPROMISED, subject, inbox_now())
        if found is None or found.operation is None:
            raise KeyCompromised(f"{version} is compromised; nothing opens under it without broken glass")
        facts: dict[str, str | int] = {"version": version, "dek": str(key.ref.id), "voice": str(key.voice), "tenant": key.tenant}
        facts["request"] = found.operation.digest.hex()
        with durable(self.database) as transaction:
            KeyEventRecorder(self.audit).record(transaction, KeyEvent("key.glass_broken", facts))


class Watched:
    """What is in force, looked up again when the last look is LOOK_S old. Safe from any thread."""

    def __init__(self, look: Callable[[], frozenset[str]]) -> None:
        self._look, self._lock = look, threading.Lock()
        self._seen: frozenset[str] = frozenset()
        self._until = 0.0

    def __call__(self) -> frozenset[str]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._seen = self._look()
                self._until = time.monotonic() + LOOK_S
            return self._seen
