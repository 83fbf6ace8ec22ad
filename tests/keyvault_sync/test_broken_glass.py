"""What policies see of broken glass: exactly what two officers signed for this site, while it lasts, read anew from its rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy
from real_sites import MAIN, Sites
from sync_world import PEOPLE

from keyvault.approval_kinds import Kind, explained
from keyvault.approvals import signed_by
from policies.audit.store import AuditStore
from service.approving import site_inbox
from service.broken_glass import COMPROMISED_KEY, STALE_PEER, BrokenGlass, Watched
from service.settings import Settings

NOTHING: frozenset[str] = frozenset()


class Desk:
    """Site a's inbox, and a vault worker's view of it."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self.site = sites.a
        self.site.now = datetime.now(UTC)
        self.inbox = site_inbox(self.site.alive())
        settings, audit = Settings.load({"GLOTTIS_STATE_DIR": str(folder)}), AuditStore(self.site.database, self.site.hsm)
        self.glass = BrokenGlass(settings, self.site.database, self.site.hsm, audit)

    def filed(self, kind: Kind, *, site: str = "a", hours: float = 1.0) -> str:
        facts: dict[str, str | int] = {"site": site, "reason": "a drill"}
        facts |= {"version": MAIN.label} if kind is Kind.OPEN_COMPROMISED else {}
        return self.inbox.request(kind, explained(kind, "cluster-1", facts).subject, facts, self.site.now + timedelta(hours=hours))

    def approve(self, name: str, *people: str) -> None:
        request = self.inbox.one(name).request
        for person in people:
            self.inbox.add(replace(request, approvals=(signed_by(request.operation, person, "approve", PEOPLE[person]),)))

    def sql(self, statement: str) -> None:
        with self.site.database.begin() as transaction:
            transaction.execute(sqlalchemy.text(statement))


@pytest.fixture
def desk(sites: Sites, tmp_path: Path) -> Desk:
    return Desk(sites, tmp_path)


@pytest.mark.parametrize(("kind", "seen"), [(Kind.BREAK_GLASS, STALE_PEER), (Kind.OPEN_COMPROMISED, COMPROMISED_KEY)])
def test_it_is_in_force_from_the_second_signature_until_it_is_cancelled(desk: Desk, kind: Kind, seen: str) -> None:
    assert desk.glass.in_force() == NOTHING
    name = desk.filed(kind)
    assert desk.glass.in_force() == NOTHING
    desk.approve(name, "bo")
    assert desk.glass.in_force() == NOTHING, "one officer is not enough"
    desk.approve(name, "cy")
    assert desk.glass.in_force() == {seen}
    desk.inbox.cancel(name)
    assert desk.glass.in_force() == NOTHING


def test_both_at_once_and_each_ends_with_its_own_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, hours in ((Kind.BREAK_GLASS, 1.0), (Kind.OPEN_COMPROMISED, 3.0)):
        desk.approve(desk.filed(kind, hours=hours), "bo", "cy")
    assert desk.glass.in_force() == {STALE_PEER, COMPROMISED_KEY}
    later = desk.site.now + timedelta(hours=2)
    monkeypatch.setattr("service.inboxes.inbox_now", lambda: later)
    assert desk.glass.in_force() == {COMPROMISED_KEY}


def test_another_sites_glass_is_whole_here(desk: Desk) -> None:
    desk.approve(desk.filed(Kind.BREAK_GLASS, site="b"), "bo", "cy")
    assert desk.glass.in_force() == NOTHING


def test_who_writes_the_database_breaks_no_glass(desk: Desk) -> None:
    """An approval is an officer's signature over this operation: a row copied from another person or request is none."""
    name, other = desk.filed(Kind.BREAK_GLASS), desk.filed(Kind.OPEN_COMPROMISED)
    desk.approve(name, "bo")
    desk.approve(other, "bo", "cy")
    desk.inbox.cancel(other)
    desk.sql("UPDATE approval_request SET outcome = '', done_at = NULL")
    copied = f"SELECT decode('{name}', 'hex'), person, role, approval, received_at FROM approval WHERE person = 'cy'"
    desk.sql(f"INSERT INTO approval {copied}")
    assert desk.glass.in_force() == NOTHING


def test_a_look_is_kept_for_two_seconds_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 100.0, iter([NOTHING, frozenset({STALE_PEER})])
    monkeypatch.setattr("time.monotonic", lambda: now)
    watched = Watched(lambda: next(looks))
    assert watched() == watched() == NOTHING
    now += 1.99
    assert watched() == NOTHING
    now += 0.01
    assert watched() == {STALE_PEER}
