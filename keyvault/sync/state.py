"""What one site keeps durably about the sync, as one value, and the durable writes that a step asks for.

The state is one blob, replaced by compare-and-swap, so that two workers of a site can't both step from the same state.
Its store adds the record MAC. The anchor lies in the HSM: the highest thing that this HSM ever signed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keyvault.errors import KeyNotFound
from keyvault.states import KeyState, KeyUse, require_use
from keyvault.sync.errors import KeyQuarantined, SiteFrozen, StaleEpoch, StoreRolledBack
from keyvault.sync.ledger import Ledger
from keyvault.sync.statement import Certificate, Endorsement, Evidence, Proposal
from keyvault.sync.table import Record, Records, new_records, table_root
from keyvault.sync.wire import Statement, is_digest, require

Held = Mapping[str, tuple[str, ...]]
"""What was just read from the token: each master version's name and the attributes that records describe, sorted."""

VOTED, CLOSED = 1, 2


@dataclass(frozen=True)
class Anchor(Statement):
    """Epoch, step (VOTED: voted or withdrew; CLOSED: acknowledged, void or ended) and the digest signed for, if any."""

    DOMAIN = "hsm-sync/1/anchor"
    epoch: int
    step: int
    head: bytes

    def __post_init__(self) -> None:
        require(self.step in (0, VOTED, CLOSED) and is_digest(self.head, empty=True), "an anchor has a step and a digest")

    @property
    def rank(self) -> tuple[int, int]:
        return self.epoch, self.step


NO_ANCHOR = Anchor(0, 0, b"")
"""What an empty token shows."""


@dataclass(frozen=True)
class Vote(Statement):
    """An open transaction: what this site promised, and how far it went. Its new versions are PRE_ACTIVE."""

    DOMAIN = "hsm-sync/1/vote"
    proposal: Proposal
    prepare: Endorsement
    prepares: tuple[Endorsement, ...] = ()
    commit: Endorsement | None = None
    commits: tuple[Endorsement, ...] = ()
    acknowledge: Endorsement | None = None


@dataclass(frozen=True)
class SiteState(Statement):
    """Everything durable. `burned` are versions of votes that came to nothing; `last` closed the present epoch.

    `anchor` is what the HSM's anchor must say, and `before` what it may still say if a crash came between the two writes.
    `recovering` is the anchor that an adopted, older store must first catch up with.
    """

    DOMAIN = "hsm-sync/1/state"
    site: str
    ledger: Ledger
    anchor: Anchor
    before: Anchor
    vote: Vote | None = None
    withdrawn: int = 0
    burned: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    last: Certificate | None = None
    recovering: Anchor | None = None

    def protecting(self, key_id: str) -> Record:
        """The one version that may wrap anything new at this site now.

        Raises StoreRolledBack, SiteFrozen, KeyNotFound if no version is active, KeyQuarantined.
        """
        self.require_whole()
        if self.evidence:
            raise SiteFrozen
        for record in self.ledger.records:
            if (record.key_id, record.state) == (key_id, KeyState.ACTIVE):
                if record.name in self.quarantined:
                    raise KeyQuarantined(f"{record.name} is quarantined; nothing new is wrapped under it")
                return record
        raise KeyNotFound(f"{key_id} has no active version that every site holds")

    def opening(self, key_id: str, version: int, *, break_glass: bool = False) -> Record:
        """The record of exactly this version, if it may open what it wrapped. A quarantined one may: its token decides.

        Raises KeyNotFound (also where another site holds it and this one does not), KeyStateForbids.
        """
        self.require_whole()
        for record in self.ledger.records:
            if (record.key_id, record.version) == (key_id, version) and self.site in record.holders:
                if not (break_glass and record.state is KeyState.COMPROMISED):
                    require_use(record.state, KeyUse.OPEN)
                return record
        raise KeyNotFound(f"this site holds no agreed {key_id}/{version}")

    def require_whole(self) -> None:
        """Raises StoreRolledBack while an adopted store has not caught up, SiteFrozen once the roster dropped this site."""
        if self.recovering:
            raise StoreRolledBack("the adopted store has not caught up with this site's anchor yet")
        if self.site not in self.ledger.roster.names:
            raise SiteFrozen("officers replaced this site; it serves no more")

    @property
    def pre_active(self) -> Records:
        """Versions that wait for both sites."""
        return new_records(self.ledger.records, self.vote.proposal.records) if self.vote else ()

    def awaiting(self) -> str:
        """One line for the officer: which transaction waits for what."""
        if self.vote is None:
            return "nothing is open"
        done = "acknowledged" if self.vote.acknowledge else "committed" if self.vote.commit else "voted for"
        others = ", ".join(self.ledger.roster.peers(self.site)) or "nobody"
        return f"{self.site} has {done} epoch {self.vote.proposal.manifest.epoch}; waiting for {others}"


def missing(records: Records, site: str, held: Held) -> tuple[str, ...]:
    """Versions that this site should hold and whose object is not there, or has other attributes."""
    return tuple(record.name for record in records if _expected(record, site) and held.get(record.name) != record.attributes)


def held_root(records: Records, site: str, without: tuple[str, ...]) -> tuple[bytes, int]:
    """Root and count of the records that `site` should hold, without those it named as missing."""
    present = tuple(record for record in records if _expected(record, site) and record.name not in without)
    return table_root(present), len(present)


def require_fresh(peer_age_s: float | None, limit_s: float, *, break_glass: bool = False) -> None:
    """Raises StaleEpoch if the other site's signed status is older than the set age. The caller reads the clock.

    None stands for never. `break_glass` is the caller's word that officers approved it and its time is not over.
    """
    if not break_glass and (peer_age_s is None or not 0 <= peer_age_s <= limit_s):
        raise StaleEpoch


def _expected(record: Record, site: str) -> bool:
    return site in record.holders and record.state is not KeyState.DESTROYED


@dataclass(frozen=True)
class InstallPreActive:
    """Enter this version, already in the token by the ceremony, as PRE_ACTIVE. Idempotent; nothing serves by it."""

    name: str


@dataclass(frozen=True)
class SaveState:
    """Replace the state blob whose SHA-256 is `replaces` (empty: there is none yet); else another worker stepped first."""

    state: bytes
    replaces: bytes


@dataclass(frozen=True)
class FileCertificate:
    """Keep this certificate of an epoch for ever, beside the others, and as a leaf of the audit log."""

    epoch: int
    certificate: bytes


@dataclass(frozen=True)
class RecordEvidence:
    """Keep this proof that an HSM signed two histories, and tell the officers."""

    site: str
    evidence: bytes


@dataclass(frozen=True)
class AdvanceAnchor:
    """Write the anchor into the HSM: make the new object, then destroy the old ones; the highest rank counts."""

    anchor: Anchor


@dataclass(frozen=True)
class ChangeState:
    """A version's agreed state changed. Follows from the saved state; DESTROYED also destroys the token's objects."""

    name: str
    state: KeyState


@dataclass(frozen=True)
class Discard:
    """Destroy the token's objects of a version whose transaction came to nothing."""

    name: str


Effect = InstallPreActive | SaveState | FileCertificate | RecordEvidence | AdvanceAnchor | ChangeState | Discard
