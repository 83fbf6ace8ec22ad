"""What `glottis doctor` found about one part, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.exits import Exit


@dataclass(frozen=True)
class Finding:
    """One part: `ok`, worth a `note`, or it `fails`; then `mend` says what to do and `exit` what the command ends with.
    `figures` are counts, where the part has some."""

    part: str
    state: Literal["ok", "note", "fails"]
    said: str
    mend: str = ""
    exit: Exit = Exit.OK
    figures: Mapping[str, int] | None = None
