"""State changes that several steps share, each as the state after it and the durable writes that lead there. Pure.

Order of writes: what must exist before the state speaks of it, the state, then the anchor. A crash between the last two
leaves the anchor exactly one step behind, which `load` recognises and mends; any other difference is a rollback.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from keyvault.approvals import Approval, Operation
from keyvault.states import KeyState
from keyvault.sync import evidence as contradictions
from keyvault.sync.errors import SitesDiverged, StoreRolledBack, SyncRefused, TokenRolledBack
from keyvault.sync.ledger import Ledger
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify
from keyvault.sync.state import (
    CLOSED,
    NO_ANCHOR,
    VOTED,
    AdvanceAnchor,
    Anchor,
    ChangeState,
    Discard,
    Effect,
    FileCertificate,
    RecordEvidence,
    SaveState,
    SiteState,
)
from keyvault.sync.statement import Certificate, Evidence, Op
from keyvault.sync.table import Records
from keyvault.sync.verify import replay

Change = tuple[SiteState, tuple[Effect, ...]]
"""The state after, and what must be durable in this order."""

ADOPT = "restore.adopt"
"""The kind of operation that officers approve before an older store or token is used again."""


def found(roster: Roster, site: str, anchor: Anchor) -> Change:
    """A new cluster's state at one site, whose token must not have served a cluster before. Raises TokenRolledBack."""
    return _first(Ledger.start(roster), site, None, anchor)


def join(roster: Roster, site: str, certificates: Sequence[bytes], anchor: Anchor, verify: Verify) -> Change:
    """A replacement site's state, from the whole history checked from the pinned roster on. It holds no old version.

    Raises CertificateInvalid naming the first that fails, SyncRefused if the last roster does not name this site.
    """
    ledger = replay(certificates, roster, verify)
    last = Certificate.decode(certificates[-1]) if certificates else None
    return _first(ledger, site, last, anchor)


def load(data: bytes, anchor: Anchor) -> Change:
    """The stored state, if it is the newest that this site's HSM signed for, with writes that a crash may have cut off.

    Raises StoreRolledBack or TokenRolledBack: nothing serves then, until officers adopt what is there.
    """
    state = SiteState.decode(data)
    if anchor not in (state.anchor, state.before):
        if anchor.rank < state.anchor.rank:
            raise TokenRolledBack(f"the token's anchor is at epoch {anchor.epoch}, the store's at {state.anchor.epoch}")
        raise StoreRolledBack(f"the store is at epoch {state.anchor.epoch}, the token's anchor at {anchor.epoch}")
    advance = () if anchor == state.anchor else (AdvanceAnchor(state.anchor),)
    changes = tuple(ChangeState(record.name, record.state) for record in state.ledger.records)
    return state, (*advance, *changes, *(Discard(name) for name in state.burned))


def adopt(
    data: bytes, anchor: Anchor, operation: Operation, approvals: Sequence[Approval], verify: Verify, now: datetime
) -> Change:
    """Use a store and token that do not belong together, by M of N officers' approval of exactly this pair.

    An older token takes the store's anchor; then `inspect` quarantines what it lacks. An older store takes part in nothing
    and serves nothing until it caught up with the anchor by certificates, or officers adopted it for good.
    """
    state = SiteState.decode(data)
    asked = (operation.cluster, operation.kind, operation.subject)
    if asked != (state.ledger.roster.cluster, ADOPT, adoption_subject(data, anchor)):
        raise SyncRefused("the officers approved the adoption of another store or token")
    state.ledger.roster.quorum.check(operation, approvals, verify, now)
    if anchor.rank < state.anchor.rank:
        return state, (AdvanceAnchor(state.anchor),)
    adopted = recovered(replace(state, anchor=anchor, before=anchor, recovering=anchor))
    return saved(state, adopted)


def adoption_subject(data: bytes, anchor: Anchor) -> bytes:
    """What an adoption's operation is about: the digest of this stored state beside this anchor."""
    return replace(SiteState.decode(data), recovering=anchor).digest


