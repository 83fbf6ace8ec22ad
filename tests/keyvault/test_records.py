"""Records: bytes that only one row can have, and a MAC that only the token can make."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from fakes import FakeHsm

from keyvault.errors import RecordTampered
from keyvault.records import KeyRef, RecordMac, RingVersion, WrappedKey, canonical
from keyvault.states import KeyState

ONE, TWO = UUID(int=1), UUID(int=2)
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
KEY = WrappedKey(KeyRef(ONE, 1, "main", 1), "tenant", TWO, KeyState.ACTIVE, b"blob", NOW, 1)


def test_different_rows_have_different_bytes() -> None:
    rows = [
        ("a", "b"),
        ("ab",),
        ("a", b"b"),
        ("a", None),
        ("a", ""),
        ("a", 1),
        ("a", "1"),
        ("a", ["b"]),
        ("a", ["b", "c"]),
        ("a", ["bc"]),
        ("a", "b", "c"),
        ("a", ONE),
        ("a", ONE.bytes),
        ("a", NOW),
        ("a", NOW.isoformat()),
    ]
    assert len({canonical(domain, *fields) for domain, *fields in rows}) == len(rows)


def test_a_time_has_the_same_bytes_in_every_zone() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=5, minutes=45)))
    assert canonical("row", elsewhere) == canonical("row", NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"ref": replace(KEY.ref, id=TWO)},
        {"ref": replace(KEY.ref, version=2)},
        {"ref": replace(KEY.ref, ring="other")},
        {"ref": replace(KEY.ref, ring_version=2)},
        {"tenant": "another"},
        {"voice": ONE},
        {"state": KeyState.DEACTIVATED},
        {"blob": b"blob2"},
        {"created_at": NOW + timedelta(microseconds=1)},
        {"row_version": 2},
        {"mac": bytes(16)},
        {"mac": b""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_mac_covers_every_field_of_a_wrapped_key(change: dict[str, object]) -> None:
    mac = RecordMac(FakeHsm())
    key = replace(KEY, mac=mac.make(WrappedKey.DOMAIN, *KEY.fields))
    mac.check(key.mac, WrappedKey.DOMAIN, *key.fields)
    changed = replace(key, **change)
    with pytest.raises(RecordTampered):
        mac.check(changed.mac, WrappedKey.DOMAIN, *changed.fields)


def test_a_row_of_one_table_is_none_of_another_and_one_token_is_not_another() -> None:
    mac = RecordMac(FakeHsm())
    ring = RingVersion("main", 1, KeyState.ACTIVE, NOW)
    made = mac.make(RingVersion.DOMAIN, *ring.fields)
    with pytest.raises(RecordTampered):
        mac.check(made, WrappedKey.DOMAIN, *ring.fields)
    with pytest.raises(RecordTampered):
        RecordMac(FakeHsm()).check(made, RingVersion.DOMAIN, *ring.fields)


def test_a_wrapped_key_shows_neither_blob_nor_mac() -> None:
    assert "blob" not in repr(KEY)
    assert "mac" not in repr(KEY)
