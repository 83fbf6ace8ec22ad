"""Two whole sites, driven by a coordinator at either: what officers ask for, and a way on from wherever it stopped."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID, uuid4

import pytest
import sqlalchemy
from real_sites import MAIN, OneSite, Sites, destruction, later, signed
from sync_world import approve
from test_batches import enrol, keys_of

from keyvault.errors import HsmUnavailable, KeyNotFound, KeyStateForbids
from keyvault.hsm import KeyName, RingMaster
from keyvault.states import KeyState
from keyvault.sync import steps
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.durable import DurableSite
from keyvault.sync.errors import (
    ApprovalMissing,
    Conflict,
    KeyStillReferenced,
    PeerUnavailable,
    ProofFailed,
    RotationTokenHolds,
    SiteBehind,
    SiteFrozen,
    StaleEpoch,
    StoreRolledBack,
    SyncRefused,
    TokenRolledBack,
)
from keyvault.sync.node import SiteNode
from keyvault.sync.statement import Evidence, Op, Phase, Proposal, Signed, Status
from keyvault.sync.verify import verify_certificates

TWO, THREE = RingMaster("main", 2), RingMaster("main", 3)


def rotate(sites: Sites, master: RingMaster, driver: str = "a") -> bytes:
    sites.ceremony(master)
    return sites.coordinator(driver).install([master])


def serving(site: OneSite) -> RingMaster:
    """What a worker of this site wraps under."""
    with site.database.begin() as transaction:
        return keys_of(site).rings.active(transaction, "main")


def certificates(sites: Sites) -> None:
    """Both sites' histories are one, and hold for whoever has only the first roster."""
    for site in sites.all.values():
        if site.node:
            history = site.node.certificates(0)
            summary = verify_certificates(history, sites.roster.encode())
            assert (summary.head, summary.records) == (site.node.ledger.head, site.node.ledger.records)


def test_a_version_becomes_active_at_both_sites_by_the_same_proof(sites: Sites) -> None:
    rotate(sites, TWO, "b")
    for site in sites.all.values():
        assert site.states() == {MAIN.label: "deactivated", TWO.label: "active"}
        assert set(site.hsm.masters()) == {MAIN, TWO}
    history = sites.a.alive().certificates(0)
    assert history == sites.b.alive().certificates(0)
    certificates(sites)
    assert [facts["op"] for facts in sites.a.journal.of("sync.closed")] == ["roster", "install", "install"]
    steps_told = [event.action for event in sites.b.journal.events if event.facts.get("epoch") == 3]
    assert steps_told == ["sync.prepared", "sync.committed", "sync.acknowledged", "sync.closed"]


