"""A destruction that one site scheduled raises alerts at the other, and gives neither power over what the other scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from threading import RLock
from uuid import UUID

import pytest
import sqlalchemy
from real_sites import MAIN, OneSite, Sites, later
from sync_world import NOW, approve
from test_batches import enrol, keys_of
from test_coordinator import TWO, rotate

from keyvault.errors import NothingPending, RecordTampered
from keyvault.lifecycle import Approved, Lifecycle
from keyvault.records import RingVersion
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.errors import Conflict, StatementMalformed
from keyvault.sync.statement import DESTROY, Pending, Signed, Status, destruction_subject
from service.keys import DrivenMasters

DUE = NOW + timedelta(days=7)
USED, HEARD = "key.pending_destruction_used", "key.peer_destruction_heard"


class Approving:
    """Officers who have signed for the destruction of ring/main/1."""

    def approved(self, kind: str, subject: bytes, now: datetime) -> Approved:
        return Approved(*approve(DESTROY, destruction_subject("cluster-1", [MAIN.label]), hours=24 * 14))

    def request(self, kind: str, subject: bytes, description: Mapping[str, str | int], expires_at: datetime) -> str:
        raise AssertionError("they have signed")

    def withdraw(self, kind: str, subject: bytes, reason: str) -> tuple[str, ...]:
        return ()


def lifecycle(sites: Sites, name: str) -> Lifecycle:
    site = sites.all[name]
    return Lifecycle(
        database=site.database,
        hsm=site.hsm,
        store=KeyStore(),
        recorder=site.journal,
        masters=DrivenMasters(sites.coordinator(name), RLock(), lambda _: None),
        officers=Approving(),
        cluster="cluster-1",
        clock=lambda: site.now,
    )


def row(site: OneSite) -> RingVersion:
    with site.database.begin() as transaction:
        return keys_of(site).rings.version(transaction, MAIN)


def use(site: OneSite, voice: UUID) -> None:
    with site.database.begin() as transaction:
        keys_of(site).current(transaction, voice)


@pytest.fixture
def voice(sites: Sites) -> UUID:
    """A voice of both sites under ring/main/1, whose destruction site a has scheduled."""
    (voice,) = enrol(sites.a)
    sites.batches("a").pump()
    rotate(sites, TWO)
    lifecycle(sites, "a").destroy(MAIN, "retired")
    return voice


def test_a_use_at_either_site_is_an_alert_once_they_have_met(sites: Sites, voice: UUID) -> None:
    use(sites.b, voice)
    assert sites.b.journal.of(USED) == []
    sites.coordinator("a").exchange()
    for site in sites.all.values():
        use(site, voice)
    told = {"ring": "main", "version": 1, "destroy_at": DUE.isoformat()}
    assert sites.a.journal.of(USED) == [told | {"scheduled_at": "here"}]
    assert sites.b.journal.of(USED) == [told | {"scheduled_at": "the other site"}]
    assert sites.b.journal.of(HEARD) == [told | {"site": "a"}]
    before = row(sites.b)
    sites.coordinator("b").exchange()
    assert row(sites.b) == before, "what was heard before is not written again"
    assert lifecycle(sites, "b").versions("main")[0].peer_destroy_at == DUE
    assert row(sites.a).peer_destroy_at is None


def test_it_is_neither_carried_out_nor_cancelled_by_the_site_that_heard_of_it(sites: Sites, voice: UUID) -> None:
    sites.coordinator("b").exchange()
    for site in sites.all.values():
        with site.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("DELETE FROM wrapped_key"))
    there = lifecycle(sites, "b")
    with pytest.raises(NothingPending):
        there.cancel(MAIN, "we need it")
    assert there.destroy_due(later(sites.b, days=400)) == []
    later(sites.b, days=-400)
    assert row(sites.a).destroy_at == DUE
    here = lifecycle(sites, "a")
    assert here.destroy_due(later(sites.a, days=6)) == []
    assert [ended.code for ended in here.destroy_due(later(sites.a, days=1))] == [""]
    for site in sites.all.values():
        assert (row(site).state, row(site).due) == (KeyState.DESTROYED, None)


def test_both_may_schedule_and_each_cancels_its_own(sites: Sites, voice: UUID) -> None:
    later(sites.b, days=1)
    lifecycle(sites, "b").destroy(MAIN, "retired here too")
    sites.coordinator("a").exchange()
    assert (row(sites.b).destroy_at, row(sites.b).due) == (DUE + timedelta(days=1), DUE)
    assert (row(sites.a).destroy_at, row(sites.a).peer_destroy_at) == (DUE, DUE + timedelta(days=1))
    lifecycle(sites, "a").cancel(MAIN, "still needed")
    assert row(sites.a).due == DUE + timedelta(days=1)
    sites.coordinator("a").exchange()
    assert (row(sites.b).destroy_at, row(sites.b).peer_destroy_at) == (DUE + timedelta(days=1), None)
    lifecycle(sites, "b").cancel(MAIN, "still needed")
    sites.coordinator("b").exchange()
    use(sites.a, voice)
    use(sites.b, voice)
    assert [sites.a.journal.of(USED), sites.b.journal.of(USED)] == [[], []]
    assert [said["destroy_at"] for said in sites.b.journal.of(HEARD)] == [DUE.isoformat(), ""]


def test_what_was_heard_is_under_the_rows_mac(sites: Sites, voice: UUID) -> None:
    sites.coordinator("a").exchange()
    row(sites.b)
    for hidden in ("NULL", "now()"):
        with sites.b.database.begin() as transaction:
            transaction.execute(sqlalchemy.text(f"UPDATE ring_version SET peer_destroy_at = {hidden} WHERE version = 1"))
        with pytest.raises(RecordTampered):
            use(sites.b, voice)


def test_a_status_played_back_silences_nothing(sites: Sites, voice: UUID) -> None:
    old = sites.a.alive().status(sites.b.alive().challenge())
    quiet = replace(Status.decode(Signed.decode(old).statement), pending=())
    with pytest.raises(Exception, match="signature"):
        sites.b.alive().hear(replace(Signed.decode(old), statement=quiet.encode()).encode())
    sites.b.alive().hear(old)
    assert row(sites.b).peer_destroy_at == DUE
    with pytest.raises(StatementMalformed):
        Status.decode(replace(quiet, pending=(Pending("ring/main/1", DUE),)).encode()[:-1])
    with pytest.raises(ValueError, match="each once"):
        replace(quiet, pending=(Pending("ring/main/1", DUE),) * 2)


def test_a_signed_status_that_names_no_version_is_refused_and_ends_no_process(sites: Sites, voice: UUID) -> None:
    """The other site's HSM signed it: it is refused like any other message, and not as a fault of ours."""
    site, asked = sites.a.alive(), sites.b.alive().challenge()
    odd = site.durable.current().status(asked, site.parts.hsm.held(), (Pending("no label", DUE),))
    with pytest.raises(StatementMalformed, match="no version"):
        sites.b.alive().hear(odd)


def test_a_row_that_somebody_else_writes_meanwhile_is_heard_of_the_next_time(sites: Sites, voice: UUID) -> None:
    rings = sites.b.alive().durable.rings
    versions = rings.versions

    def raced(transaction: object, ring: str) -> list[RingVersion]:
        return [replace(found, row_version=found.row_version + 7) for found in versions(transaction, ring)]  # type: ignore[arg-type]

    status = sites.a.alive().status(sites.b.alive().challenge())
    rings.versions = raced  # type: ignore[method-assign, assignment]
    with pytest.raises(Conflict):
        sites.b.alive().hear(status)
    rings.versions = versions  # type: ignore[method-assign]
    sites.coordinator("b").exchange()
    assert row(sites.b).peer_destroy_at == DUE
