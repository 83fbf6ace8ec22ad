"""What every benchmark prints: one JSON object a line."""

from __future__ import annotations

import json


def report(
    metric: str, value: float, unit: str, against: float | None, goal: float | None, *, lower_is_better: bool = False
) -> None:
    """One figure with what it is measured against. `goal` is for `value`."""
    holds = None if goal is None else (value <= goal if lower_is_better else value >= goal)
    _say(metric, value, unit, against, goal, holds)


def report_ratio(metric: str, value: float, unit: str, against: float, goal: float | None) -> None:
    """One figure whose `goal` is for the ratio: at most so many times what it is measured against."""
    _say(metric, value, unit, against, goal, None if goal is None else value / against <= goal)


def report_share(metric: str, value: float, unit: str, against: float, goal: float | None) -> None:
    """One figure whose `goal` is for the ratio: at least this share of what it is measured against."""
    _say(metric, value, unit, against, goal, None if goal is None else value / against >= goal)


def _say(metric: str, value: float, unit: str, against: float | None, goal: float | None, holds: bool | None) -> None:
    ratio = None if not against else value / against
    fields = {"metric": metric, "value": value, "unit": unit, "against": against, "ratio": ratio, "goal": goal, "holds": holds}
    print(json.dumps({key: round(field, 4) if isinstance(field, float) else field for key, field in fields.items()}), flush=True)