class TestSiteDown:
    def test_a_rotation_waits_for_the_site_that_is_down_and_the_old_version_serves(self, sites: Sites) -> None:
        """C1: the other site down, then without the key: PRE_ACTIVE, the old one serves, and it is said who lacks what."""
        sites.links["b"].down = True
        sites.ceremony(TWO, "a")
        with pytest.raises(PeerUnavailable):
            sites.coordinator("a").install([TWO])
        assert sites.a.states() == {MAIN.label: "active", TWO.label: "pre-activation"}
        assert serving(sites.a) == MAIN
        enrol(sites.a)
        sites.links["b"].down = False
        with pytest.raises(KeyNotFound, match="site b's token does not hold ring/main/2"):
            sites.coordinator("a").install([TWO])
        assert serving(sites.a) == serving(sites.b) == MAIN
        sites.b.hsm.install(TWO, sites.a.hsm._token[TWO])
        sites.coordinator("a").install([TWO])
        assert serving(sites.a) == serving(sites.b) == TWO

    @pytest.mark.parametrize("lost", ["prepare", "commit", "acknowledge", "accept", "challenge", "offer", "answer", "reveal"])
    def test_a_lost_answer_is_asked_for_again(self, sites: Sites, lost: str) -> None:
        sites.ceremony(TWO)
        for link in sites.links.values():
            link.lose = lost
        try:
            sites.coordinator("a").install([TWO])
        except PeerUnavailable:
            for link in sites.links.values():
                link.lose = ""
            sites.coordinator("b").resume()
            if sites.a.states()[TWO.label] == "pre-activation":
                sites.coordinator("a").install([TWO])
        sites.links["b"].lose = ""
        sites.coordinator("a").exchange()
        assert serving(sites.a) == serving(sites.b) == TWO
        certificates(sites)

    def test_a_fail_over_and_back_rewrites_no_row(self, sites: Sites) -> None:
        """C4: A serves, B serves, A serves again."""
        voices = enrol(sites.a, 3)
        sites.batches("a").pump()
        before = {name: rows(site) for name, site in sites.all.items()}
        sites.a.die()
        for voice in voices:
            with sites.b.database.begin() as transaction:
                found = keys_of(sites.b).current(transaction, voice)
            keys_of(sites.b).open(found, [], lambda: None)
        sites.a.start()
        sites.coordinator("a").resume()
        assert not sites.batches("a").pump()
        assert not sites.batches("b").pump()
        assert not sites.batches("a").reconcile()
        assert {name: rows(site) for name, site in sites.all.items()} == before

    def test_who_was_not_heard_for_too_long_is_not_waited_for(self, sites: Sites) -> None:
        coordinator = sites.coordinator("a")
        coordinator.exchange()
        coordinator.require_fresh(60)
        later(sites.a, minutes=2)
        with pytest.raises(StaleEpoch):
            coordinator.require_fresh(60)
        coordinator.require_fresh(60, break_glass=True)
        sites.a.start()
        assert sites.coordinator("a").age() == 120
        sites.coordinator("a").exchange()
        sites.coordinator("a").require_fresh(60)


