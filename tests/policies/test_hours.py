"""Hours of the week: days that change, clocks that are put forward and back, spans past midnight, and rows that lie."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.authority import Role
from policies.errors import AuthorityRowTampered, HoursInvalid, OutsideHours
from policies.grants import Purpose
from policies.hours import DAYS, Hours, within

ZURICH = ZoneInfo("Europe/Zurich")
ZONES = st.sampled_from(["UTC", "Europe/Zurich", "America/St_Johns", "Asia/Kathmandu", "Pacific/Kiritimati", "Australia/Lord_Howe"])
MINUTES = st.integers(0, 24 * 60 - 1)
SPANS = st.tuples(MINUTES, st.integers(0, 24 * 60)).filter(lambda span: span[0] != span[1])
HOURS = st.builds(lambda days, span, zone: Hours(days, *span, zone), st.frozensets(st.integers(0, 6), min_size=1), SPANS, ZONES)
MOMENTS = st.integers(1_577_836_800, 1_893_456_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))  # 2020 to 2029


@pytest.mark.parametrize(
    ("days", "meant"),
    [
        ("mon-fri", "mon,tue,wed,thu,fri"),
        ("sat,sun", "sat,sun"),
        ("sat-mon", "mon,sat,sun"),
        ("wed", "wed"),
        ("mon-tue,tue-wed", "mon,tue,wed"),
        ("mon-sun", ",".join(DAYS)),
    ],
)
def test_days_as_people_write_them(days, meant):
    assert str(Hours.of(days, "08:00", "18:00", "Europe/Zurich")) == f"{meant} 08:00-18:00 Europe/Zurich"


@pytest.mark.parametrize(
    "wrong",
    [
        ("", "08:00", "18:00", "UTC"),
        ("monday", "08:00", "18:00", "UTC"),
        ("mon-", "08:00", "18:00", "UTC"),
        ("mon,", "08:00", "18:00", "UTC"),
        ("MON", "08:00", "18:00", "UTC"),
        ("mon", "8:00", "18:00", "UTC"),
        ("mon", "08:60", "18:00", "UTC"),
        ("mon", "24:00", "18:00", "UTC"),
        ("mon", "08:00", "24:01", "UTC"),
        ("mon", "08:00", "08:00", "UTC"),
        ("mon", "08:00", "18:00", "Mars/Olympus"),
        ("mon", "08:00", "18:00", "Europe"),
        ("mon", "08:00", "18:00", "../etc/passwd"),
        ("mon", "08:00", "18:00", "/etc/localtime"),
        ("mon", "08:00", "18:00", ""),
        ("mon", "08:00", "18:00", "UTC\n"),
        ("mon", "0٨:00", "18:00", "UTC"),
    ],
)
def test_what_is_no_hours_is_refused(wrong):
    with pytest.raises(HoursInvalid):
        Hours.of(*wrong)
    days, opens, closes, zone = wrong
    assert not within(f"{days} {opens}-{closes} {zone}", 0.0), "and in a row it is never"


@given(HOURS)
def test_the_text_of_a_row_reads_back(hours):
    assert Hours.parse(str(hours)) == hours


@given(HOURS, MOMENTS)
def test_a_moment_is_in_hours_exactly_if_a_span_of_some_day_covers_it(hours, moment):
    """The other way round: each span is laid on the wall clock of its day, and the moment is looked for in it."""
    there = moment.astimezone(ZoneInfo(hours.zone)).replace(tzinfo=None)
    covered = False
    for day in (there.date() - timedelta(days=1), there.date()):
        midnight = datetime.combine(day, datetime.min.time())
        length = (hours.closes - hours.opens) if hours.closes > hours.opens else hours.closes - hours.opens + 24 * 60
        begins = midnight + timedelta(minutes=hours.opens)
        covered |= day.weekday() in hours.days and begins <= there < begins + timedelta(minutes=length)
    assert hours.include(moment) is covered


@given(HOURS, MOMENTS)
def test_hours_and_their_rest_share_no_moment_and_leave_none_out(hours, moment):
    if hours.days != frozenset(range(7)) or hours.opens == 0 or hours.closes in (0, 24 * 60):
        hours = Hours(frozenset(range(7)), 480, 1080, hours.zone)
    rest = Hours(hours.days, hours.closes, hours.opens, hours.zone)
    assert hours.include(moment) is not rest.include(moment)


@given(MOMENTS, ZONES)
def test_a_whole_week_is_always(moment, zone):
    assert Hours.of("mon-sun", "00:00", "24:00", zone).include(moment)


def test_the_night_when_clocks_are_put_forward():
    """31 March 2024, Zurich: after 01:59:59 comes 03:00."""
    hours = Hours.of("sun", "02:00", "03:00", "Europe/Zurich")
    day = datetime(2024, 3, 31, tzinfo=UTC)
    assert not any(hours.include(day + timedelta(minutes=minute)) for minute in range(24 * 60)), "no clock showed it"
    office = Hours.of("sun", "01:00", "04:00", "Europe/Zurich")
    assert sum(office.include(day + timedelta(minutes=minute)) for minute in range(24 * 60)) == 120


def test_the_night_when_clocks_are_put_back():
    """27 October 2024, Zurich: the hour from 02:00 comes twice, and both times count."""
    hours = Hours.of("sun", "02:00", "03:00", "Europe/Zurich")
    before = datetime(2024, 10, 26, 12, tzinfo=UTC)
    assert sum(hours.include(before + timedelta(minutes=minute)) for minute in range(24 * 60)) == 120


def test_a_span_past_midnight_belongs_to_the_day_on_which_it_began():
    night = Hours.of("fri", "22:00", "06:00", "Europe/Zurich")
    at = lambda day, hour: datetime(2026, 5, day, hour, tzinfo=ZURICH)  # noqa: E731 — Friday is the first
    assert [night.include(at(*when)) for when in ((1, 21), (1, 22), (2, 5), (2, 6), (2, 22), (1, 5))] == [
        *(False, True, True, False, False, False)
    ]


@pytest.mark.parametrize("now", [1e30, -1e30, float(2**62)])
def test_a_time_beyond_every_calendar_is_in_no_hours(now):
    assert not within("mon 00:00-24:00 UTC", now)
    assert within(None, now)


# --- in the gate


def hours_now(house, *, ago: int) -> Hours:
    """One hour, beginning so many minutes ago, UTC."""
    begins = datetime.fromtimestamp(house.clock(), UTC) - timedelta(minutes=ago)
    opens = begins.hour * 60 + begins.minute
    return Hours(frozenset({begins.weekday()}), opens, (opens + 60) % (24 * 60), "UTC")


def test_a_client_calls_in_its_hours_and_not_after_them_also_with_a_token_in_hand(house):
    device, voice = house.client(), house.voice()
    with house.database.begin() as transaction:
        house.registry.limit_client(transaction, device.client_id, hours_now(house, ago=30))
    house.gate.admit(house.speech(device, voice))
    call = house.speech(device, voice)
    with house.database.begin() as transaction:
        house.registry.limit_client(transaction, device.client_id, hours_now(house, ago=90))
    with pytest.raises(OutsideHours) as refused:
        house.gate.admit(call)
    assert refused.value.decided_by == ("hours.client",)
    for purpose in (Purpose.READ, Purpose.CONSENT):
        with pytest.raises(OutsideHours):
            house.token(device, purpose)
    with house.database.begin() as transaction:
        house.registry.limit_client(transaction, device.client_id, None)
    house.gate.admit(house.speech(device, voice))


def test_a_voice_opens_in_its_hours_and_is_erased_at_any_time(house):
    device, voice = house.client(), house.voice()
    with house.database.begin() as transaction:
        house.registry.limit_voice(transaction, voice, hours_now(house, ago=90))
    with pytest.raises(OutsideHours) as refused:
        house.speech(device, voice)
    assert refused.value.decided_by == ("hours.voice",)
    house.gate.admit(house.call(device, house.token(device, Purpose.ERASE, voice), Purpose.ERASE, voice))
    with house.database.begin() as transaction:
        house.registry.limit_voice(transaction, voice, hours_now(house, ago=30))
    house.gate.admit(house.speech(device, voice))


def test_new_keys_and_other_roles_leave_the_hours(house):
    device, hours = house.client(), hours_now(house, ago=30)
    with house.database.begin() as transaction:
        house.registry.limit_client(transaction, device.client_id, hours)
        house.registry.rotate_client(transaction, device.client_id, cert_sha256="C" * 43, jkt="D" * 43)
        house.registry.change_roles(transaction, device.client_id, [Role.READER])
    assert house.of_client(device.client_id).hours == str(hours)


@pytest.mark.parametrize("change", ["hours = NULL", "hours = 'mon,tue,wed,thu,fri,sat,sun 00:00-24:00 UTC'", "hours = ''"])
def test_hours_cannot_be_written_away(house, change):
    device, voice = house.client(f"app-{uuid4()}"), house.voice()
    with house.database.begin() as transaction:
        house.registry.limit_client(transaction, device.client_id, hours_now(house, ago=90))
        house.registry.limit_voice(transaction, voice, hours_now(house, ago=90))
    with pytest.raises(OutsideHours):
        house.speech(device, voice)
    house.edit(f"UPDATE client SET {change}")
    with pytest.raises(AuthorityRowTampered):
        house.speech(device, voice)
    other = house.client(f"other-{uuid4()}")
    house.edit(f"UPDATE voice SET {change}")
    with pytest.raises(AuthorityRowTampered):
        house.speech(other, voice)
