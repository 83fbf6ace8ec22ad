"""What the vault appends to the audit log's tables, and what the log process sequences.

A worker's counter has no gaps: it is taken from the table under an advisory lock that Postgres holds until the transaction
ends, so a rolled-back number is given out again and numbers follow the order of commits. A missing row shows. The database is
not believed: what it wrote must come back as it was given, and a table behind what a worker has committed is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import Row, Select, func, insert, select, text
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from keyvault.database import Database, Rows, Statement, Transaction, send
from keyvault.errors import HsmUnavailable
from keyvault.hsm import Hsm, KeyName
from keyvault.records import canonical
from policies.audit import record
from policies.audit.errors import AuditDiverged, AuditTampered, AuditUnavailable, CompletionRefused
from policies.audit.record import Stamp
from policies.audit.tables import LAST, NEWEST, RECORDED, TAKE_LOCK, WRITE, checkpoints, completions, details, intents, leaves
from policies.audit.verify import strict_json
from policies.intents import Intent

_CHUNK = 2000
_PSEUDONYMS = 4096
_DURABLE = text("SET LOCAL synchronous_commit = on")


@dataclass
class _Given:
    """The counter that a worker gave out last, in which transaction and when, and the highest that it knows to be committed."""

    counter: int = -1
    xid: str | None = None
    moment: int = 0
    committed: int = -1


class _Found(NamedTuple):
    """What the statement `LAST` says: the table's highest counter, the fate of the transaction asked about, this one's xid."""

    last: int | None
    asked: str | None
    fate: str | None
    xid: str


class AuditStore:
    """Implements `policies.intents.Intents` with the serving token. One for each start of a worker process; any thread."""

    def __init__(self, database: Database, hsm: Hsm, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._database, self._hsm, self._now = database, hsm, now
        self.worker = str(uuid4())
        self._given = {kind: _Given() for kind in RECORDED}  # each guarded by the advisory lock of its kind
        self._moments = count(1)
        self._locks = {kind: _lock(kind, self.worker) for kind in RECORDED}
        # The same name always has the same pseudonym: those in use are kept, so that each costs one call of the token.
        self._pseudonym = lru_cache(_PSEUDONYMS)(lambda data: hsm.mac(KeyName.AUDIT_PSEUDONYM, data))

    def place(self) -> tuple[Statement, ...]:
        """What `append` has to know: the caller may send it with statements of its own, as the last thing before it decides."""
        return self._place("intent")

    def append(
        self, transaction: Transaction, intent: Intent, place: Sequence[Rows] | None = None, *, commit: bool = False
    ) -> UUID:
        """Write intent and sealed details so that they commit with `transaction` (READ COMMITTED) or not at all.

        `place`: the answers to the statements of `place`, if they were sent. With `commit` the transaction ends here, in the
        same round trip: on return it is durable. This worker's other appends wait until that transaction ends, so commit soon,
        and take no savepoints. Raises AuditUnavailable, also where the database did not keep the rows, and RecordInvalid; then
        roll back.
        """
        intent_id = uuid4()
        with _unavailable():
            # From the operating system: it is secret only from those who see the leaf, and the process knows the values anyway.
            salt = secrets.token_bytes(32)
            fields = record.intent_fields(intent_id, intent, salt, self._pseudonym)
            shown = record.detail_bytes(salt, intent.details)
            sealed = self._hsm.seal(KeyName.AUDIT_DETAIL, shown, record.detail_context(intent_id))
            found = self._found(transaction, "intent", place)
            self._write(transaction, "intent", found, intent_id, fields, sealed=sealed, commit=commit)
        return intent_id

    def complete(self, intent_id: UUID, outcome: str, facts: dict[str, str | int], *beside: Statement) -> None:
        """Record, in a transaction of its own, what came of an intent, with statements `beside`: durable on return.

        Raises AuditUnavailable, RecordInvalid, and CompletionRefused for an unknown or completed intent.
        """
        fields = record.completion_fields(intent_id, outcome, facts)
        with _unavailable(), self._database.begin() as transaction:
            _, *place = send(transaction, (_DURABLE, {}), *beside, *self._place("completion"))
            found = self._found(transaction, "completion", place)
            self._write(transaction, "completion", found, intent_id, fields, commit=True)

    def disclose(self, intent_id: UUID, names: frozenset[str] | None = None) -> dict[str, dict[str, record.Value]]:
        """Open an intent's details, all or these names, each with its salt; empty once erased. Raises SealBroken."""
        with _unavailable(), self._database.connect() as connection:
            sealed = connection.scalar(select(details.c.sealed).where(details.c.intent_id == intent_id))
            if sealed is None:
                return {}
            opened = self._hsm.unseal(KeyName.AUDIT_DETAIL, sealed, record.detail_context(intent_id))
        return record.disclosures(opened, names)

    def check_macs(self) -> int:
        """Check every recorded row: MAC, columns against body, counters without gaps, and that its leaf still matches it.

        Returns the number of rows. Raises AuditTampered naming the first bad one. A worker's newest rows can vanish unseen
        only until they are sequenced, which is a fraction of a second.
        """
        with _unavailable(), self._database.connect() as connection:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
            checked = sum(self._check_rows(connection, kind) for kind in RECORDED)
            first = first_mismatch(connection, 0)
        if first:
            raise AuditTampered(first)
        return checked

    def _check_rows(self, connection: Transaction, kind: str) -> int:
        table = RECORDED[kind]
        checked, due = 0, ("", 0)
        with closing(_stream(connection, select(table).order_by(table.c.worker, table.c.counter))) as rows:
            for row in rows:
                if row.worker != due[0]:
                    due = (row.worker, 0)
                if row.counter != due[1]:
                    raise AuditTampered(f"{kind} {row.intent_id}: worker {row.worker} counts {row.counter} where {due[1]} is due")
                if not hmac.compare_digest(self._mac(kind, row.body), row.mac):
                    raise AuditTampered(f"{kind} {row.intent_id}: its MAC does not hold")
                if not _columns_match(kind, row):
                    raise AuditTampered(f"{kind} {row.intent_id}: its columns are not those of its body")
                checked, due = checked + 1, (row.worker, row.counter + 1)
        return checked

    def _place(self, kind: str) -> tuple[Statement, ...]:
        """This worker's lock, and after it where its records end. Two statements: the second must see what the lock's last
        holder committed."""
        last = {"of_worker": self.worker, "of_xid": self._given[kind].xid}
        return (TAKE_LOCK, {"lock": self._locks[kind]}), (LAST[kind], last)

    def _found(self, transaction: Transaction, kind: str, place: Sequence[Rows] | None) -> _Found:
        """What the statements of `_place` found: sent now, if nobody did, or if another thread wrote after they were put."""
        if place is None:
            place = send(transaction, *self._place(kind))
        found, given = _Found(*place[-1][0]), self._given[kind]
        if found.asked != given.xid:
            place = send(transaction, self._place(kind)[-1])
            found = _Found(*place[-1][0])
        # A crash ends every connection, and Postgres may then give the number of a transaction that it lost to another one. Only
        # a connection that is older than the transaction, and answers, shows that there was no crash since.
        known_since = transaction.connection.info.setdefault(self.worker, next(self._moments))
        return found if known_since < given.moment else found._replace(fate=None)

    def _write(
        self,
        transaction: Transaction,
        kind: str,
        found: _Found,
        intent_id: UUID,
        fields: Mapping[str, Any],
        *,
        commit: bool,
        **more: bytes,
    ) -> None:
        counter = self._next(kind, found)
        body = record.body(fields, Stamp(self.worker, counter, self._now()))
        values = {"intent_id": intent_id, "worker": self.worker, "counter": counter, "body": body, "mac": self._mac(kind, body)}
        given = self._given[kind]
        # Before it may be committed, while the lock is surely held.
        given.counter, given.xid, given.moment = counter, found.xid, next(self._moments)
        [written] = send(transaction, (WRITE[kind], values | more), commit=commit)
        if [row[:-1] for row in written] != [tuple((values | more).values())]:
            raise AuditUnavailable(f"the database did not write the {kind} that it was given")
        if commit:  # the lock is gone: another thread may be further
            given.committed = max(given.committed, counter)

    def _next(self, kind: str, found: _Found) -> int:
        """The counter that is due. Raises AuditUnavailable, from then on, if the table lost what this worker had committed.

        The lock's last holder has ended by now, so Postgres knows its fate. A transaction of our own still in progress counts
        here too, but is not remembered. If its fate is forgotten (too old, or there may have been a crash), nothing follows.
        """
        given, last = self._given[kind], -1 if found.last is None else found.last
        if found.fate == "committed":
            given.committed = max(given.committed, given.counter)
        due = max(given.committed, given.counter) if found.fate == "in progress" else given.committed
        if last < due:
            raise AuditUnavailable(f"{kind}s of worker {self.worker} end at {last}, but {due} was written: the table was changed")
        return last + 1

    def _mac(self, kind: str, body: bytes) -> bytes:
        return self._hsm.mac(KeyName.RECORD_MAC, canonical(f"audit-{kind}", body))


