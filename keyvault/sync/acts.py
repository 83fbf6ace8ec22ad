"""What officers approve when one site must stand for the cluster: the proposal of an act, from that site's state. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import uuid4

from keyvault.states import KeyState
from keyvault.sync.errors import SyncRefused
from keyvault.sync.roster import Roster
from keyvault.sync.state import Held, SiteState, missing
from keyvault.sync.statement import Manifest, Op, Proposal
from keyvault.sync.table import Record, Records, table_root, with_sites

_WRAPS = (KeyState.ACTIVE, KeyState.SUSPENDED)


def act_proposal(state: SiteState, op: Op, reason: str, new_roster: Roster | None, held: Held) -> Proposal:
    """The act `op` with this site as survivor, over its table and what its token holds. Raises SyncRefused without a cause."""
    ledger, ended = state.ledger, _in_doubt(state)
    epoch = ledger.epoch + (2 if ended else 1)
    records = ledger.records
    match op:
        case Op.END:
            if not ended:
                raise SyncRefused("no transaction is in doubt here")
        case Op.REPLACE:
            if new_roster is None:
                raise SyncRefused("a replacement names the new roster")
            kept = [site.name for site in new_roster.sites if site in ledger.roster.sites]
            records = with_sites(ledger.records, kept, new_roster.names)
        case Op.ADOPT:
            if state.recovering is None:
                raise SyncRefused("no adopted restore waits for its history here")
            epoch, ended = state.recovering.epoch + 1, state.recovering.head
            records = _adopted(ledger.records, state.site, missing(ledger.records, state.site, held))
        case _:
            raise SyncRefused(f"{op} is no act of officers")
    roster = new_roster or ledger.roster
    about = (ledger.roster.cluster, epoch, ledger.head, uuid4(), op, roster.digest, table_root(records), len(records))
    return Proposal(Manifest(*about, survivor=state.site, ended=ended, reason=reason), records, new_roster)


def _in_doubt(state: SiteState) -> bytes:
    """The manifest's digest of what this site voted for, or what its anchor remembers of it; else nothing."""
    if state.vote:
        return state.vote.proposal.manifest.digest
    return state.recovering.head if state.recovering else b""


def _adopted(records: Records, site: str, gone: Iterable[str]) -> Records:
    """After an adopted restore no old version wraps, and what this token lacks is held by the others alone."""
    lost = set(gone)

    def changed(record: Record) -> Record:
        state = KeyState.DEACTIVATED if record.state in _WRAPS else record.state
        holders = tuple(name for name in record.holders if name != site) if record.name in lost else record.holders
        return replace(record, state=state, holders=holders)

    return tuple(changed(record) for record in records)
