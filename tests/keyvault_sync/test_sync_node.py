"""A site over a real store: every step durable before its answer, whatever dies in between; nothing stale is ever served."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy
from fakes import FakeHsm
from real_sites import MAIN, Crashed, OneSite, Sites, destruction, signed

from keyvault.errors import KeyVaultError, RecordTampered
from keyvault.hsm import RingMaster
from keyvault.states import KeyState
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.errors import (
    Conflict,
    PeerUnavailable,
    SiteUnfounded,
    SyncStoreUnavailable,
    TokenForeign,
)
from keyvault.sync.node import SiteNode
from keyvault.sync.statement import Op
from keyvault.sync.verify import verify_certificates

TWO = RingMaster("main", 2)


def agreeing(sites: Sites) -> None:
    """What holds whenever both sites are up and have met."""
    a, b = sites.a.alive(), sites.b.alive()
    assert a.ledger == b.ledger
    for node in (a, b):
        summary = verify_certificates(node.certificates(0), sites.roster.encode())
        assert (summary.epoch, summary.head, summary.records) == (a.ledger.epoch, a.ledger.head, a.ledger.records)
    mirrors = [{name: state for name, state in site.states().items() if state != "pre-activation"} for site in sites.all.values()]
    assert mirrors[0] == mirrors[1]
    for name, state in sites.a.states().items():
        master = RingMaster.named(name)
        for site in sites.all.values():
            assert (master in site.hsm._token) == (state != "destroyed"), f"{name} is {state} at {site.name}"


def active(site: OneSite) -> list[str]:
    return [name for name, state in site.states().items() if state == "active"]


def nothing_wraps_that_exists_once(sites: Sites) -> None:
    """Also while a site is down: its workers read the mirror."""
    tokens = [site.hsm._token for site in sites.all.values()]
    for site in sites.all.values():
        assert len(active(site)) == 1, site.states()
        master = RingMaster.named(active(site)[0])
        assert tokens[0].get(master) == tokens[1].get(master) is not None


def cut_off(sites: Sites, side: str, fuse: int, act: Callable[[Coordinator], object], driver: str = "a") -> bool:
    """Let `act` run until `side` dies at its fuse; whether it died."""
    site = sites.all[side]
    site.fuse.left = fuse
    try:
        act(sites.coordinator(driver))
    except Crashed:
        site.die()
    except PeerUnavailable:
        assert site.node is None
    died, site.fuse.left = site.fuse.left is None, None
    return died


def rotation_cut_off(sites: Sites, side: str, fuse: int) -> bool:
    """A rotation in which `side` dies at its fuse; whoever is left, or comes back, goes on. Whether it died."""
    master = RingMaster("main", 1 + max(record.version for record in sites.a.alive().ledger.records))
    sites.ceremony(master)
    died = cut_off(sites, side, fuse, lambda coordinator: coordinator.install([master]))
    nothing_wraps_that_exists_once(sites)
    if died:
        sites.all[side].start()
        nothing_wraps_that_exists_once(sites)
    sites.coordinator("ab"[fuse % 2]).resume()
    agreeing(sites)
    if sites.a.states().get(master.label) in (None, "pre-activation"):
        sites.coordinator("b").install([master])  # nobody had voted: the same number is still to be had
        agreeing(sites)
    assert sites.a.states()[master.label] in ("active", "destroyed")
    return died


@pytest.mark.parametrize(("side", "fuses"), [("a", (1, 2, 3, 4, 7, 10, 13)), ("b", (2, 3, 5, 6, 9, 11, 12))])
def test_a_rotation_cut_off_at_a_durable_write_is_finished_or_came_to_nothing(
    sites: Sites, side: str, fuses: tuple[int, ...]
) -> None:
    for fuse in fuses:
        assert rotation_cut_off(sites, side, fuse)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_rotation_cut_off_at_any_durable_write(sites: Sites, side: str) -> None:
    for fuse in itertools.count():
        if not rotation_cut_off(sites, side, fuse):
            break
    assert fuse >= 14, "before and after each of a site's seven durable writes"


def destruction_cut_off(sites: Sites, side: str, fuse: int) -> bool:
    """The version before the serving one is destroyed, and `side` dies at its fuse; whether it died."""
    last = max(record.version for record in sites.a.alive().ledger.records)
    new, old = RingMaster("main", last + 1), f"ring/main/{last}"
    sites.ceremony(new)
    sites.coordinator("a").install([new])
    approved = destruction([old])

    def destroy(coordinator: Coordinator) -> None:
        coordinator.change_states({old: KeyState.DESTROYED}, "retired", *approved)

    died = cut_off(sites, side, fuse, destroy, side)
    if died:
        sites.all[side].start()
    sites.coordinator("a").resume()
    agreeing(sites)
    if sites.a.states()[old] != "destroyed":
        destroy(sites.coordinator("b"))
    agreeing(sites)
    assert sites.b.states()[old] == "destroyed"
    return died


@pytest.mark.parametrize(("side", "fuses"), [("a", (2, 9, 13)), ("b", (4, 12, 14))])
def test_a_destruction_cut_off_is_finished(sites: Sites, side: str, fuses: tuple[int, ...]) -> None:
    for fuse in fuses:
        assert destruction_cut_off(sites, side, fuse)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_destruction_cut_off_at_any_durable_write_is_finished(sites: Sites, side: str) -> None:
    for fuse in itertools.count():
        if not destruction_cut_off(sites, side, fuse):
            break
    assert fuse >= 14


def test_a_start_that_dies_at_any_write_is_mended_by_the_next(sites: Sites) -> None:
    """A crash left the last write undone; the start does it, and may die as well."""
    for fuse in range(4):
        master = RingMaster("main", fuse + 2)
        sites.ceremony(master)
        voted_and_saved = 4  # heard, its status kept; the vote saved, the anchor not written
        assert cut_off(sites, "b", voted_and_saved, lambda coordinator, master=master: coordinator.install([master]))
        before = sites.b.hsm.anchors()
        sites.b.fuse.left = fuse
        try:
            sites.b.start()
        except Crashed:
            sites.b.die()
        sites.b.fuse.left = None
        sites.b.start()
        assert sites.b.hsm.anchors() != before
        sites.coordinator("a").resume()
        agreeing(sites)
        assert active(sites.b) == [master.label]


def test_the_process_that_loses_is_told_so_and_goes_on_from_what_is_durable(sites: Sites) -> None:
    """C7: two processes of one site step at once; one of them wins, and the other learns the epoch."""
    a = sites.a
    loser = a.alive()
    winner = SiteNode.open(a.parts)
    sites.ceremony(TWO)
    epoch = loser.ledger.epoch

    stored = loser.durable.store.save_state

    def late(transaction, site, state, replaces):
        loser.durable.store.save_state = stored
        a.node = winner
        sites.coordinator("a").install([TWO])
        stored(transaction, site, state, replaces)

    loser.durable.store.save_state = late
    with pytest.raises(Conflict) as refused:
        loser.distrust([MAIN.label])
    assert refused.value.epoch == epoch + 1 == loser.ledger.epoch
    assert MAIN.label not in loser.current.quarantined
    a.node = loser
    agreeing(sites)


def test_a_stale_process_loads_again_before_it_answers(sites: Sites) -> None:
    stale = sites.a.alive()
    sites.a.node = SiteNode.open(sites.a.parts)
    sites.ceremony(TWO)
    sites.coordinator("a").install([TWO])
    assert stale.ledger == sites.a.alive().ledger


def test_a_changed_state_or_batch_is_refused(sites: Sites) -> None:
    with sites.a.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("UPDATE sync_state SET state = state || '\\x00'"))
    for use in (sites.a.alive().state, lambda: sites.a.start()):
        with pytest.raises(KeyVaultError):
            use()
    with sites.b.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("UPDATE sync_state SET mac = decode(repeat('00', 16), 'hex')"))
    with pytest.raises(RecordTampered):
        sites.b.alive().state()


def test_a_database_that_does_not_keep_a_step_leaves_the_site_as_it_was(sites: Sites) -> None:
    node, before = sites.a.alive(), sites.a.alive().state()
    with sites.a.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''full''; END'"))
        transaction.execute(sqlalchemy.text("CREATE TRIGGER no BEFORE UPDATE ON sync_state FOR EACH ROW EXECUTE FUNCTION no()"))
    with pytest.raises(SyncStoreUnavailable):
        node.distrust([MAIN.label])
    assert node.state() == before
    with sites.a.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("DROP TRIGGER no ON sync_state"))
    node.distrust([MAIN.label])
    assert node.current.quarantined == (MAIN.label,)


def test_what_can_not_be_recorded_does_not_happen(sites: Sites) -> None:
    node, before = sites.a.alive(), sites.a.alive().state()

    class Full:
        def record(self, transaction, event) -> None:
            raise OSError("no space")

    site = sites.a.start()
    site.durable.parts = replace(site.parts, recorder=Full())
    with pytest.raises(OSError, match="no space"):
        site.distrust([MAIN.label])
    assert node.state() == before


class TestTokens:
    def test_a_token_is_accepted_only_by_the_serial_and_key_that_the_roster_names(self, sites: Sites) -> None:
        """A13: fail over to another token of a cluster: only one that the signed roster names for this site."""
        a = sites.a
        a.serial = "serial-of-a-spare"
        with pytest.raises(TokenForeign, match=r"names token serial-a for site a, and this is serial-of-a-spare"):
            a.start()
        a.serial = "serial-a"
        a.start()
        mine, a.hsm = a.hsm, sites.b.hsm
        with pytest.raises(TokenForeign):
            a.start()
        a.hsm = mine
        a.start()

    def test_a_token_that_officers_put_into_the_roster_is_accepted(self, sites: Sites) -> None:
        """A13: the same site, a new serial, by a roster that both sites and the officers signed."""
        sites.b.serial = "serial-of-a-new-partition"
        roster = sites.make_roster("ab", epoch=2)
        coordinator = sites.coordinator("a")
        coordinator.transact(signed(coordinator.propose(Op.ROSTER, _rows(sites), new_roster=roster)))
        sites.b.start()
        sites.b.serial = "serial-b"
        with pytest.raises(TokenForeign):
            sites.b.start()

    def test_an_empty_token_beside_a_full_store_is_refused_and_makes_no_key(self, sites: Sites) -> None:
        """A15."""
        sites.a.hsm = FakeHsm(())
        with pytest.raises(TokenForeign):
            sites.a.start()
        assert sites.a.hsm.held() == {}

    def test_a_site_without_a_state_says_so(self, sites: Sites, second_database: sqlalchemy.Engine) -> None:
        with pytest.raises(SiteUnfounded):
            SiteNode.open(replace(sites.a.parts, database=second_database))


def _rows(sites: Sites) -> tuple:
    """The table under a roster that knows b by another token: b's copies have to be proved again."""
    records = sites.a.alive().ledger.records
    return tuple(replace(record, holders=("a",), state=KeyState.DEACTIVATED) for record in records)