def saved(before: SiteState, after: SiteState, anchor: Anchor | None = None) -> Change:
    """Replace the state, and then the anchor if this step moves it."""
    # Whatever the last step asked for is durable by now, so the anchor it left is the only one that may be found.
    # An HSM's anchor never goes down: a step taken again after a restore finds it where it belongs.
    highest = max(after.anchor, anchor or after.anchor, key=lambda one: one.rank)
    state = replace(after, before=after.anchor, anchor=highest)
    advance = () if state.anchor == state.before else (AdvanceAnchor(state.anchor),)
    return state, (SaveState(state.encode(), before.digest), *advance)


def quarantined(state: SiteState, names: Iterable[str]) -> Change:
    """Take these versions out of use for anything new. Repair is a transaction's, never silent."""
    live = {record.name for record in state.ledger.records if record.state is not KeyState.DESTROYED}
    after = tuple(sorted({*state.quarantined, *(set(names) & live)}))
    if after == state.quarantined:
        return state, ()
    return saved(state, replace(state, quarantined=after))


def frozen(state: SiteState, evidence: Evidence, verify: Verify) -> Change:
    """Stop on proof that one HSM signed two histories. Raises CertificateInvalid, SignatureInvalid if it is no proof."""
    accused = contradictions.check(evidence, state.ledger.roster, verify)
    if any(known.first.site == accused for known in state.evidence):
        return state, ()
    after, effects = saved(state, replace(state, evidence=(*state.evidence, evidence)))
    return after, (RecordEvidence(accused, evidence.encode()), *effects)


def closed(state: SiteState, certificate: Certificate, verify: Verify) -> Change:
    """Close the epoch that this certificate closes."""
    ledger = state.ledger.accept(certificate, verify)
    repairs = certificate.proposal.manifest.repairs if certificate.proposal else ()
    live = {record.name for record in ledger.records if record.state is not KeyState.DESTROYED}
    dropped = [record.name for record in state.pre_active if record.name not in {known.name for known in ledger.records}]
    replaced = certificate.proposal is not None and certificate.proposal.manifest.op is Op.REPLACE
    after = recovered(
        replace(
            state,
            ledger=ledger,
            vote=None,
            withdrawn=0,
            last=certificate,
            burned=tuple(sorted({*state.burned, *dropped})),
            quarantined=tuple(sorted(set(state.quarantined) & live - set(repairs))),
            evidence=() if replaced else state.evidence,
        )
    )
    anchor = None if after.recovering or after.withdrawn else Anchor(ledger.epoch, CLOSED, ledger.head)
    final, effects = saved(state, after, anchor)
    changes = _changes(state.ledger.records, ledger.records)
    discards = (Discard(name) for name in dropped)
    return final, (FileCertificate(ledger.epoch, certificate.encode()), *effects, *changes, *discards)


def recovered(state: SiteState) -> SiteState:
    """An adopted store, no longer recovering once it stands where its HSM's anchor stands. Raises SitesDiverged."""
    goal, ledger = state.recovering, state.ledger
    if goal is None:
        return state
    if goal == Anchor(ledger.epoch + 1, VOTED, b""):
        return replace(state, recovering=None, withdrawn=goal.epoch)
    if goal.rank > (ledger.epoch, CLOSED):
        return state
    if goal.epoch == ledger.epoch and goal.step == CLOSED and goal.head != ledger.head:
        raise SitesDiverged(f"this site's HSM closed epoch {goal.epoch} in another way than this history")
    return replace(state, recovering=None)


def _first(ledger: Ledger, site: str, last: Certificate | None, anchor: Anchor) -> Change:
    if anchor != NO_ANCHOR:
        raise TokenRolledBack("this token belongs to a cluster already")
    if site not in ledger.roster.names:
        raise SyncRefused(f"the roster names no site {site!r}")
    state = SiteState(site, ledger, Anchor(ledger.epoch, CLOSED, ledger.head), NO_ANCHOR, last=last)
    return state, (SaveState(state.encode(), b""), AdvanceAnchor(state.anchor))


def _changes(before: Records, after: Records) -> tuple[ChangeState, ...]:
    old = {record.name: record.state for record in before}
    return tuple(ChangeState(record.name, record.state) for record in after if old.get(record.name) is not record.state)
