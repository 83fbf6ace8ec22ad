"""When an erased voice will be shredded: by what is pending, by what schedules say, or by nothing that anybody planned."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from keyvault.lifecycle import DEFAULT_DELAY
from keyvault.records import RingVersion, Tombstone
from keyvault.schedules import Action, Schedule
from keyvault.states import KeyState
from service.shredding import Forecast, forecast

NOW = datetime(2026, 5, 1, tzinfo=UTC)
STONE = Tombstone(UUID(int=1), "acme", (UUID(int=2),), "main", 1, 2, NOW)
FIRST = RingVersion("main", 1, KeyState.DEACTIVATED, NOW - timedelta(days=40))
SECOND = RingVersion("main", 2, KeyState.ACTIVE, NOW - timedelta(days=10))
ROTATE = Schedule("rotate", "main", Action.ROTATE, after_days=90)
RETIRE = Schedule("retire", "main", Action.DESTROY, after_days=30)


def test_nothing_planned():
    assert forecast(STONE, [FIRST, SECOND], []) == Forecast(("main/1", "main/2"), None, "nothing")
    assert forecast(STONE, [FIRST, SECOND], [RETIRE]).by == "nothing", "the serving version is never followed"
    assert forecast(STONE, [FIRST, SECOND], [ROTATE]).by == "nothing"
    assert forecast(STONE, [SECOND], [ROTATE, RETIRE]).by == "nothing", "of a version without a row nothing is known"
    elsewhere = [replace(ROTATE, ring="other"), replace(RETIRE, ring="other")]
    assert forecast(STONE, [FIRST, SECOND], elsewhere).by == "nothing"


def test_pending_destructions_say_when():
    first = replace(FIRST, destroy_at=NOW + timedelta(days=3))
    second = replace(SECOND, state=KeyState.DEACTIVATED, destroy_at=NOW + timedelta(days=5))
    assert forecast(STONE, [first, second], []) == Forecast(("main/1", "main/2"), second.destroy_at, "pending destruction")
    assert forecast(STONE, [first, SECOND], []).by == "nothing"


def test_schedules_say_when_at_the_earliest():
    followed = SECOND.created_at + timedelta(days=90)
    expected = followed + timedelta(days=30) + DEFAULT_DELAY
    assert forecast(STONE, [FIRST, SECOND], [ROTATE, RETIRE]) == Forecast(("main/1", "main/2"), expected, "schedule")
    only_first = replace(STONE, last_ring_version=1)
    assert forecast(only_first, [FIRST, SECOND], [RETIRE]).at == SECOND.created_at + timedelta(days=30) + DEFAULT_DELAY


def test_what_is_destroyed_is_not_waited_for():
    gone = replace(FIRST, state=KeyState.DESTROYED)
    assert forecast(STONE, [gone, SECOND], []).waits_for == ("main/2",)
    done = replace(STONE, shredded_at=NOW)
    assert forecast(done, [gone, SECOND], []) == Forecast((), NOW, "done")
