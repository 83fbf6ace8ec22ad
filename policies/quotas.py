"""Quotas and rates: how much one client, and one voice, may use in a minute and in a day (UTC), and what is left. Pure.

Requests and failed attempts count by the minute, characters and seconds of speech by the day. Every worker counts in the same
rows, in the transaction that admits the request, so that what is refused is not counted and no two decide on the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from keyvault.records import Field

EVERYONE = "*"
"""The name under which the limits of every client, or every voice, are set that has none of its own."""
MINUTE_S, DAY_S = 60, 86_400


class Scope(StrEnum):
    """Whose use is counted."""

    CLIENT = "client"
    VOICE = "voice"


@dataclass(frozen=True)
class Limits:
    """At most so many requests and failed attempts a minute, characters and seconds of speech a day.

    A request for a token and its use are one each. Attempts are counted for clients alone.
    """

    requests: int = 6_000
    characters: int = 2_000_000
    seconds: int = 86_400
    attempts: int = 600


@dataclass(frozen=True)
class Quota:
    """Limits set for one client, one voice (by its id), or everyone of a scope: a row under the record MAC."""

    scope: Scope
    name: str
    requests: int
    characters: int
    seconds: int
    attempts: int
    row_version: int

    def fields(self) -> tuple[Field, ...]:
        """What the row's MAC covers."""
        return (self.scope.value, self.name, self.requests, self.characters, self.seconds, self.attempts, self.row_version)

    @property
    def limits(self) -> Limits:
        return Limits(self.requests, self.characters, self.seconds, self.attempts)


@dataclass(frozen=True)
class Used:
    """What one client or voice used in this minute and day, this request included; attempts are those that failed before."""

    requests: int = 0
    characters: int = 0
    milliseconds: int = 0
    attempts: int = 0


@dataclass(frozen=True)
class Left:
    """What is left once this request is counted, for whoever has least: negative where it goes beyond."""

    requests: int
    characters: int
    seconds: int
    attempts: int


def left(limits: Mapping[Scope, Limits], used: Mapping[Scope, Used]) -> Left:
    """What is left of `limits` after `used`; of both, at least the client's are there."""
    each = [(limits[scope], spent) for scope, spent in used.items()]
    return Left(
        requests=min(limit.requests - spent.requests for limit, spent in each),
        characters=min(limit.characters - spent.characters for limit, spent in each),
        seconds=min(limit.seconds - spent.milliseconds // 1000 for limit, spent in each),
        attempts=limits[Scope.CLIENT].attempts - used[Scope.CLIENT].attempts,
    )


def windows(now: float) -> tuple[datetime, datetime]:
    """When this minute and this day began."""
    return tuple(datetime.fromtimestamp(now // window * window, UTC) for window in (MINUTE_S, DAY_S))  # type: ignore[return-value]