class TestKeys:
    def test_another_key_under_the_same_name_is_found_before_any_vote(self, sites: Sites) -> None:
        sites.ceremony(TWO, "a")
        sites.ceremony(TWO, "b")
        for driver in "ab":
            with pytest.raises(ProofFailed):
                sites.coordinator(driver).install([TWO])
        assert [site.alive().current.vote for site in sites.all.values()] == [None, None]
        assert serving(sites.a) == serving(sites.b) == MAIN
        sites.b.hsm.install(TWO, sites.a.hsm._token[TWO])  # the ceremony again
        sites.coordinator("b").install([TWO])
        assert serving(sites.b) == TWO

    def test_a_key_deleted_behind_our_back_is_found_quarantined_and_repaired_by_name_only(self, sites: Sites) -> None:
        """C3."""
        sites.b.hsm.forget(MAIN)
        found = sites.coordinator("a").exchange()
        assert found.quarantined == (MAIN.label,)
        assert sites.b.alive().current.quarantined == (MAIN.label,)
        for site in sites.all.values():
            assert site.states() == {MAIN.label: "deactivated"}
            assert site.journal.of("sync.quarantined")[-1]["versions"] == MAIN.label
            with pytest.raises(KeyStateForbids):
                serving(site)
        for _ in range(3):
            sites.coordinator("b").resume()
        assert sites.a.alive().current.quarantined == (MAIN.label,), "nothing is mended silently"
        sites.coordinator("a").repair([MAIN.label])
        assert sites.a.alive().ledger.records[0].holders == ("a",)
        rotate(sites, TWO)
        assert serving(sites.a) == serving(sites.b) == TWO

    def test_a_key_that_is_back_is_proved_again_and_serves(self, sites: Sites) -> None:
        key = sites.b.hsm._token[MAIN]
        sites.b.hsm.forget(MAIN)
        sites.coordinator("a").exchange()
        sites.b.hsm.install(MAIN, b"\x01" * 32)
        with pytest.raises(ProofFailed):
            sites.coordinator("b").repair([MAIN.label])
        sites.b.hsm.install(MAIN, key)
        sites.coordinator("b").repair([MAIN.label])
        assert serving(sites.a) == serving(sites.b) == MAIN
        assert sites.a.journal.of("sync.released")

    def test_what_is_compromised_closes_at_once_and_the_agreement_follows(self, sites: Sites) -> None:
        rotate(sites, TWO)
        sites.links["b"].down = True
        with pytest.raises(PeerUnavailable):
            sites.coordinator("a").change_states({TWO.label: KeyState.COMPROMISED}, "PIN found on a laptop")
        assert sites.a.states() == {MAIN.label: "deactivated", TWO.label: "compromised"}
        with pytest.raises(KeyStateForbids):
            serving(sites.a)
        sites.a.start()
        assert sites.a.states()[TWO.label] == "compromised"
        assert sites.b.states()[TWO.label] == "active"
        sites.links["b"].down = False
        sites.coordinator("a").resume()
        for site in sites.all.values():
            assert site.states()[TWO.label] == "compromised"
            with site.database.begin() as transaction:
                assert keys_of(site).rings.version(transaction, TWO).reason == "PIN found on a laptop"
        rotate(sites, THREE)

    def test_a_version_is_destroyed_by_officers_and_only_without_references_at_either_site(self, sites: Sites) -> None:
        rotate(sites, TWO)
        with sites.b.database.begin() as transaction:  # left behind by a restore, say
            key = keys_of(sites.b)
            with key.create(transaction, tenant="acme", voice=uuid4()) as made:
                pass
            transaction.execute(sqlalchemy.text("UPDATE wrapped_key SET ring_version = 1"))
        assert made.ref.ring_version == 2
        states, approved = {MAIN.label: KeyState.DESTROYED}, destruction([MAIN.label])
        with pytest.raises(ApprovalMissing):
            sites.coordinator("a").change_states(states, "retired")
        with pytest.raises(KeyStillReferenced, match="1 keys at site b are still wrapped under ring/main/1"):
            sites.coordinator("a").change_states(states, "retired", *approved)
        for site in sites.all.values():
            assert site.alive().current.vote is None, "the epoch was closed void"
            assert MAIN in site.hsm._token
        with sites.b.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("DELETE FROM wrapped_key"))
        sites.b.in_rotation_token.add(MAIN)
        with pytest.raises(RotationTokenHolds, match="rotation token of site b still holds ring/main/1"):
            sites.coordinator("a").change_states(states, "retired", *approved)
        assert all(MAIN in site.hsm._token for site in sites.all.values())
        sites.b.in_rotation_token.clear()
        sites.coordinator("b").change_states(states, "retired", *approved)
        for site in sites.all.values():
            assert site.states()[MAIN.label] == "destroyed"
            assert MAIN not in site.hsm._token
            assert MAIN not in site.hsm.masters()
        certificates(sites)

    def test_a_version_that_nobody_agreed_on_is_not_found(self, sites: Sites) -> None:
        for act in (
            lambda c: c.change_states({TWO.label: KeyState.SUSPENDED}, "no"),
            lambda c: c.repair([TWO.label]),
            lambda c: c.install([TWO]),
        ):
            with pytest.raises(KeyNotFound):
                act(sites.coordinator("a"))


