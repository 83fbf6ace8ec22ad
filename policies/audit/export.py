"""The auditor's bundle: one file of JSON lines that `verify.py` checks alone.

First line: the log's key, the first entry's number, and the hashes of the complete subtrees before it. Then each entry,
exact, with the leaf hash of the record that its table holds now (an edit of either side is named), and the log's older
checkpoints where they belong, with the other site's signature where that co-signed them. Last line: the hashes of the subtrees
after it, the newest checkpoint, and on request the proof from a checkpoint that the auditor kept. Nothing is opened but what
the caller discloses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TextIO
from uuid import UUID

from keyvault.database import Database, Transaction
from policies.audit import store
from policies.audit.errors import AuditDiverged, LogEmpty, RangeRefused
from policies.audit.record import Value
from policies.audit.tree import Tree
from policies.audit.verify import Checkpoint, VerifierKey, check_checkpoint, leaf_hash
from policies.witness.store import lines

Disclose = Callable[[UUID], Mapping[str, Mapping[str, Value]]]
"""For an intent: each detail to be shown, with its salt (`AuditStore.disclose`); empty for none."""


@dataclass(frozen=True)
class Range:
    """Entries [start, end); without an end, up to the newest checkpoint."""

    start: int = 0
    end: int | None = None


def export(
    database: Database,
    key: VerifierKey,
    file: TextIO,
    *,
    wanted: Range = Range(),
    since: str | None = None,
    disclose: Disclose | None = None,
) -> Checkpoint:
    """Write a bundle under the newest checkpoint and return that.

    Raises LogEmpty before the first checkpoint, RangeRefused for entries that are not in it or a `since` beyond it, and
    AuditDiverged if that checkpoint is not the log's. A log that was tampered with is exported as it is: the verifier names
    what does not hold.
    """
    with database.connect() as connection:
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
        last = store.last_checkpoint(connection)
        if last is None:
            raise LogEmpty
        note, head = last.note, _checked(last.note, key)
        start, end = wanted.start, head.size if wanted.end is None else wanted.end
        if not 0 <= start <= end <= head.size:
            raise RangeRefused(f"entries {start} to {end} of {head.size}")
        tree = Tree(leaf_hash(row.entry) for row in store.entries(connection, 0, head.size))
        # Where leaves were taken away there are fewer than were signed: the verifier says so.
        start, end = min(start, tree.size), min(end, tree.size)
        before, after = tree.cover(0, start), tree.cover(end, tree.size)
        cosigned = {noted: f"{noted}{line}\n" for noted, line in lines(connection, key.fingerprint).items()}
        _line(file, {"glottis_audit_bundle": 1, "key": key.text, "first": start, "left": _hexadecimal(before)})
        _entries(connection, file, start, end, disclose, cosigned)
        proof = None if since is None else _consistency(tree, _checked(since, key).size)
        _line(file, {"end": end, "right": _hexadecimal(after), "checkpoint": cosigned.get(note, note), "consistency": proof})
    return head


def _entries(
    connection: Transaction, file: TextIO, start: int, end: int, disclose: Disclose | None, cosigned: Mapping[str, str]
) -> None:
    marks = list(store.checkpoint_sizes(connection, start, end - 1))
    with closing(store.entries_with_records(connection, start, end)) as rows:
        for seq, kind, ref, entry, body in rows:
            while marks and marks[0].size <= seq:
                note = marks.pop(0).note
                _line(file, {"checkpoint": cosigned.get(note, note)})
            # Bytes that are not UTF-8 (an edited entry) travel as lone surrogates.
            line: dict[str, Any] = {"seq": seq, "entry": entry.decode("utf-8", "surrogateescape")}
            line["leaf"] = leaf_hash(entry if body is None else body).hex()
            shown = disclose(ref) if disclose and kind == "intent" else {}
            if shown:
                line["disclosed"] = shown
            _line(file, line)


def _consistency(tree: Tree, old: int) -> dict[str, Any] | None:
    if old > tree.size:
        raise RangeRefused(f"the log has {tree.size} entries, fewer than the checkpoint given: {old}")
    return {"from": old, "proof": _hexadecimal(tree.consistency(old, tree.size))} if old else None


def _checked(note: str, key: VerifierKey) -> Checkpoint:
    try:
        return check_checkpoint(note, key)
    except ValueError as error:
        raise AuditDiverged(f"not this log's checkpoint: {error}") from error


def _hexadecimal(hashes: list[bytes]) -> list[str]:
    return [digest.hex() for digest in hashes]


def _line(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
