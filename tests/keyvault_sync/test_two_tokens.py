"""Two real tokens in two processes: the proof, what is refused, and a process that is killed between two writes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fresh_databases import FreshDatabases
from hsm_fixtures import in_own_process
from site_process import Place, Running, carry, made_token, make_apart
from sync_world import PEOPLE, approve

from keyvault.approvals import Officer
from keyvault.hsm import RingMaster
from keyvault.sync.errors import PeerUnavailable, ProofFailed
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.statement import Op, Proposal
from keyvault.sync.verify import verify_certificates

pytestmark = pytest.mark.timeout(400)  # a dozen processes start, each with a token of its own
ONE, TWO, THREE = (RingMaster("main", number) for number in (1, 2, 3))


@dataclass
class Pair:
    a: Running
    b: Running
    roster: Roster

    def ceremony(self, master: RingMaster) -> None:
        for site in (self.a, self.b):
            site("expect", master.label)
            site.expected = (*site.expected, master)
        carry(self.a.place.config, self.b.place.config, master)

    def agree(self) -> dict[str, str]:
        """Both sites' one table, as their workers read it and as anybody verifies it."""
        a, b = self.a("view"), self.b("view")
        assert (a["epoch"], a["head"], a["states"]) == (b["epoch"], b["head"], b["states"])
        assert a["held"] == b["held"]
        assert list(a["states"].values()).count("active") == 1
        for site in (self.a, self.b):
            assert verify_certificates(site("history"), self.roster.encode()).head == a["head"]
        return a["states"]


@pytest.fixture(scope="module")
def pair(databases: FreshDatabases) -> Iterator[Pair]:
    """Two sites with endorsed roster and ring/main/1 active."""
    folder = Path(tempfile.mkdtemp(prefix="glottis-sites-"))
    with databases.one(pool_size=4) as one, databases.one(pool_size=4) as other:
        urls = {"a": one, "b": other}
        places = {
            name: Place(
                name,
                in_own_process(made_token, folder / f"token-{name}", name),
                database.url.render_as_string(hide_password=False),
                folder,
            )
            for name, database in urls.items()
        }
        a, b = Running(places["a"], places["b"]), Running(places["b"], places["a"])
        try:
            for site in (a, b):
                site.start()
            officers = tuple(Officer(name, (signer.public,)) for name, signer in sorted(PEOPLE.items()))
            keys = tuple(SiteKey(site.place.name, site.place.config.serial, site("identity")) for site in (a, b))
            found = Pair(a, b, Roster("cluster-1", 1, keys, officers, 2))
            for site in (a, b):
                site("found", found.roster)
            proposal = Proposal.decode(a("propose_roster", found.roster))
            operation, approvals = approve(f"sync.{Op.ROSTER}", proposal.manifest.digest, hours=24 * 365 * 50)
            a("transact", replace(proposal, operation=operation, approvals=approvals).encode())
            found.ceremony(ONE)
            a("install", ONE.label)
            yield found
        finally:
            a.kill()
            b.kill()
            shutil.rmtree(folder)


def test_a_version_is_proved_equal_and_becomes_active_at_both(pair: Pair) -> None:
    pair.ceremony(TWO)
    pair.a("install", TWO.label)
    assert pair.agree() == {ONE.label: "deactivated", TWO.label: "active"}
    for site in (pair.a, pair.b):
        assert site("view")["masters"] == (ONE, TWO)
        assert "TRUSTED=1" in site("view")["held"][TWO.label]


def test_another_key_under_the_same_name_is_never_active(pair: Pair) -> None:
    before = pair.agree()
    for site in (pair.a, pair.b):
        site("expect", THREE.label)
        site.expected = (*site.expected, THREE)
        make_apart(site.place.config, THREE)
    with pytest.raises(ProofFailed, match=f"different keys as {THREE.label}"):
        pair.a("install", THREE.label)
    assert pair.agree() == {**before, THREE.label: "pre-activation"}


@pytest.mark.parametrize(("side", "fuse"), [("b", 5), ("a", 6)])
def test_a_site_killed_between_two_writes_comes_back_and_agrees(pair: Pair, side: str, fuse: int) -> None:
    killed_in_rotation(pair, side, fuse)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_site_killed_before_and_after_any_write(pair: Pair, side: str) -> None:
    for fuse in range(14):
        killed_in_rotation(pair, side, fuse)


def killed_in_rotation(pair: Pair, side: str, fuse: int) -> None:
    """SIGKILL at one durable write; the next start mends what is half, and resume brings both to one table."""
    master = RingMaster("main", 1 + max(RingMaster.named(name).version for name in pair.agree()))
    pair.ceremony(master)
    victim, other = (pair.a, pair.b) if side == "a" else (pair.b, pair.a)
    victim("light", fuse)
    with contextlib.suppress(PeerUnavailable):  # of its very last write nobody waits to hear
        pair.a("install", master.label)
    assert victim.died()
    assert list(other("view")["states"].values()).count("active") == 1
    victim.start()
    other("resume")
    states = pair.agree()
    assert states[master.label] in ("active", "pre-activation", "destroyed")
    assert victim("view")["anchors"] == 1
