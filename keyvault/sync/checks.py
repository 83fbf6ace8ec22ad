"""What must hold at a site before it takes a step: questions about its own state, each answered by raising or not."""

from __future__ import annotations

from keyvault.sync.errors import (
    Conflict,
    KeyQuarantined,
    PeerUnheard,
    SiteBehind,
    SiteFrozen,
    SitesDiverged,
    StoreRolledBack,
    SyncRefused,
)
from keyvault.sync.state import VOTED, Held, SiteState, missing
from keyvault.sync.statement import Manifest, Op, Proposal, Status
from keyvault.sync.table import Records


def require_able(state: SiteState) -> None:
    """Raises SiteFrozen once a contradiction is known, or once the roster no longer names this site."""
    if state.evidence:
        raise SiteFrozen
    if state.site not in state.ledger.roster.names:
        raise SiteFrozen("officers replaced this site; it takes part no more")


def require_votable(state: SiteState, heard: Status | None, manifest: Manifest) -> None:
    """The peer stands where we stand, was heard in this process, and we promised nothing against this manifest.

    Raises StoreRolledBack, Conflict, PeerUnheard, SiteBehind, SitesDiverged.
    """
    ledger = state.ledger
    goal = state.recovering
    # What this HSM signed for and the store forgot may be signed for again: the same manifest, and no other.
    if goal and (goal.epoch, goal.head) != (manifest.epoch, manifest.digest):
        raise StoreRolledBack("this site must catch up with its anchor first")
    if state.withdrawn == manifest.epoch:
        raise Conflict("this site promised not to vote at this epoch", ledger.epoch)
    if ledger.roster.development:
        return
    if heard is None:
        raise PeerUnheard
    if heard.epoch > ledger.epoch:
        raise SiteBehind(f"the other site stands at epoch {heard.epoch}, this one at {ledger.epoch}")
    if heard.epoch == ledger.epoch and heard.head != ledger.head:
        raise SitesDiverged(f"both sites closed epoch {ledger.epoch}, each in its own way")
    if heard.epoch < ledger.epoch:
        raise SiteBehind(f"the other site stands at epoch {heard.epoch}: hand it the certificates first")


def require_unburned(state: SiteState, new: Records) -> None:
    """Version numbers of transactions that came to nothing stay used. Raises SyncRefused."""
    used: dict[str, int] = {}
    for name in state.burned:
        key_id, _, version = name.rpartition("/")
        used[key_id] = max(int(version), used.get(key_id, 0))
    for record in new:
        if record.version <= used.get(record.key_id, 0):
            raise SyncRefused(f"{record.name} reuses a version number of a transaction that came to nothing")


def require_held(state: SiteState, proposal: Proposal, held: Held) -> None:
    """Every object of the table read again, but for those in quarantine that the transaction leaves there.

    Raises KeyQuarantined naming the first that is not as the table says.
    """
    known = set(state.quarantined) - set(proposal.manifest.repairs)
    if gone := [name for name in missing(proposal.records, state.site, held) if name not in known]:
        raise KeyQuarantined(f"{gone[0]} is not in this site's token as the table describes it")


def check_ended(state: SiteState, manifest: Manifest) -> None:
    """An act names exactly what is open here; a transaction that this site acknowledged may be in force elsewhere.

    Raises SyncRefused, SiteFrozen, StoreRolledBack.
    """
    goal = state.recovering
    if any(known.first.site == state.site for known in state.evidence):
        raise SiteFrozen("this site contradicted itself and can't be the one that survives")
    if state.evidence and manifest.op is not Op.REPLACE:
        raise SiteFrozen
    if manifest.op is Op.ADOPT:
        if goal is None or (manifest.epoch, manifest.ended) != (goal.epoch + 1, goal.head):
            raise SyncRefused("this site recovers from nothing that the act names")
        return
    doubt = b""
    if state.vote:
        doubt = state.vote.proposal.manifest.digest
    elif goal:
        # The store forgot a vote that the HSM's anchor remembers; an acknowledged one would have closed the anchor.
        if goal.rank != (state.ledger.epoch + 1, VOTED):
            raise StoreRolledBack("this site must catch up with its anchor first")
        doubt = goal.head
    if manifest.ended != doubt:
        raise SyncRefused("the act must end exactly the transaction that is open here")
    if manifest.op is Op.END and (not doubt or state.anchor.rank > (state.ledger.epoch + 1, VOTED)):
        raise SyncRefused("only a transaction that this site has not acknowledged can end without replacing the other site")