class TestTwoCoordinators:
    def test_of_two_at_once_one_wins_and_the_other_learns_the_epoch(self, sites: Sites) -> None:
        """C7: both coordinators alive, each with its own next version."""
        sites.ceremony(TWO)
        sites.ceremony(THREE)
        first, second = sites.coordinator("a"), sites.coordinator("b")
        outcome: list[Exception] = []

        def interrupt(proposal: bytes, answers: object) -> bytes:
            del sites.a.node.prepare
            second.install([TWO])
            return sites.a.alive().prepare(proposal, answers)

        sites.a.node.prepare = interrupt
        try:
            first.install([THREE])
        except (Conflict, ProofFailed, SiteBehind) as error:
            outcome.append(error)
        assert outcome
        assert serving(sites.a) == serving(sites.b) == TWO
        first.exchange()
        late = Coordinator(sites.a.alive(), first._peer, lambda: sites.a.now)
        old = replace(late.propose(Op.STATE), manifest=replace(late.propose(Op.STATE).manifest, epoch=2))
        with pytest.raises(Conflict) as refused:
            sites.a.alive().prepare(old.encode(), ())
        assert refused.value.epoch == sites.a.alive().ledger.epoch
        first.resume()
        first.install([THREE])
        assert serving(sites.a) == serving(sites.b) == THREE
        certificates(sites)

    def test_votes_for_two_transactions_are_closed_void(self, sites: Sites) -> None:
        sites.ceremony(TWO)
        sites.ceremony(THREE)
        for name, master in (("a", TWO), ("b", THREE)):
            coordinator = sites.coordinator(name)
            vote_here_only(coordinator, sites, name, master)
        assert all(site.alive().current.vote for site in sites.all.values())
        sites.coordinator("b").resume()
        for site in sites.all.values():
            assert site.alive().current.vote is None
            assert site.states()[MAIN.label] == "active"
            assert site.states()[site_master(site)] == "destroyed"
        four = RingMaster("main", 4)
        rotate(sites, four)
        certificates(sites)


def site_master(site: OneSite) -> str:
    return (TWO if site.name == "a" else THREE).label


def vote_here_only(coordinator: Coordinator, sites: Sites, name: str, master: RingMaster) -> Proposal:
    """A transaction for which this site alone voted: its coordinator died then."""
    kept: list[Proposal] = []
    transact = coordinator.transact
    coordinator.transact = lambda proposal: kept.append(proposal)  # type: ignore[method-assign]
    coordinator.install([master])
    coordinator.transact = transact  # type: ignore[method-assign]
    (proposal,) = kept
    coordinator.exchange()
    answers = coordinator._prove(Phase.PREPARE, proposal, coordinator._sides())
    sites.all[name].alive().prepare(proposal.encode(), answers[name])
    return proposal


class TestRestores:
    def test_last_weeks_database_is_refused_and_catches_up_once_officers_adopt_it(self, sites: Sites) -> None:
        """C6: the store is older than the anchor in the token."""
        dump = sites.a.dump()
        rotate(sites, TWO)
        sites.a.restore(dump)
        with pytest.raises(StoreRolledBack):
            sites.a.alive().state()  # a process that went on meanwhile notices too
        with pytest.raises(StoreRolledBack):
            sites.a.start()
        adopt(sites.a)
        assert sites.a.journal.of("sync.adopted")
        found = sites.coordinator("a").exchange()
        assert found.taken == 1
        assert serving(sites.a) == TWO
        rotate(sites, THREE)
        certificates(sites)

    def test_a_restore_that_nobody_has_more_of_is_adopted_for_good(self, sites: Sites) -> None:
        """The store is old and the other site is gone: what this HSM signed since is lost, for ever marked."""
        dump = sites.a.dump()
        rotate(sites, TWO)
        sites.a.restore(dump)
        adopt(sites.a)
        proposal = sites.coordinator("a").propose_act(Op.ADOPT, "site b and the newer backup burned")
        sites.coordinator("a").act(signed(proposal))
        assert sites.a.alive().current.recovering is None
        assert sites.a.states()[MAIN.label] == "deactivated", "it opens what it wrapped, and wraps nothing"
        assert "site b and the newer backup burned" in sites.a.alive().ledger.marks[0]

    def test_last_months_token_is_refused_and_what_it_lacks_is_quarantined(self, sites: Sites) -> None:
        held = sites.a.token()
        rotate(sites, TWO)
        sites.a.restore_token(held)
        with pytest.raises(TokenRolledBack):
            sites.coordinator("a").exchange()
        with pytest.raises(TokenRolledBack):
            sites.a.start()
        adopt(sites.a)
        assert sites.a.alive().current.quarantined == (TWO.label,)
        sites.coordinator("b").exchange()
        assert sites.b.alive().current.quarantined == (TWO.label,)
        sites.coordinator("a").repair([TWO.label])
        rotate(sites, THREE)
        assert serving(sites.a) == serving(sites.b) == THREE

    def test_both_restored_together_while_the_other_is_down_are_noticed_when_it_is_back(self, sites: Sites) -> None:
        dump, held = sites.a.dump(), sites.a.token()
        rotate(sites, TWO)
        sites.a.restore(dump)
        sites.a.restore_token(held)
        sites.links["b"].down = True
        sites.a.start()  # store and token agree with each other: nobody else is there to say otherwise
        with pytest.raises(PeerUnavailable):
            rotate(sites, THREE)
        sites.links["b"].down = False
        found = sites.coordinator("a").exchange()
        assert (found.taken, found.quarantined) == (1, (TWO.label,))
        sites.coordinator("a").repair([TWO.label])
        sites.coordinator("a").install([THREE])
        assert serving(sites.a) == serving(sites.b) == THREE
        certificates(sites)


