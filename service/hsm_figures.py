"""What each process that holds a token says of its sessions: how often they were lost and healed, since it started.

Every loss is healed by the process itself, and one that goes on opens the circuit breaker, which the audit log has. These counts
show what would otherwise be quiet: a module, a network or a token that keeps failing for a moment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from service.findings import Finding

FIGURES_PATH = "/hsm"
"""Where a vault worker says them, on its own Unix socket alone."""
_ANSWER_S = 5.0
_WORDS = {"recoveries": "recoveries", "sessions_replaced": "sessions replaced", "timeouts": "calls that timed out"}


def worker_figures(path: Path) -> dict[str, int]:
    """What the vault worker at this Unix socket counted; empty where none answers."""
    connection = http.client.HTTPConnection("vault")
    with socket.socket(socket.AF_UNIX) as unix, contextlib.closing(connection):
        unix.settimeout(_ANSWER_S)
        try:
            unix.connect(str(path))
            connection.sock = unix
            connection.request("GET", FIGURES_PATH, headers={"Connection": "close"})
            found = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
    return {name: int(found[name]) for name in _WORDS if name in found}


def hsm_finding(process: str, figures: Mapping[str, int], logs: Path) -> Finding:
    """The counts of one process, worth a note unless all are 0."""
    part = f"hsm of {process}"
    if not any(figures.values()):
        return Finding(part, "ok", "no session was lost and no call timed out since it started", figures=figures)
    said = ", ".join(f"{_WORDS.get(name, name)}: {count}" for name, count in figures.items() if count)
    mend = f"Find out why the token was lost for a moment: {logs / process}.log, the module's own log, docs/hsm-door.md."
    return Finding(part, "note", f"{said}, since it started; each time it went on by itself", mend, figures=figures)
