"""Audit bundles: written from the log's tables, checked by the verifier as an auditor runs it, alone in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import policies.audit.verify
from policies.audit.export import Range, export
from service import step
from service.errors import RecordsTampered
from service.isolation import establish
from service.schema import opened
from service.settings import Settings
from service.site import Site


@dataclass(frozen=True)
class Verdict:
    """What the verifier said, in its own words, and whether everything holds."""

    holds: bool
    said: str


def check_records(settings: Settings) -> int:
    """Check every audit record with the serving token, under the vault's user; returns how many there are.

    The log signs what stands in its tables and holds no MAC key: only this finds an entry that no vault wrote.
    Raises RecordsTampered naming the first such row, and StepFailed.
    """
    isolation = establish(settings.state_dir, settings.site)
    groups = isolation.database_groups(embedded=settings.embedded)
    found = step.call(settings, isolation.vault, "check_audit", groups=groups)
    if "tampered" in found:
        raise RecordsTampered(f"an audit record does not hold: {found['tampered']}")
    return int(found["rows"])


def export_bundle(settings: Settings, path: Path, *, wanted: Range | None = None, since: str | None = None) -> int:
    """Write the log's entries under its newest checkpoint to `path`; returns how many the checkpoint covers.

    The file appears whole or not at all, and in place of nothing that is there. Raises FileExistsError, LogEmpty,
    RangeRefused, AuditDiverged.
    """
    site = Site.load(settings.site_file)
    unfinished = path.with_name(f".glottis-{token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with (
            os.fdopen(os.open(unfinished, flags, 0o666), "w", encoding="utf-8") as file,
            opened(settings.role_url("log")) as database,
        ):
            size = export(database, site.audit_key, file, wanted=wanted or Range(), since=since).size
        os.link(unfinished, path)  # a rename would replace what came to stand there meanwhile
    finally:
        unfinished.unlink(missing_ok=True)
    return size


def verify_bundle(path: Path, fingerprint: str) -> Verdict:
    """Run the one-file verifier on a bundle against a fingerprint that the auditor got elsewhere."""
    argv = [sys.executable, "-I", "-S", str(policies.audit.verify.__file__), str(path), "--fingerprint", fingerprint]
    done = subprocess.run(argv, capture_output=True, check=False, text=True, timeout=120)
    return Verdict(done.returncode == 0, (done.stdout + done.stderr).strip())
