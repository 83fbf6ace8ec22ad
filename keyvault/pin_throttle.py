"""The PIN in this process, and a pause before it is tried again once a token has refused it.

A real token locks itself after a few wrong PINs, and whatever starts processes again would use them all up. So a refusal
leaves a small file beside the token; while its pause lasts, a start is refused without asking the token. The pause doubles
with each refusal and the file goes with the first PIN that is accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from keyvault.errors import PinThrottled
from keyvault.locked import LockedBuffer

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
USER_FILE, OFFICER_FILE = ".pin-rejected", ".so-pin-rejected"
"""The user's refusals and the security officer's are counted apart, as the token counts them."""


class HeldPin:
    """A PIN kept for one more login after a loss: in locked memory, in no dump and no repr."""

    def __init__(self, pin: str) -> None:
        secret = pin.encode()
        self._length = len(secret)
        self._buffer = LockedBuffer(max(self._length, 1))
        self._buffer.view(0, self._length)[:] = bytearray(secret)

    def read(self) -> str:
        """The PIN, for C_Login."""
        return bytes(self._buffer.view(0, self._length)).decode()

    def forget(self) -> None:
        """Overwrite it: no later login of this process can use it."""
        self._buffer.wipe()
        self._length = 0

    def __repr__(self) -> str:
        return "HeldPin(…)"


class PinThrottle:
    """Refusals of one token's PIN, kept in `folder` across starts; None keeps nothing."""

    def __init__(self, folder: Path | None, serial: str, clock: Callable[[], float] = time.time, *, file: str = USER_FILE) -> None:
        self._path = folder / file if folder is not None else None
        self._serial, self._clock = serial, clock

    def require_rested(self) -> None:
        """Raises PinThrottled while the pause after a refusal lasts."""
        refusals, when = self._found()
        left = pause_after(refusals) - abs(self._clock() - when) if refusals else 0.0
        if left > 0:
            raise PinThrottled(f"the token refused the PIN {refusals} times; it is not asked again for {left:.0f} s")

    def refused(self) -> None:
        """Count one refusal, durably."""
        if self._path is None:
            return
        refusals, _ = self._found()
        note = json.dumps({"serial": self._serial, "refusals": refusals + 1, "when": self._clock()}).encode()
        fresh = self._path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, note)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fresh.replace(self._path)

    def accepted(self) -> None:
        """Forget the refusals."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _found(self) -> tuple[int, float]:
        """Refusals so far and the last one's time; what cannot be read counts as one just now, a token's other serial as none."""
        if self._path is None:
            return 0, 0.0
        with contextlib.suppress(FileNotFoundError):
            try:
                note = json.loads(self._path.read_bytes())
                return (int(note["refusals"]), float(note["when"])) if note["serial"] == self._serial else (0, 0.0)
            except (ValueError, KeyError, TypeError):
                return 1, self._path.stat().st_mtime
        return 0, 0.0


def pause_after(refusals: int) -> float:
    """Seconds that no login is tried after so many refusals in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(refusals - 1, 20), LONGEST_PAUSE_S)
