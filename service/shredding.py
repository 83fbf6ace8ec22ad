"""When an erased voice will be shredded, as far as anybody planned it. Pure: nothing is asked and nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from keyvault.lifecycle import DEFAULT_DELAY
from keyvault.records import RingVersion, Tombstone
from keyvault.schedules import Action, Schedule
from keyvault.states import KeyState


@dataclass(frozen=True)
class Forecast:
    """`at`: when the last ring version that covers the voice is gone; None if nothing planned leads there.

    `by` is `done`, `pending destruction`, `schedule`, or `nothing`. `waits_for` names the versions that are not destroyed. A
    schedule asks officers, who may take their time, so that its day is the earliest.
    """

    waits_for: tuple[str, ...]
    at: datetime | None
    by: str


def forecast(stone: Tombstone, versions: Sequence[RingVersion], schedules: Sequence[Schedule]) -> Forecast:
    """From the ring's versions, oldest first, and every schedule."""
    if stone.shredded_at is not None:
        return Forecast((), stone.shredded_at, "done")
    covering = range(stone.first_ring_version, stone.last_ring_version + 1)
    left = {number: version for number in covering if not _gone(version := _of(versions, number))}
    names = tuple(f"{stone.ring}/{number}" for number in left)
    pending = [version.due if version else None for version in left.values()]
    if left and all(pending):
        return Forecast(names, max(at for at in pending if at), "pending destruction")
    ends = [_planned(version, versions, schedules) if version else None for version in left.values()]
    if left and all(ends):
        return Forecast(names, max(at for at in ends if at), "schedule")
    return Forecast(names, None, "nothing")


def _of(versions: Sequence[RingVersion], number: int) -> RingVersion | None:
    return next((version for version in versions if version.version == number), None)


def _gone(version: RingVersion | None) -> bool:
    return version is not None and version.state is KeyState.DESTROYED


def _planned(version: RingVersion, versions: Sequence[RingVersion], schedules: Sequence[Schedule]) -> datetime | None:
    """The earliest end that the schedules give this version: followed by another, retired, and its delay over."""
    if version.due is not None:
        return version.due
    rotate = _days(schedules, version.ring, Action.ROTATE)
    retire = _days(schedules, version.ring, Action.DESTROY)
    followed = next((after.created_at for before, after in pairwise(versions) if before == version), None)
    if followed is None and rotate is not None:
        followed = version.created_at + rotate
    return None if followed is None or retire is None else followed + retire + DEFAULT_DELAY


def _days(schedules: Sequence[Schedule], ring: str, action: Action) -> timedelta | None:
    found = [plan.after_days for plan in schedules if (plan.ring, plan.action) == (ring, action) and plan.after_days]
    return timedelta(days=min(found)) if found else None
