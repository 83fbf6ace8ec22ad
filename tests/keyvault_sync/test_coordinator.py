"""Two whole sites, driven by a coordinator at either: what officers ask for, and a way on from wherever it stopped."""

from __future__ import annotations

from real_sites import MAIN, Sites

from keyvault.hsm import RingMaster
from keyvault.sync.verify import verify_certificates

TWO = RingMaster("main", 2)


def test_a_version_becomes_active_at_both_sites_by_the_same_proof(sites: Sites) -> None:
    sites.ceremony(TWO)
    sites.coordinator("b").install([TWO])
    for site in sites.all.values():
        assert site.states() == {MAIN.label: "deactivated", TWO.label: "active"}
        assert set(site.hsm.masters()) == {MAIN, TWO}
    history = sites.a.alive().certificates(0)
    assert history == sites.b.alive().certificates(0)
    assert verify_certificates(history, sites.roster.encode()).records == sites.a.alive().ledger.records
    assert [facts["op"] for facts in sites.a.journal.of("sync.closed")] == ["roster", "install", "install"]
