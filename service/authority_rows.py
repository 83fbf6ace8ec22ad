"""Clients, consents and voices' states on their way between the sites: implements `keyvault.sync.rows.TravellingRows`.

A site believes what the other's HSM has signed, and makes a MAC of its own for it. What decides is each row's own version and
`policies.joining`: a client that one site revoked is revoked at both, whatever the other wrote meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from keyvault.database import Transaction
from keyvault.sync.errors import SyncRefused
from keyvault.sync.messages import RowChange
from policies.authority import Client, Voice
from policies.consent import Consent
from policies.errors import AuthorityRowTampered
from policies.joining import closed_like, joined
from policies.store import PolicyStore
from policies.unsent import store as unsent
from policies.unsent.store import Unsent
from service.replication import CLIENT, CONSENT, VOICE, refusing, take_consent

Row = Client | Consent | Voice
Facts = dict[str, str | int]


class AuthorityRows:
    """The rows of one site's tables of who may do what."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store

    # --- sending

    def waiting(self, transaction: Transaction, after: RowChange, most: int) -> Sequence[RowChange]:
        """The next on the list, their rows still empty."""
        found = unsent.waiting(transaction, Unsent(after.kind, after.key), most)
        return [RowChange(row.kind, row.key, row.row_version, b"") for row in found]

    def read(self, transaction: Transaction, change: RowChange) -> RowChange:
        """The row as it is now. Raises SyncRefused for one that was changed or put back by somebody who writes the database."""
        with refusing():
            row = self._row(transaction, change)
            if row is not None and row.row_version < unsent.newest(transaction, change.kind, change.key):
                raise AuthorityRowTampered(f"{change.kind}: put back")
        return change if row is None else replace(change, row=_spelled(row))

    def sent(self, transaction: Transaction, changes: Sequence[RowChange]) -> None:
        """Off the list, unless they were written again meanwhile."""
        unsent.sent(transaction, [Unsent(change.kind, change.key, change.row_version) for change in changes])

    def digests(self, transaction: Transaction) -> Mapping[str, str]:
        """A digest of each table."""
        return unsent.digests(transaction)

    def list_differing(self, transaction: Transaction, theirs: Mapping[str, str]) -> Sequence[str]:
        """Every row of the tables that differ goes on the list."""
        return unsent.note_differing(transaction, theirs)

    # --- taking

    def take(self, transaction: Transaction, change: RowChange) -> Mapping[str, str | int] | None:
        """Keep the row as far as it is newer; what to record of it. Raises SyncRefused, StatementMalformed."""
        with refusing():
            match change.kind:
                case "client":
                    return self._take_client(transaction, CLIENT.decode(change.row))
                case "consent":
                    stands = take_consent(self._store, transaction, CONSENT.decode(change.row))
                    return None if stands is None else _facts(stands)
                case "voice":
                    return self._take_voice(transaction, VOICE.decode(change.row))
        raise SyncRefused(f"rows of the kind {change.kind!a} do not travel")

    def _take_client(self, transaction: Transaction, theirs: Client) -> Facts | None:
        mine = self._store.client(transaction, theirs.client_id)
        if mine is not None and mine.tenant != theirs.tenant:
            raise SyncRefused("a client of this name is another tenant's here")
        stands = theirs if mine is None else joined(mine, theirs)
        if stands == mine:
            return None
        self._store.take(transaction, stands)
        if stands != theirs:
            unsent.note(transaction, "client", stands.client_id, stands.row_version)
        return _facts(stands) | {"client": stands.client_id, "certificate": stands.cert_sha256, "jkt": stands.jkt}

    def _take_voice(self, transaction: Transaction, theirs: Voice) -> Facts | None:
        """A voice's state and terms. Its first row, and one that names a newer key, come with that key: only its state counts."""
        mine = self._store.voice_anywhere(transaction, theirs.voice_id)
        if mine is None:
            raise SyncRefused("this voice's key is not here yet")
        if mine.tenant != theirs.tenant:
            raise SyncRefused("this voice is another tenant's here")
        if mine.dek_id != theirs.dek_id:
            closed = closed_like(mine, theirs)
            return None if closed == mine else _facts(self._store.swap(transaction, mine, closed))
        stands = joined(mine, theirs)
        if stands == mine:
            return None
        self._store.take(transaction, stands)
        if stands != theirs:
            unsent.note(transaction, "voice", str(stands.voice_id), stands.row_version)
        return _facts(stands)

    def _row(self, transaction: Transaction, change: RowChange) -> Row | None:
        match change.kind:
            case "client":
                return self._store.client(transaction, change.key)
            case "consent":
                return self._store.consent(transaction, UUID(change.key))
            case "voice":
                return self._store.voice_anywhere(transaction, UUID(change.key))
        return None


def _spelled(row: Row) -> bytes:
    if isinstance(row, Client):
        return CLIENT.encode(row)
    return CONSENT.encode(row) if isinstance(row, Consent) else VOICE.encode(row)


def _facts(row: Row) -> Facts:
    """What the log says of a row that came from the other site; nothing of whom it is about."""
    facts: Facts = {"tenant": row.tenant, "state": row.state.value, "row_version": row.row_version}
    return facts | {"voice": str(row.voice_id)} if isinstance(row, Voice) else facts
