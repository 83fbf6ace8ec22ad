"""Durable records become leaves, and leaves a signed checkpoint: one writer, numbers without gaps, never two histories.

1. Leaves are committed first, and only then is a checkpoint over them signed: a crash in between signs the same tree again.
2. A signed checkpoint goes into the writer's own file, durably, before it is published in the database: a database restored
   to an older state is noticed even though it agrees with itself.
3. Before every step the database must hold exactly the tree and the checkpoint that this writer left there.
4. After an error this object is finished; a fresh one reads the whole log again, from the first leaf, before it signs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from keyvault.database import Database, Transaction
from policies.audit import store
from policies.audit.checkpoint import LastCheckpoint, Sign, sign_checkpoint
from policies.audit.errors import AuditDiverged, LogOccupied
from policies.audit.verify import MAX_SIZE, Checkpoint, Frontier, VerifierKey, check_checkpoint, leaf_hash


@dataclass(frozen=True)
class Step:
    """What one step did: leaves added, the log's size, whether a checkpoint was signed, and counters that were skipped."""

    added: int
    size: int
    signed: bool
    gaps: tuple[str, ...]


class Sequencer:
    """The single writer of the log. `with Sequencer(…) as sequencer:` takes the lock and checks the whole log."""

    def __init__(
        self,
        database: Database,
        key: VerifierKey,
        sign: Sign,
        last: LastCheckpoint,
        *,
        handed: Sequence[str] = (),
        batch: int = 500,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`key` is the log's first, `handed` are its hand-overs since, and `sign` is the newest key's."""
        self._database, self._key, self._sign, self._last, self._handed = database, key, sign, last, handed
        self._batch, self._now = batch, now
        self._tree = Frontier()
        self._published: tuple[int, str] | None = None
        self._progress: store.Progress = {}

    def __enter__(self) -> Sequencer:
        # One snapshot a transaction: intents and completions are read as of one moment.
        self._connection = self._database.connect().execution_options(isolation_level="REPEATABLE READ")
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    @property
    def size(self) -> int:
        """Leaves in the log, as this writer knows it."""
        return self._tree.size

    def step(self) -> Step:
        """Sequence what is new, then sign if anything was. Raises AuditDiverged; after any error, open a fresh Sequencer."""
        with self._transaction() as transaction:
            self._require_unchanged(transaction)
            records = store.unsequenced(transaction, self._progress, self._batch)
            if records:
                store.add_leaves(transaction, self._tree.size, records)
        gaps = tuple(self._count(record) for record in records)
        for record in records:
            self._tree.push(leaf_hash(record.body))
        signed = self._published is None or self._published[0] != self._tree.size
        if signed:
            self._publish()
        return Step(len(records), self._tree.size, signed, tuple(gap for gap in gaps if gap))

    def _open(self) -> None:
        with self._transaction() as transaction:
            if not store.occupy_log(transaction):
                raise LogOccupied
        with self._transaction() as transaction:
            self._published = _pair(store.last_checkpoint(transaction))
            size, note = self._published or (0, None)
            published, kept = self._checked(note, "the database's"), self._checked(self._last.read(), "the kept")
            if published and published.size != size:
                raise AuditDiverged(f"the checkpoint of size {published.size} stands at {size}")
            if published and not kept:
                raise AuditDiverged("the file of the last checkpoint is missing: without it a restored database goes unnoticed")
            self._read(transaction, [checkpoint for checkpoint in (published, kept) if checkpoint])
            # Leaves beyond the checkpoint are not signed yet: they count only as copies of their records.
            odd = store.first_mismatch(transaction, size)
            if odd:
                raise AuditDiverged(odd)
            self._progress = store.sequenced(transaction)

    def _read(self, transaction: Transaction, signed: list[Checkpoint]) -> None:
        """Hash every leaf again, and find each of these checkpoints on the way."""
        self._require_roots(signed)
        with closing(store.entries(transaction, 0, MAX_SIZE)) as rows:
            for seq, entry in rows:
                if seq != self._tree.size:
                    raise AuditDiverged(f"leaf {self._tree.size} is missing")
                self._tree.push(leaf_hash(entry))
                self._require_roots(signed)
        for checkpoint in signed:
            if checkpoint.size > self._tree.size:
                raise AuditDiverged(f"rollback: {checkpoint.size} leaves were signed, {self._tree.size} are left")

    def _require_roots(self, signed: list[Checkpoint]) -> None:
        for checkpoint in signed:
            if checkpoint.size == self._tree.size and checkpoint.root != self._tree.root():
                raise AuditDiverged(f"fork: the first {checkpoint.size} leaves are not those that were signed")

    def _require_unchanged(self, transaction: Transaction) -> None:
        size = store.log_size(transaction)
        if size != self._tree.size:
            raise AuditDiverged(f"{size} leaves where this writer left {self._tree.size}")
        if _pair(store.last_checkpoint(transaction)) != self._published:
            raise AuditDiverged("the last checkpoint is not the one this writer left")

    def _count(self, record: store.Record) -> str:
        """Move the worker's counter on; names a gap, which only a row removed or put in by hand can leave."""
        stream = (record.kind, record.worker)
        due = self._progress.get(stream, 0)
        self._progress[stream] = record.counter + 1
        return "" if record.counter == due else f"{record.kind} {record.ref}: counter {record.counter} where {due} is due"

    def _publish(self) -> None:
        note = sign_checkpoint(self._tree.size, self._tree.root(), self._key, self._sign, self._handed)
        self._last.write(note)
        with self._transaction() as transaction:
            self._require_unchanged(transaction)
            store.add_checkpoint(transaction, self._tree.size, note, self._now())
        self._published = (self._tree.size, note)

    def _checked(self, note: str | None, whose: str) -> Checkpoint | None:
        if note is None:
            return None
        try:
            return check_checkpoint(note, self._key)
        except ValueError as error:
            raise AuditDiverged(f"{whose} last checkpoint is not ours: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        with self._connection.begin():
            yield self._connection

    def _release(self) -> None:
        # Handing the connection back to the pool would keep the lock: end it instead.
        self._connection.invalidate()
        self._connection.close()


def _pair(row: Sequence[Any] | None) -> tuple[int, str] | None:
    return None if row is None else (row[0], row[1])
