"""The versions of the log's checkpoint key: which one signs, and the hand-over to a newer one that was made in the token.

1. `make_next` makes the next version, in a process of its own under the log's user.
2. The log process sees it, audits the token again, signs the hand-over with the version that signed so far, and keeps that line
   durably in its own folder. From then on only the new one signs.
3. The old version is destroyed in the token at once: nothing that it signed needs it again.

A crash before the line is kept hands over again; one after it destroys again. Each checkpoint carries every line, so that whoever
pinned the log's first key follows (`policies/audit/verify.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from keyvault.errors import KeyNotFound, SignerRotating
from keyvault.hsm import KeyName, SiteHsm
from policies.audit.checkpoint import HandOvers, LastCheckpoint, hand_over, newest_key, verifier_key
from policies.audit.errors import SigningFailed
from policies.audit.verify import VerifierKey, parse_checkpoint

LOOK_S = 2.0
"""How often the running log looks for a newer version in its token."""
_NAME = KeyName.CHECKPOINT_SIGNER
_log = structlog.get_logger()


class CheckpointKeys:
    """What signs the log's checkpoints. `first` is the log's first key, which auditors pin."""

    def __init__(self, hsm: SiteHsm, first: VerifierKey, kept: HandOvers, last: LastCheckpoint) -> None:
        self._hsm, self._first, self._kept, self._last = hsm, first, kept, last
        self._version, self._looked = 0, 0.0
        self.handed: tuple[str, ...] = ()
        """The line of every hand-over."""

    def sign(self, data: bytes) -> bytes:
        """By the version that `follow` found."""
        return self._hsm.sign(_NAME, data, self._version)

    def follow(self) -> None:
        """Find the version that signs, hand over to a newer one if there is one, and end those before it.

        Raises SigningFailed where the token does not hold the key that the hand-overs lead to, PromiseBroken, OSError.
        """
        self.handed = max(self._kept.read(), self._last_lines(), key=len)
        held = {version: verifier_key(self._first.name, self._hsm.public_key(_NAME, version)) for version in self._versions()}
        try:
            due = newest_key(self._first, self.handed)
        except ValueError as error:
            raise SigningFailed(f"the log's own record of its hand-overs does not hold: {error}") from error
        self._version = next((version for version, key in held.items() if key == due), 0)
        if not self._version:
            raise SigningFailed(
                "the token does not hold the key that the log was handed over to last: is audit/hand-overs older than the token?"
            )
        newest = max(held)
        if newest > self._version:
            self._hsm.refresh((), ())  # the start's audit again: only a key that was generated in this token takes over
            line = hand_over(held[newest], self._size(), self.sign)
            self._kept.add(line)
            self.handed, self._version = (*self.handed, line), newest
            _log.warning("log_handed_over", signer=held[newest].text)
        for version in sorted(held):
            if version < self._version:
                self._hsm.destroy_signer(_NAME, version)

    def outdated(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """Whether the token holds a newer version; looked at every LOOK_S."""
        if clock() - self._looked < LOOK_S:
            return False
        self._looked = clock()
        return max(self._versions(), default=0) > self._version

    def _versions(self) -> tuple[int, ...]:
        return self._hsm.signer_versions(_NAME)

    def _last_lines(self) -> tuple[str, ...]:
        """The lines that the newest checkpoint carries: a state folder put back may lack the file of their own."""
        lines = (self._last.read() or "").partition("\n\n")[0].split("\n")[3:]
        return tuple(line for line in lines if line.startswith("hand-over "))

    def _size(self) -> int:
        """The largest tree that the old version signed."""
        note = self._last.read()
        return 0 if note is None else parse_checkpoint(note)[0].size


def make_next(hsm: SiteHsm) -> int:
    """Make the next version in the log's token; the running log takes it up. Raises SignerRotating while one waits for that."""
    held = hsm.signer_versions(_NAME)
    if len(held) > 1:
        raise SignerRotating(f"{_NAME}/{max(held)} waits for the log to take it up: is the log running?")
    if not held:
        raise KeyNotFound(f"the log's token holds no {_NAME}")
    hsm.make_signer(_NAME, held[0] + 1)
    return held[0] + 1