def adopt(site: OneSite) -> None:
    """Two officers approve exactly this store beside this token."""
    subject = steps_subject(site)
    site.node = SiteNode.adopt(site.parts, *approve(steps.ADOPT, subject))


def steps_subject(site: OneSite) -> bytes:
    return DurableSite(site.parts).adoption_subject()


class TestOfficers:
    def test_a_transaction_in_doubt_ends_without_the_site_that_is_gone(self, sites: Sites) -> None:
        sites.ceremony(TWO)
        vote_here_only(sites.coordinator("a"), sites, "a", TWO)
        sites.links["b"].down = True
        assert serving(sites.a) == MAIN
        proposal = sites.coordinator("a").propose_act(Op.END, "site b does not answer since Monday")
        with pytest.raises(ApprovalMissing):
            sites.coordinator("a").act(proposal)
        sites.coordinator("a").act(signed(proposal))
        assert sites.a.states() == {MAIN.label: "active", TWO.label: "destroyed"}
        sites.links["b"].down = False
        assert sites.coordinator("a").exchange().handed == 1
        for master in (MAIN, TWO, TWO):
            if master == MAIN:
                with pytest.raises(SyncRefused):
                    sites.b.alive().discard(master)
            else:
                sites.b.alive().discard(master)  # it had been brought into this token too
        assert (TWO in sites.b.hsm._token, sites.b.states()[TWO.label]) == (False, "destroyed")
        rotate(sites, THREE)
        assert "end by a: site b does not answer" in sites.b.alive().ledger.marks[0]
        certificates(sites)

    def test_a_site_that_is_gone_for_good_is_replaced_and_the_new_one_gets_everything(
        self, sites: Sites, second_database: sqlalchemy.Engine
    ) -> None:
        voices = enrol(sites.a, 2)
        sites.batches("a").pump()
        sites.b.die()
        sites.all["c"] = OneSite("c", second_database)
        sites.links["c"] = sites._link("c")
        roster = sites.make_roster("ac", epoch=2)
        coordinator = Coordinator(sites.a.alive(), None, lambda: sites.a.now)
        coordinator.act(signed(coordinator.propose_act(Op.REPLACE, "site b burned down", roster)))
        assert sites.a.states()[MAIN.label] == "deactivated", "it exists once: it opens, and wraps nothing new"
        c = sites.all["c"]
        c.node = SiteNode.join(c.parts, sites.roster, sites.a.alive().certificates(0))
        del sites.all["b"]
        rotate(sites, TWO)
        assert serving(sites.a) == serving(c) == TWO
        rewrap_all(sites.a, MAIN, TWO)
        assert sites.batches("a").pump().keys == 2
        with c.database.begin() as transaction:
            found = [keys_of(c).current(transaction, voice) for voice in voices]
        assert [(key.ref.ring_version, key.synced) for key in found] == [(2, 2), (2, 2)]
        certificates(sites)

    def test_a_replaced_site_that_comes_back_serves_nothing(self, sites: Sites, second_database: sqlalchemy.Engine) -> None:
        sites.all["c"] = OneSite("c", second_database)
        sites.links["c"] = sites._link("c")
        roster = sites.make_roster("ac", epoch=2)
        coordinator = Coordinator(sites.a.alive(), None, lambda: sites.a.now)
        certificate = coordinator.act(signed(coordinator.propose_act(Op.REPLACE, "site b burned down", roster)))
        sites.b.alive().accept(certificate)
        with pytest.raises(SiteFrozen):
            sites.b.alive().withdraw()
        sites.b.start()

    def test_one_hsm_with_two_histories_freezes_both_sites_and_is_kept_as_proof(self, sites: Sites) -> None:
        ledger = sites.a.alive().ledger

        def said(head: bytes) -> Signed:
            status = Status(ledger.roster.cluster, "b", ledger.epoch, head, b"", bytes(32), 1, (), 0, bytes(32))
            return Signed.make("b", status, lambda data: sites.b.hsm.sign(KeyName.SITE_IDENTITY, data))

        sites.a.alive().accuse(Evidence(said(b"\x01" * 32), said(b"\x02" * 32)).encode())
        sites.coordinator("b").exchange()
        sites.ceremony(TWO)
        for name, site in sites.all.items():
            assert site.journal.of("sync.frozen")[0]["accused"] == "b"
            with pytest.raises(SiteFrozen):
                sites.coordinator(name).install([TWO])
            with site.database.begin() as transaction:
                assert len(site.alive().durable.store.evidence(transaction)) == 1

    def test_an_act_without_a_cause_is_refused(self, sites: Sites) -> None:
        for op in (Op.END, Op.ADOPT, Op.REPLACE, Op.STATE):
            with pytest.raises(SyncRefused):
                sites.coordinator("a").propose_act(op, "because")


