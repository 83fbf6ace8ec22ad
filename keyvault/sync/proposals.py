"""What a transaction or an act of officers proposes, from the table that stands: whole proposals and changed records. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from uuid import uuid4

from keyvault.states import KeyState
from keyvault.sync.errors import SyncRefused
from keyvault.sync.ledger import Ledger
from keyvault.sync.roster import Roster
from keyvault.sync.state import Held, SiteState, missing
from keyvault.sync.statement import Manifest, Op, Proposal
from keyvault.sync.table import Record, Records, table_root, with_sites

_WRAPS = (KeyState.ACTIVE, KeyState.SUSPENDED)


def proposal_after(
    ledger: Ledger,
    op: Op,
    records: Iterable[Record] | None = None,
    new_roster: Roster | None = None,
    *,
    repairs: Iterable[str] = (),
    reason: str = "",
) -> Proposal:
    """A transaction that follows this ledger, without approvals; its table is the ledger's unless given, in any order."""
    rows = tuple(sorted(ledger.records if records is None else records, key=lambda record: (record.key_id, record.version)))
    roster = new_roster or ledger.roster
    about = (ledger.roster.cluster, ledger.epoch + 1, ledger.head, uuid4(), op, roster.digest, table_root(rows), len(rows))
    return Proposal(Manifest(*about, tuple(sorted(repairs)), reason=reason), rows, new_roster)


def retired(record: Record, rings: Container[str]) -> Record:
    """A ring's active version once the ring gets a new one: it goes on opening what it wrapped."""
    ends = record.key_id in rings and record.state is KeyState.ACTIVE
    return replace(record, state=KeyState.DEACTIVATED) if ends else record


def kept(record: Record, lacking: Mapping[str, Container[str]]) -> Record:
    """A repaired version: as it was where every holder has it, else held by who has it, and for opening only.

    `lacking` says what each site's token does not hold.
    """
    holders = tuple(site for site in record.holders if record.name not in lacking[site])
    if holders == record.holders or record.state is KeyState.DESTROYED:
        return record
    return replace(record, holders=holders, state=KeyState.DEACTIVATED if record.state in _WRAPS else record.state)


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
            stay = [site.name for site in new_roster.sites if site in ledger.roster.sites]
            records = with_sites(ledger.records, stay, new_roster.names)
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