@dataclass(frozen=True)
class Record:
    """A recorded row on its way into the log."""

    kind: str
    ref: UUID
    worker: str
    counter: int
    body: bytes


Progress = dict[tuple[str, str], int]
"""For each kind and worker, the counter that is to be sequenced next."""


def occupy_log(connection: Transaction) -> bool:
    """Take the single writer's lock for as long as this connection lives; False while another holds it."""
    return bool(connection.scalar(select(func.pg_try_advisory_lock(_lock("log", "single writer")))))


def log_size(connection: Transaction) -> int:
    """Leaves in the table, going by the highest sequence number."""
    last = connection.scalar(select(func.max(leaves.c.seq)))
    return 0 if last is None else int(last) + 1


def last_checkpoint(connection: Transaction) -> Row[int, str] | None:
    """(size, note) of the largest size."""
    wanted = select(checkpoints.c.size, checkpoints.c.note).order_by(checkpoints.c.size.desc()).limit(1)
    return connection.execute(wanted).one_or_none()


def checkpoint_sizes(connection: Transaction, start: int, end: int) -> Generator[Row[int, str], None, None]:
    """(size, note) of each checkpoint with start < size <= end, in order."""
    wanted = select(checkpoints.c.size, checkpoints.c.note).where(checkpoints.c.size > start, checkpoints.c.size <= end)
    yield from _stream(connection, wanted.order_by(checkpoints.c.size))


