"""A vault serves by what the sites agreed on and by a young word of the other one, unless officers broke the glass."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from fakes import FakeHsm

from keyvault.approvals import Officer
from keyvault.hsm import KeyName
from keyvault.records import RecordMac
from keyvault.sync.errors import SiteFrozen, SiteUnfounded, StaleEpoch
from keyvault.sync.ledger import Ledger
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.state import NO_ANCHOR, SiteState
from keyvault.sync.store import SyncStore, lasting
from service.vault import agreement
from service.vault.agreement import Agreement, AgreementParts

NOW = datetime.fromisoformat("2026-12-01T12:00:00+00:00")
HOUR = 3600.0


class Site:
    """One site's database and token, and what a worker sees of them."""

    def __init__(self, database, names: str = "ab") -> None:
        self.database, self.now, self.glass = database, NOW, False
        self.store = SyncStore(RecordMac(FakeHsm()))
        keys = {name: FakeHsm().public_key(KeyName.SITE_IDENTITY) for name in "abc"}
        officers = tuple(Officer(name, (FakeHsm().public_key(KeyName.SITE_IDENTITY),)) for name in ("ada", "bo"))
        self.roster = Roster("cluster", 1, tuple(SiteKey(name, f"serial-{name}", keys[name]) for name in names), officers, 2)

    def found(self) -> None:
        self.save(SiteState("a", Ledger.start(self.roster), NO_ANCHOR, NO_ANCHOR))

    def save(self, state: SiteState) -> None:
        with lasting(self.database) as transaction:
            transaction.exec_driver_sql("DELETE FROM sync_state")
            self.store.save_state(transaction, "a", state.encode(), b"")

    def hear(self, at: datetime) -> None:
        with lasting(self.database) as transaction:
            self.store.keep_heard(transaction, b"status", at)

    def worker(self) -> Agreement:
        parts = AgreementParts(
            database=self.database,
            store=self.store,
            site="a",
            age_limit_s=HOUR,
            broken_glass=lambda roster, _: self.glass and roster == self.roster,
            clock=lambda: self.now,
        )
        return Agreement(parts)


@pytest.fixture
def site(database, monkeypatch):
    monkeypatch.setattr(agreement, "LOOK_S", 0.0)
    return Site(database)


def test_an_old_word_of_the_other_site_is_not_enough(site):
    site.found()
    worker = site.worker()
    with pytest.raises(StaleEpoch):
        worker.require_fresh()
    site.hear(NOW)
    worker.require_fresh()
    site.now = NOW + timedelta(seconds=HOUR)
    worker.require_fresh()
    site.now += timedelta(seconds=1)
    with pytest.raises(StaleEpoch):
        worker.require_fresh()
    site.hear(site.now)
    worker.require_fresh()


def test_a_word_from_the_future_is_no_young_word(site):
    site.found()
    site.hear(NOW + timedelta(minutes=1))
    with pytest.raises(StaleEpoch):
        site.worker().require_fresh()


def test_officers_may_break_the_glass_and_it_ends_with_their_approval(site):
    site.found()
    worker = site.worker()
    site.glass = True
    worker.require_fresh()
    site.glass = False
    with pytest.raises(StaleEpoch):
        worker.require_fresh()


def test_with_one_site_nothing_gets_stale(database):
    alone = Site(database, "a")
    alone.found()
    worker = alone.worker()
    assert worker.alone
    worker.require_fresh()


def test_a_site_that_was_never_founded_or_was_replaced_serves_nothing(site):
    with pytest.raises(SiteUnfounded):
        site.worker()
    site.found()
    site.hear(NOW)
    worker = site.worker()
    replaced = Site(site.database, "bc")
    site.save(SiteState("a", Ledger.start(replaced.roster), NO_ANCHOR, NO_ANCHOR))
    with pytest.raises(SiteFrozen):
        worker.require_fresh()
