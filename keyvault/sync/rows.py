"""Rows of higher packages that wait for no key: who may call, what was withdrawn. Each site tells the other at once.

The writing site sends what is on its list, signed as a whole; the other keeps each row under a MAC of its own, as far as it is
newer there, and answers which it refused. Only then does a row leave the list. What was cut off is sent again, and taking a row
twice changes nothing: its own version decides, so that a message kept back or played again brings no old row into force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID, uuid4

from keyvault.database import Transaction
from keyvault.errors import KeyVaultError
from keyvault.events import KeyEvent
from keyvault.sync.errors import StatementMalformed
from keyvault.sync.messages import MOST, RefusedChange, RowChange, RowChanges, RowsHeld, RowsTaken
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import RowPeer
from keyvault.sync.receiving import FAULTS, Envelopes
from keyvault.sync.store import lasting, snapshot

_MOST_BYTES = 1 << 21
"""Of rows in one message, as of a batch of keys."""
BEGINNING = RowChange("", "", 0, b"")
"""Before every row of the list."""


class TravellingRows(Protocol):
    """The rows, and the list of those that the other site lacks. What it refuses it raises as a KeyVaultError."""

    def waiting(self, transaction: Transaction, after: RowChange, most: int) -> Sequence[RowChange]:
        """The next on the list above `after`, by kind and key, their rows still empty."""

    def read(self, transaction: Transaction, change: RowChange) -> RowChange:
        """The same with the row as it is now; an empty one where it is gone."""

    def sent(self, transaction: Transaction, changes: Sequence[RowChange]) -> None:
        """The other site has them: off the list, unless they were written again meanwhile."""

    def take(self, transaction: Transaction, change: RowChange) -> Mapping[str, str | int] | None:
        """Keep what the other site sent, as far as it is newer: what is to be recorded of it; None if nothing was changed."""

    def digests(self, transaction: Transaction) -> Mapping[str, str]:
        """A digest of all rows of each kind, whatever their order."""

    def list_differing(self, transaction: Transaction, theirs: Mapping[str, str]) -> Sequence[str]:
        """Put every row of each kind on the list that the other site digests otherwise; those kinds."""


@dataclass
class RowsSent:
    """What one run told. `refused` names each row that was not taken, with the code of the reason."""

    rows: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class Rows:
    """One site's sending and taking. `peer` is None with one site: the list only grows until there is another."""

    def __init__(self, node: SiteNode, peer: RowPeer | None, rows: TravellingRows, *, most: int = MOST) -> None:
        self._node, self._peer, self._rows, self._most = node, peer, rows, most
        self._parts, self._envelopes = node.parts, Envelopes(node)

    # --- what the other site calls

    def take_rows(self, changes: bytes) -> bytes:
        """Keep the other site's rows; the answer is signed. Idempotent.

        Raises SignatureInvalid, SyncRefused, HsmUnavailable, SyncStoreUnavailable: nothing is kept then.
        """
        given = self._envelopes.opened(changes, RowChanges)
        with lasting(self._parts.database) as transaction:
            codes = [(change, self._refusal(transaction, given.site, change)) for change in given.changes]
        refused = tuple(RefusedChange(change.kind, change.key, code) for change, code in codes if code)
        return self._envelopes.sealed(RowsTaken(given.cluster, self._node.name, given.batch, refused))

    def send_differing(self, held: bytes) -> None:
        """The other site holds this: what is different here goes on the list. Raises SignatureInvalid, SyncRefused."""
        theirs = self._envelopes.opened(held, RowsHeld)
        with lasting(self._parts.database) as transaction:
            self._rows.list_differing(transaction, dict(zip(theirs.kinds, theirs.digests, strict=True)))

    # --- what this site does

    def send(self) -> RowsSent:
        """Send everything on the list. May run anywhere, any number of times. Raises PeerUnavailable, SyncStoreUnavailable,
        HsmUnavailable: what the other site has taken by then stands."""
        done, after = RowsSent(), BEGINNING
        while self._peer is not None:
            changes, gone, last = self._next(after, done)
            refused = self._ask(self._peer, changes) if changes else {}
            self._confirm(changes, refused, gone, done)
            if last is None:
                break
            after = last
        return done

    def reconcile(self) -> None:
        """Both sites send each other what they hold differently: after a restore, a replacement, at every start."""
        if self._peer is None:
            return
        with snapshot(self._parts.database) as transaction:
            mine = self._rows.digests(transaction)
        cluster = self._node.ledger.roster.cluster
        held = RowsHeld(cluster, self._node.name, tuple(mine), tuple(mine.values()))
        self._peer.send_differing(self._envelopes.sealed(held))

    # --- what these share

    def _next(self, after: RowChange, done: RowsSent) -> tuple[list[RowChange], list[RowChange], RowChange | None]:
        """The next rows to send, those of the list that are gone, and where to go on; None at the end."""
        found: list[RowChange] = []
        gone: list[RowChange] = []
        with snapshot(self._parts.database) as transaction:
            page = self._rows.waiting(transaction, after, self._most)
            for listed in page:
                if sum(len(change.row) for change in found) > _MOST_BYTES:
                    return found, gone, after
                after = listed
                try:
                    change = self._rows.read(transaction, listed)
                    (found if change.row else gone).append(change)
                except FAULTS:
                    raise
                except KeyVaultError as error:
                    done.refused[_name(listed)] = error.code
        return found, gone, after if len(page) == self._most else None

    def _ask(self, peer: RowPeer, changes: Sequence[RowChange]) -> Mapping[tuple[str, str], str]:
        """Send them; the codes of those that were refused."""
        message = RowChanges(self._node.ledger.roster.cluster, self._node.name, uuid4(), tuple(changes))
        return self._answer(peer.take_rows(self._envelopes.sealed(message)), message.batch)

    def _answer(self, reply: bytes, batch: UUID) -> Mapping[tuple[str, str], str]:
        taken = self._envelopes.opened(reply, RowsTaken)
        if taken.batch != batch:
            raise StatementMalformed("the other site answered for other rows")
        return {(row.kind, row.key): row.code for row in taken.refused}

    def _confirm(
        self, changes: Sequence[RowChange], refused: Mapping[tuple[str, str], str], gone: Sequence[RowChange], done: RowsSent
    ) -> None:
        """Take off the list what the other site has."""
        kept = [change for change in changes if (change.kind, change.key) not in refused]
        done.rows += len(kept)
        done.refused |= {_name(change): refused[change.kind, change.key] for change in changes if change not in kept}
        if kept or gone:
            with lasting(self._parts.database) as transaction:
                self._rows.sent(transaction, [*kept, *gone])

    def _refusal(self, transaction: Transaction, site: str, change: RowChange) -> str | None:
        """Take one row, with the record of it; where it can't be taken, nothing of it is kept and the code says why."""
        try:
            with transaction.begin_nested():
                facts = self._rows.take(transaction, change)
                if facts is not None:
                    event = KeyEvent("sync.row_taken", {"from": site, "kind": change.kind, "key": change.key, **facts})
                    self._parts.recorder.record(transaction, event)
        except FAULTS:
            raise
        except KeyVaultError as error:
            return error.code
        return None


def _name(change: RowChange) -> str:
    return f"{change.kind} {change.key}"