def add_checkpoint(connection: Transaction, size: int, note: str, now: datetime) -> None:
    """Publish a signed note."""
    connection.execute(insert(checkpoints), {"size": size, "note": note, "created_at": now})


def add_leaves(connection: Transaction, start: int, records: Sequence[Record]) -> None:
    """Give these records the sequence numbers from `start` on. Raises AuditDiverged where a number or record has one already."""
    rows = [{"seq": seq, "kind": row.kind, "ref": row.ref, "entry": row.body} for seq, row in enumerate(records, start)]
    try:
        connection.execute(insert(leaves), rows)
    except IntegrityError as error:
        raise AuditDiverged(f"a record already sequenced came again near leaf {start}") from error


def entries(connection: Transaction, start: int, end: int) -> Generator[Row[int, bytes], None, None]:
    """(seq, entry) of leaves [start, end), in order."""
    wanted = select(leaves.c.seq, leaves.c.entry).where(leaves.c.seq >= start, leaves.c.seq < end)
    yield from _stream(connection, wanted.order_by(leaves.c.seq))


def entries_with_records(
    connection: Transaction, start: int, end: int
) -> Generator[Row[int, str, UUID, bytes, bytes | None], None, None]:
    """(seq, kind, ref, entry, body) of leaves [start, end): the entry as sequenced, and the body that its table holds now."""
    wanted = select(leaves.c.seq, leaves.c.kind, leaves.c.ref, leaves.c.entry, _BODY).select_from(_LEAVES_AND_RECORDS)
    yield from _stream(connection, wanted.where(leaves.c.seq >= start, leaves.c.seq < end).order_by(leaves.c.seq))