def rewrap_all(site: OneSite, source: RingMaster, target: RingMaster) -> None:
    """As a rotation does, row by row."""
    keys = keys_of(site)
    with site.database.begin() as transaction:
        for found in keys._store.key_page(transaction, 100, after=UUID(int=0)):
            blob = site.hsm.rewrap(found.blob, source, target)
            ref = replace(found.ref, ring_version=target.version)
            new = replace(found, ref=ref, blob=blob, row_version=found.row_version + 1)
            keys._store.replace_key(transaction, found, replace(new, mac=keys._mac.make(new.DOMAIN, *new.fields)))


class TestOneSite:
    def test_one_site_runs_through_the_very_same_code(self, database: sqlalchemy.Engine) -> None:
        sites = Sites({"a": database}, ready=False)
        roster = sites.make_roster("a", threshold=0)
        sites.a.node = SiteNode.found(sites.a.parts, roster)
        coordinator = sites.coordinator("a")
        coordinator.endorse_roster(lambda proposal: proposal)
        coordinator.endorse_roster(lambda proposal: proposal)
        sites.ceremony(MAIN)
        coordinator.install([MAIN])
        sites.ceremony(TWO)
        coordinator.install([TWO])
        coordinator.change_states({MAIN.label: KeyState.DESTROYED}, "development")
        assert sites.a.states() == {MAIN.label: "destroyed", TWO.label: "active"}
        assert coordinator.exchange().peer is None
        coordinator.resume()
        coordinator.require_fresh(0)
        assert not sites.batches("a").pump()
        summary = verify_certificates(sites.a.alive().certificates(0), roster.encode())
        assert summary.records == sites.a.alive().ledger.records
        sites.a.start()


def test_a_token_that_does_not_answer_changes_nothing(sites: Sites) -> None:
    sites.ceremony(TWO)
    sites.b.hsm.fault = HsmUnavailable("pulled")
    with pytest.raises(HsmUnavailable):
        sites.coordinator("a").install([TWO])
    sites.b.hsm.fault = None
    sites.coordinator("a").install([TWO])
    assert serving(sites.b) == TWO


def rows(site: OneSite) -> list[object]:
    with site.database.begin() as transaction:
        return transaction.execute(sqlalchemy.text("SELECT * FROM wrapped_key ORDER BY dek_id")).all()
