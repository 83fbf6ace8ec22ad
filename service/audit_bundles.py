"""Audit bundles: written from the log's tables, checked by the verifier as an auditor runs it, alone in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import policies.audit.verify
from policies.audit.export import Range, export
from service.schema import opened
from service.settings import Settings
from service.site import Site


@dataclass(frozen=True)
class Verdict:
    """What the verifier said, in its own words, and whether everything holds."""

    holds: bool
    said: str


def export_bundle(settings: Settings, path: Path, *, wanted: Range | None = None, since: str | None = None) -> int:
    """Write the log's entries under its newest checkpoint to `path`; returns how many the checkpoint covers.

    Raises LogEmpty, RangeRefused, AuditDiverged.
    """
    site = Site.load(settings.site_file)
    with opened(settings.role_url("log")) as database, path.open("w", encoding="utf-8") as file:
        return export(database, site.audit_key, file, wanted=wanted or Range(), since=since).size


def verify_bundle(path: Path, fingerprint: str) -> Verdict:
    """Run the one-file verifier on a bundle against a fingerprint that the auditor got elsewhere."""
    argv = [sys.executable, "-I", "-S", str(policies.audit.verify.__file__), str(path), "--fingerprint", fingerprint]
    done = subprocess.run(argv, capture_output=True, check=False, text=True, timeout=120)
    return Verdict(done.returncode == 0, (done.stdout + done.stderr).strip())