def first_mismatch(connection: Transaction, start: int) -> str | None:
    """Names the first leaf from `start` on whose record is missing or differs from it."""
    wanted = select(leaves.c.seq, leaves.c.kind, leaves.c.ref).select_from(_LEAVES_AND_RECORDS)
    wanted = wanted.where(leaves.c.seq >= start, _BODY.is_distinct_from(leaves.c.entry)).order_by(leaves.c.seq).limit(1)
    row = connection.execute(wanted).one_or_none()
    return f"{row.kind} {row.ref}: the record is missing or differs from leaf {row.seq}" if row else None


def sequenced(connection: Transaction) -> Progress:
    """Where each worker's sequenced records end."""
    progress: Progress = {}
    for kind, table in RECORDED.items():
        joined = leaves.join(table, (leaves.c.kind == kind) & (leaves.c.ref == table.c.intent_id))
        ends = select(table.c.worker, func.max(table.c.counter)).select_from(joined).group_by(table.c.worker)
        progress |= {(kind, worker): last + 1 for worker, last in connection.execute(ends)}
    return progress


def unsequenced(connection: Transaction, progress: Progress, limit: int) -> list[Record]:
    """Records not yet in the log, at most `limit` of each worker: intents first, then by worker and counter.

    Completions come only when no intent is left behind, so that each stands after its intent (one snapshot: REPEATABLE READ).
    """
    found: list[Record] = []
    for kind, table in RECORDED.items():
        whole = True
        for worker, last in connection.execute(NEWEST[kind]).all():
            due = progress.get((kind, worker), 0)
            if last < due:
                continue
            wanted = select(table).where(table.c.worker == worker, table.c.counter >= due).order_by(table.c.counter).limit(limit)
            rows = connection.execute(wanted).all()
            whole = whole and len(rows) < limit
            found += [Record(kind, row.intent_id, row.worker, row.counter, row.body) for row in rows]
        if not whole:
            break
    return found


_LEAVES_AND_RECORDS = leaves.outerjoin(intents, (leaves.c.kind == "intent") & (leaves.c.ref == intents.c.intent_id)).outerjoin(
    completions, (leaves.c.kind == "completion") & (leaves.c.ref == completions.c.intent_id)
)
_BODY = func.coalesce(intents.c.body, completions.c.body)


def _stream(connection: Transaction, statement: Select[Any]) -> Generator[Any, None, None]:
    with connection.execute(statement.execution_options(yield_per=_CHUNK)) as result:
        yield from result


def _lock(*names: str) -> int:
    digest = hashlib.sha256(canonical("audit-lock", *names)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _columns_match(kind: str, row: Row[Any]) -> bool:
    """Does a body whose MAC holds belong to this row?"""
    body = strict_json(row.body)
    return (body["kind"], body["id"], body["worker"], body["counter"]) == (kind, str(row.intent_id), row.worker, row.counter)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Say in one word that the log cannot be written or read; a completion that cannot be is told apart."""
    try:
        yield
    except IntegrityError as error:
        if getattr(getattr(error.orig, "diag", None), "constraint_name", None) in _NO_COMPLETION:
            raise CompletionRefused from error
        raise AuditUnavailable(type(error).__name__) from error
    except (SQLAlchemyError, HsmUnavailable) as error:
        raise AuditUnavailable(type(error).__name__) from error


_NO_COMPLETION = ("pk_completion", "fk_completion_intent_id_intent")
