"""What policies refuse. Each error's `code` is stable; `public` is the fixed message that a caller reads."""

from __future__ import annotations

from typing import ClassVar


class PolicyError(Exception):
    """This request is not allowed."""

    code: ClassVar[str] = "denied"
    fix: ClassVar[str] = "Ask for a fresh token with the rights this request needs."

    def __init__(self, detail: str | None = None) -> None:
        self.detail = detail
        super().__init__((type(self).__doc__ or self.code).strip().splitlines()[0])


class GrantMismatch(PolicyError):
    """The grant in hand is for something else."""

    code = "grant_mismatch"


class GrantExpired(PolicyError):
    """The token's time was over before the voice was opened."""

    code = "token_expired"
    fix = "Fetch a fresh token and send the request at once: tokens live five seconds."
