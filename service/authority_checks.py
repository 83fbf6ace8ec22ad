"""What `glottis doctor` says of customers' authorities: when their certificates and their lists of revoked ones end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from service.certificates import RENEW_DAYS
from service.edge.authorities import FOLDER, trusted
from service.edge.revocations import Trusted
from service.exits import Exit
from service.findings import Finding
from service.settings import Settings

SOON = timedelta(days=2)
"""So long before a list ends it is named: most authorities give one out every day or week."""


def authorities(settings: Settings) -> Iterator[Finding]:
    """One finding for each authority that is trusted beside our own."""
    now = datetime.now(UTC)
    for file in sorted((settings.tls_dir / FOLDER).glob("*.pem")):
        try:
            yield _finding(trusted(file), now)
        except (OSError, ValueError):
            mend = f"Bring its file again: glottis clients distrust-ca {file.stem}, then trust-ca."
            yield Finding(f"authority {file.stem}", "fails", "its file cannot be read: nobody comes in by it", mend, Exit.LOCAL)


def _finding(known: Trusted, now: datetime) -> Finding:
    part, ends = f"authority {known.name}", min(one.not_valid_after_utc for one in known.certificates)
    newer = f"Bring its newest list: glottis clients update-crl {known.name} FILE"
    until = min((one.next_update for one in known.lists), default=None)
    said = f"its certificate ends on {ends:%Y-%m-%d}" + (
        "" if until is None else f", its list of revoked ones {until:%Y-%m-%d %H:%M}"
    )
    if ends <= now:
        return Finding(part, "fails", said, "Let the customer bring another: glottis clients trust-ca.", Exit.LOCAL)
    if known.unreadable:
        return Finding(part, "fails", "its list of revoked certificates does not hold: nobody comes in by it", newer, Exit.LOCAL)
    if known.required and (until is None or until <= now):
        return Finding(part, "fails", f"{said}: without a current list nobody comes in by it", newer, Exit.LOCAL)
    if until is not None and until <= now + SOON:
        return Finding(part, "note", said, newer)
    if ends <= now + timedelta(days=RENEW_DAYS):
        return Finding(part, "note", said, "Let the customer bring another in time: glottis clients trust-ca.")
    return Finding(part, "ok", said)
