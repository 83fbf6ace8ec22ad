"""One site's situation as facts for people: what both agree on, what is open, what is missing, how old the other's word is."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from keyvault.database import Transaction
from keyvault.hsm import RingMaster
from keyvault.records import RecordMac
from keyvault.store import KeyStore, tombstone, wrapped_key
from keyvault.sync.state import SiteState
from keyvault.sync.statement import Signed, Status
from keyvault.sync.store import SyncStore, lasting
from policies.audit import store as log_store
from policies.witness.cosigning import cosigner_of
from policies.witness.store import WitnessStore
from service.site import Site
from service.sync.assembly import SiteService


def report(site: SiteService) -> dict[str, Any]:
    """Read from this site's store and token alone: it answers also while the other site is away."""
    state, held = site.node.current, site.node.held()
    ledger = state.ledger
    with lasting(site.database) as transaction:
        heard = SyncStore(RecordMac(site.hsm)).heard(transaction)
        facts = _counted(transaction) | {"log": _log(transaction, site)} | {"versions": _versions(transaction, state, held.keys())}
    return facts | {
        "site": state.site,
        "cluster": ledger.roster.cluster,
        "sites": list(ledger.roster.names),
        "development": ledger.roster.development,
        "endorsed": bool(ledger.endorsed),
        "epoch": ledger.epoch,
        "head": ledger.head.hex(),
        "frozen": bool(state.evidence),
        "open": state.awaiting() if state.vote else None,
        "quarantined": list(state.quarantined),
        "marks": list(ledger.marks),
        "hsm": asdict(site.hsm.figures),
        "peer": None if heard is None else _peer(*heard, site.coordinator.age()),
    }


def _versions(transaction: Transaction, state: SiteState, held: Any) -> list[dict[str, Any]]:
    """Every master version that this site knows: agreed, waiting or discarded; `keys` lie under it here."""
    store, agreed = KeyStore(), {record.name: record for record in state.ledger.records}
    found = []
    for ring in store.rings(transaction):
        references = store.references(transaction, ring)
        for row in store.ring_versions(transaction, ring):
            name = RingMaster(ring, row.version).label
            found.append(
                {
                    "name": name,
                    "state": row.state.value,
                    "agreed": agreed[name].state.value if name in agreed else None,
                    "holders": list(agreed[name].holders) if name in agreed else [],
                    "held_here": name in held,
                    "quarantined": name in state.quarantined,
                    "keys": references.get(row.version, 0),
                }
            )
    return found


def _counted(transaction: Transaction) -> dict[str, Any]:
    """How far the other site lags: keys that it has not signed for, and erasures that it has not confirmed."""
    waiting = select(func.count()).select_from(wrapped_key)
    return {
        "awaiting_sync": transaction.scalar(waiting.where(wrapped_key.c.synced == 0)),
        "unsynced": transaction.scalar(waiting.where(wrapped_key.c.synced != wrapped_key.c.row_version)),
        "erasures_unconfirmed": transaction.scalar(
            select(func.count()).select_from(tombstone).where(tombstone.c.peer_erased_at.is_(None))
        ),
    }


def _log(transaction: Transaction, site: SiteService) -> dict[str, Any]:
    """How far the other site co-signed this site's log, by which key, and the forks of its log that are kept here."""
    store, roster = WitnessStore(RecordMac(site.hsm)), site.node.ledger.roster
    key = Site.load(site.settings.site_file).audit_key
    own, newest = store.newest(transaction, key.fingerprint), log_store.last_checkpoint(transaction)
    return {
        "fingerprint": key.fingerprint,
        "size": 0 if newest is None else newest.size,
        "cosigned": 0 if own is None else own.size,
        "cosigned_at": own.created_at.isoformat() if own else None,
        "cosigners": [cosigner_of(roster, name).text for name in roster.peers(site.node.name)],
        "forks": [
            {"log": row.log, "size": row.size, "seen_at": row.created_at.isoformat()} for row in store.open_forks(transaction)
        ],
    }


def _peer(message: bytes, heard_at: datetime, age_s: float | None) -> dict[str, Any]:
    status = Status.decode(Signed.decode(message).statement)
    return {
        "site": status.site,
        "epoch": status.epoch,
        "head": status.head.hex(),
        "quarantined": list(status.quarantined),
        "voting": bool(status.vote),
        "heard_at": heard_at.isoformat(),
        "age_s": None if age_s is None else round(age_s, 1),
    }
