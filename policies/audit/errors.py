"""What the audit log refuses or finds. Each error's `code` is stable; `detail` says what and where, for operators."""

from __future__ import annotations

from policies import errors
from policies.errors import PolicyError


class AuditError(PolicyError):
    """The audit log refused."""

    code = "audit_error"
    fix = "Run `glottis doctor`; it names the part that fails."


class AuditUnavailable(AuditError, errors.AuditUnavailable):
    """The audit log could not be written, so nothing was done."""

    # One fact, two trees: the gate must take it for what it is, whoever raises it.
    code = errors.AuditUnavailable.code
    fix = "Retry; if it lasts, look at the database and its disk with `glottis doctor`. The token was not used up."


class RecordInvalid(AuditError):
    """This cannot be recorded: audit records hold short texts, whole numbers and nothing else."""

    code = "audit_record_invalid"
    fix = "Give details as texts, whole numbers or nothing, under names of a-z, 0-9, dot, dash and underscore."


class CompletionRefused(AuditError):
    """This intent is unknown or already has its completion."""

    code = "audit_completion_refused"
    fix = "Complete each intent once, after the transaction that wrote it has committed."


class AuditTampered(AuditError):
    """An audit row is not as it was written."""

    code = "audit_tampered"
    fix = "Somebody changed the database outside Glottis: keep it as evidence, and compare with a backup and an export."


class AuditDiverged(AuditError):
    """The audit log does not continue the one that was signed before; nothing more is signed."""

    code = "audit_diverged"
    fix = (
        "The database was changed or restored to an older state: keep it as evidence, and restore the newest backup;"
        " officers may adopt an older one: glottis restore request."
    )


class SigningFailed(AuditError):
    """The token's signature over a checkpoint does not hold, so it was not published."""

    code = "audit_signing_failed"
    fix = "Check the log token with `glottis doctor`: it signed with another key than the one it shows."


class LogOccupied(AuditError):
    """Another process is sequencing this log."""

    code = "audit_log_occupied"
    fix = "Run one log process for a database; after a crash the lock goes with the old connection."


class LogEmpty(AuditError):
    """The audit log has no checkpoint yet."""

    code = "audit_log_empty"
    fix = "Start the log process; it signs its first checkpoint at once."


class RangeRefused(AuditError):
    """These entries are not in the audit log."""

    code = "audit_range_refused"
    fix = "Ask for entries below the newest checkpoint's size."
