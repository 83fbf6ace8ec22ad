"""Receipts for batches of voices' wrapped keys: a voice is awaiting_sync at a site until that site holds every site's.

The writing site signs last, once it holds the other's receipt and its own store is durable, and sends its receipt over. So
whoever holds both knows that both stores have every blob and that both HSMs opened it.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from keyvault.sync.errors import AwaitingSync, StatementMalformed
from keyvault.sync.ledger import Ledger
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.state import SiteState
from keyvault.sync.statement import DekRecord, Receipt, Signed, batch_root


def receipt(state: SiteState, batch: UUID, records: tuple[DekRecord, ...], sign: Sign) -> bytes:
    """This site's receipt, to be asked for once every blob is durable here and was opened with a canary check.

    Raises KeyQuarantined, KeyStateForbids, KeyNotFound for a master under which this site must not vouch for anything,
    StatementMalformed for a batch out of order.
    """
    for ring, version in {(record.ring, record.ring_version) for record in records}:
        state.opening(ring, version)
    root = _root(records)
    cluster, epoch = state.ledger.roster.cluster, state.ledger.epoch
    return Signed.make(state.site, Receipt(cluster, state.site, batch, epoch, root, len(records)), sign).encode()


def check_receipts(ledger: Ledger, batch: UUID, records: tuple[DekRecord, ...], receipts: Sequence[bytes], verify: Verify) -> None:
    """Return if every site vouches for exactly these records. Raises AwaitingSync naming who has not, SignatureInvalid."""
    root, wanted = _root(records), set(ledger.roster.names)
    for message in receipts:
        signed = Signed.decode(message)
        signed.check(ledger.roster, verify)
        said = Receipt.decode(signed.statement)
        about = (said.cluster, said.site, said.batch, said.root, said.count)
        if about != (ledger.roster.cluster, signed.site, batch, root, len(records)):
            raise StatementMalformed(f"{signed.site}'s receipt is for another batch")
        wanted.discard(signed.site)
    if wanted:
        raise AwaitingSync(f"{', '.join(sorted(wanted))} has not signed for batch {batch} yet")


def _root(records: tuple[DekRecord, ...]) -> bytes:
    try:
        return batch_root(records)
    except ValueError as error:
        raise StatementMalformed(str(error)) from error
