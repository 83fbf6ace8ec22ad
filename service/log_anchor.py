"""Where the audit log goes on from, when its newest signed end is not in the database: officers' word on it (`log.reanchor`).

The log keeps its newest checkpoint in a file of its own, so that a database put back, or another one, is noticed at the next start.
Officers sign exactly the checkpoint that is given up and the one that the log goes on from, for one site. The checkpoint that is
given up stays beside the new one, and the act is an entry of the log: whoever holds the older end sees the fork and its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from hashlib import sha256
from typing import Any

from keyvault.approval_kinds import Facts, Kind, Request, explained, quorum_for
from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.sync.durable import SiteParts
from keyvault.sync.errors import ApprovalInvalid
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.store import lasting
from policies.audit import store as log_store
from policies.audit.checkpoint import LastCheckpoint
from policies.audit.errors import AuditDiverged
from policies.audit.verify import Frontier, VerifierKey, check_checkpoint, leaf_hash
from service.inboxes import asked_by_site
from service.log.process import engine
from service.settings import Settings

SUPERSEDED, USED = "superseded", "used"


def ends(settings: Settings, key: VerifierKey) -> dict[str, Any]:
    """Step: the log's newest checkpoint in its file and in the database (empty for none), and whether the log would go on so."""
    kept = LastCheckpoint(settings.checkpoint_file).read() or ""
    with engine(settings.role_url("log")).connect() as connection:
        row = log_store.last_checkpoint(connection)
        note = "" if row is None else str(row.note)
        return {"kept": kept, "database": note, "parted": _parted(connection, key, kept, note)}


def _parted(connection: Transaction, key: VerifierKey, kept: str, note: str) -> bool:
    """Whether the file's end is not in the database's log: the log process would not start."""
    if not kept:
        return bool(note)
    try:
        end = check_checkpoint(kept, key)
    except ValueError as error:
        raise AuditDiverged(f"the kept checkpoint is not ours: {error}") from error
    tree = Frontier()
    with closing(log_store.entries(connection, 0, end.size)) as rows:
        for _, entry in rows:
            tree.push(leaf_hash(entry))
    return tree.size != end.size or tree.root() != end.root


def request(parts: SiteParts, roster: Roster, found: Mapping[str, str], reason: str) -> Request:
    """The request, signed by this site, that its log goes on from the database's end."""
    facts: Facts = {"site": parts.name, "kept": found["kept"], "database": found["database"], "reason": reason}
    subject = explained(Kind.REANCHOR, roster.cluster, facts).subject
    return asked_by_site(parts, roster.cluster, Kind.REANCHOR, subject, facts)


def approve(parts: SiteParts, roster: Roster, asked: Request, found: Mapping[str, str]) -> None:
    """Check that officers approved exactly this, for the ends as they are now, and record it. Raises what the approvals lack."""
    asked.meaning()
    facts, operation = asked.facts, asked.operation
    if (operation.kind, operation.cluster) != (Kind.REANCHOR, roster.cluster):
        raise ApprovalInvalid("the request is about something else")
    if (facts["site"], facts["kept"], facts["database"]) != (parts.name, found["kept"], found["database"]):
        raise ApprovalInvalid("the request is about another site, or about other ends of the log than there are now")
    quorum_for(operation.kind, roster).check(operation, asked.approvals, verify_p256, parts.clock())
    by = " ".join(sorted({one.person for one in asked.approvals if one.role == "approve"}))
    said: dict[str, str | int] = {"operation": operation.digest.hex(), "by": by}
    said |= {name: sha256(found[name].encode()).hexdigest() for name in ("kept", "database")}
    with lasting(parts.database) as transaction:
        parts.recorder.record(transaction, KeyEvent("log.reanchored", said))


def move(settings: Settings, *, kept: str, database: str, operation: str) -> dict[str, Any]:
    """Step: let the log go on from the database's end, once by this `operation` (its digest); the other end stays for auditors.

    Whoever puts file and database back as they were finds the approval used up. Raises ApprovalInvalid.
    """
    last = LastCheckpoint(settings.checkpoint_file)
    used = settings.checkpoint_file.with_name(f"operation.{operation[:32]}.{USED}")
    if used.exists():
        raise ApprovalInvalid("the log went on by this approval once: ask officers anew")
    with engine(settings.role_url("log")).connect() as connection:
        row = log_store.last_checkpoint(connection)
    if (last.read() or "", "" if row is None else str(row.note)) != (kept, database):
        raise ApprovalInvalid("the ends of the log are others than those that were approved")
    aside = None
    if kept:
        size, digest = int(kept.split("\n")[1]), sha256(kept.encode()).hexdigest()[:8]
        aside = settings.checkpoint_file.with_name(f"checkpoint.{size}.{digest}.{SUPERSEDED}")
        LastCheckpoint(aside).write(kept)
    if database:
        last.write(database)
    else:
        settings.checkpoint_file.unlink()
    LastCheckpoint(used).write(database)
    return {"from": 0 if row is None else row.size, "kept": None if aside is None else str(aside)}
