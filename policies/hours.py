"""Hours of the week in which a client may call, or a voice may be used: in UTC or a named zone.

Times are those that a clock on the wall shows in the zone, by the IANA time zone database of this machine: where clocks are put
forward, the minutes that no clock shows are nobody's; where they are put back, those shown twice count twice. A span begins on
each of its days and may end after midnight. Nothing here touches a database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from zoneinfo import ZoneInfo

from policies.errors import HoursInvalid

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_TIME = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]|24:00")
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,30}(/[A-Za-z0-9_+-]{1,30}){0,2}")


@dataclass(frozen=True)
class Hours:
    """From `opens` until before `closes`, minutes since midnight, beginning on each of `days` (0: Monday).

    `closes` before `opens` is on the day after. `str` gives the text that `parse` reads, and a row keeps.
    """

    days: frozenset[int]
    opens: int
    closes: int
    zone: str

    @classmethod
    def of(cls, days: str, opens: str, closes: str, zone: str) -> Hours:
        """From what people write: `mon-fri` or `mon,wed`, `08:00`, `18:00` (or `24:00`), `Europe/Zurich`. Raises HoursInvalid."""
        hours = cls(_days(days), _minutes(opens), _minutes(closes), zone)
        if hours.opens == hours.closes or hours.opens == _DAY_MINUTES:
            raise HoursInvalid("the span has no length; 00:00 to 24:00 is a whole day")
        hours.zone_info()
        return hours

    @classmethod
    def parse(cls, text: str) -> Hours:
        """From the text of a row. Raises HoursInvalid."""
        days, _, rest = text.partition(" ")
        span, _, zone = rest.partition(" ")
        opens, _, closes = span.partition("-")
        return cls.of(days, opens, closes, zone)

    def __str__(self) -> str:
        days = ",".join(DAYS[day] for day in sorted(self.days))
        return f"{days} {_written(self.opens)}-{_written(self.closes)} {self.zone}"

    def zone_info(self) -> ZoneInfo:
        """The zone as this machine knows it. Raises HoursInvalid for one that it does not know."""
        try:
            if _ZONE.fullmatch(self.zone):
                return ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError):
            pass  # a name that is no zone's, or a folder of zones
        raise HoursInvalid("this machine's time zone database has no such zone")

    def include(self, moment: datetime) -> bool:
        """Whether the moment is in these hours. Raises HoursInvalid."""
        there = moment.astimezone(self.zone_info())
        minute, today = there.hour * 60 + there.minute, there.weekday()
        if self.opens < self.closes:
            return today in self.days and self.opens <= minute < self.closes
        yesterday = (today - 1) % 7
        return (today in self.days and minute >= self.opens) or (yesterday in self.days and minute < self.closes)


def within(hours: str | None, now: float) -> bool:
    """Whether `now`, seconds since 1970, is in the hours of a row; where a row has none, always.

    Hours that cannot be read, or a zone that this machine does not know, are never: nothing is permitted by mistake.
    """
    if hours is None:
        return True
    try:
        return _parsed(hours).include(datetime.fromtimestamp(int(now), UTC))
    except (HoursInvalid, ValueError, OverflowError, OSError):
        return False


_parsed = lru_cache(1024)(Hours.parse)


def _days(said: str) -> frozenset[int]:
    days: set[int] = set()
    for part in said.split(","):
        first, through, last = part.partition("-")
        last = last if through else first
        if first not in DAYS or last not in DAYS:
            raise HoursInvalid("days: such as mon-fri, or sat,sun")
        begin, length = DAYS.index(first), (DAYS.index(last) - DAYS.index(first)) % 7
        days |= {(begin + step) % 7 for step in range(length + 1)}
    return frozenset(days)


def _minutes(said: str) -> int:
    if not _TIME.fullmatch(said):
        raise HoursInvalid("a time: such as 08:00, and 24:00 for the end of a day")
    return int(said[:2]) * 60 + int(said[3:])


def _written(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
