"""Two sites and any number of coordinators under every fault at once; what must hold after each step, and a way on at the end.

The coordinators are a bag of all messages ever sent: any of them may reach any site at any time, again, in any order or
never, which covers loss, duplicates, reordering, replay and two coordinators alive at once.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sync_world import (
    NOW,
    Crashed,
    Node,
    ceremony,
    certificate,
    make_roster,
    propose,
    prove,
    record,
    rotation,
    run,
)

from keyvault.errors import KeyVaultError
from keyvault.states import KeyState
from keyvault.sync.errors import StoreRolledBack, TokenRolledBack
from keyvault.sync.protocol import Site, Step
from keyvault.sync.state import VOTED, SiteState
from keyvault.sync.statement import Ballot, Certificate, Op, Phase, Proposal, Signed
from keyvault.sync.table import with_sites
from keyvault.sync.verify import verify_certificates

RING = "ring/main"
SIDES = st.sampled_from("ab")
STAYS_DOWN = st.sampled_from([False, False, False, True])
PICK = st.integers(0, 1 << 16)
ORDER = {KeyState.ACTIVE: KeyState.DEACTIVATED, KeyState.DEACTIVATED: KeyState.DESTROYED}


class TwoSites(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.roster = make_roster()
        self.nodes = {name: Node(name, self.roster) for name in "ab"}
        self.proposals: list[Proposal] = []
        self.steps: dict[bytes, dict[Phase, dict[str, bytes]]] = defaultdict(lambda: defaultdict(dict))
        self.ballots: dict[int, dict[str, bytes]] = defaultdict(dict)
        self.certificates: list[bytes] = []
        self.archive: dict[int, bytes] = {}
        self.heads: dict[int, bytes] = {}
        self.floor = {"a": 0, "b": 0}
        self.snapshots: dict[str, list] = {"a": [], "b": []}
        self.version = 0
        self.suspect: set[str] = set()
        self.forgot = False
        """Whether a site's store and token were ever set back together: only then can an honest HSM contradict itself."""

    # --- doing things

    def send(self, name: str, method: Callable[[Site], Step]) -> bytes | None:
        """Deliver one message; a refusal or a crash leaves the site as it was."""
        node = self.nodes[name]
        if node.site is None:
            return None
        before = node.site
        try:
            reply = node.do(method)
        except KeyVaultError:
            assert node.site is before or node.site is None
            return None
        except Crashed:
            return None
        self.archive |= node.store.certificates
        return reply

    def prepare(self, proposal: Proposal, name: str) -> None:
        proofs = self.proofs(proposal, Phase.PREPARE)
        held = self.nodes[name].token.held()
        data = proposal.encode()
        self.keep(proposal, Phase.PREPARE, name, self.send(name, lambda site: site.prepare(data, proofs.get(name, ()), held, NOW)))

    def commit(self, proposal: Proposal, name: str) -> None:
        prepares = list(self.steps[proposal.manifest.digest][Phase.PREPARE].values())
        self.keep(proposal, Phase.COMMIT, name, self.send(name, lambda site: site.commit(prepares)))

    def acknowledge(self, proposal: Proposal, name: str) -> None:
        proofs = self.proofs(proposal, Phase.ACKNOWLEDGE)
        commits = list(self.steps[proposal.manifest.digest][Phase.COMMIT].values())
        held = self.nodes[name].token.held()
        reply = self.send(name, lambda site: site.acknowledge(commits, proofs.get(name, ()), held))
        self.keep(proposal, Phase.ACKNOWLEDGE, name, reply)

    def finish(self, proposal: Proposal, name: str) -> None:
        taken = self.steps[proposal.manifest.digest]
        if all(set(taken[phase]) == {"a", "b"} for phase in (Phase.PREPARE, Phase.COMMIT, Phase.ACKNOWLEDGE)):
            done = certificate(proposal, taken, "ab")
            self.certificates.append(done)
            self.send(name, lambda site: site.accept(done))

    def proofs(self, proposal: Proposal, phase: Phase) -> dict:
        up = [node for node in self.nodes.values() if node.site]
        try:
            names = up[0].ledger.proved(proposal) if len(up) == 2 else ()
            if len(up) < 2 or any(name not in node.token.keys for node in up for name in names):
                return {}
            return prove(proposal, phase, up)
        except KeyVaultError:
            return {}

    def keep(self, proposal: Proposal, phase: Phase, name: str, reply: bytes | None) -> None:
        if reply:
            self.steps[proposal.manifest.digest][phase][name] = reply

    def meet(self) -> None:
        if all(node.site for node in self.nodes.values()):
            for listener, speaker in (("a", "b"), ("b", "a")):
                challenge = self.nodes[listener].challenge()
                other = self.nodes[speaker]
                assert other.site is not None
                status = other.site.status(challenge, other.token.held())
                self.send(listener, lambda site, status=status: site.hear(status))
                if self.nodes[listener].site is None:
                    return

    # --- rules

    @initialize()
    def begin(self) -> None:
        run(propose(self.nodes["a"].ledger, Op.ROSTER, new_roster=self.roster), list(self.nodes.values()))
        self.propose_rotation("a", "same")
        run(self.proposals[-1], list(self.nodes.values()))
        for node in self.nodes.values():
            self.archive |= node.store.certificates

    @rule(view=SIDES, keys=st.sampled_from(["same", "same", "same", "other", "lacking"]))
    def propose_rotation(self, view: str, keys: str) -> None:
        node = self.nodes[view]
        if node.site:
            self.version += 1
            name, key = f"{RING}/{self.version}", os.urandom(32)
            self.nodes["a"].token.keys[name] = key
            if keys != "lacking":
                self.nodes["b"].token.keys[name] = key if keys == "same" else os.urandom(32)
            self.proposals.append(rotation(node.ledger, self.version))

    @rule(view=SIDES, pick=PICK)
    def propose_next_state(self, view: str, pick: int) -> None:
        node = self.nodes[view]
        if node.site and (rows := [row for row in node.ledger.records if row.state in ORDER]):
            row = rows[pick % len(rows)]
            changed = record(row.version, ORDER[row.state], "".join(row.holders))
            rest = [other for other in node.ledger.records if other != row]
            self.proposals.append(propose(node.ledger, Op.STATE, (*rest, changed)))

    @rule(view=SIDES)
    def propose_repair(self, view: str) -> None:
        node = self.nodes[view]
        if node.site and node.state.quarantined:
            tokens = [other.token.keys for other in self.nodes.values()]
            rows = []
            for row in node.ledger.records:
                lost = row.name in node.state.quarantined and any(row.name not in keys for keys in tokens)
                holders = "".join(name for name in row.holders if row.name in self.nodes[name].token.keys)
                state = KeyState.DEACTIVATED if row.state is KeyState.ACTIVE else row.state
                rows.append(record(row.version, state, holders) if lost else row)
            self.proposals.append(propose(node.ledger, Op.REPAIR, tuple(rows), repairs=node.state.quarantined))

    @rule(first=SIDES, side=SIDES, fuse=st.integers(0, 9), moves=st.integers(1, 8), again=st.booleans(), comes_back=st.booleans())
    def drive(self, first: str, side: str, fuse: int, moves: int, again: bool, comes_back: bool) -> None:
        """A coordinator dies after some messages, or one site at some durable write (or neither); the site may come back."""
        if not again or not self.proposals:
            self.propose_rotation(first, "same")
        if not self.proposals:
            return
        self.meet()
        self.nodes[side].fuse = fuse
        order = (first, "b" if first == "a" else "a")
        plan = [(move, name) for move in (self.prepare, self.commit, self.acknowledge, self.finish) for name in order]
        for move, name in plan[:moves]:
            move(self.proposals[-1], name)
        self.nodes[side].fuse = None
        if comes_back:
            self.start(side, None)

    @rule(name=SIDES, pick=PICK, move=st.sampled_from(["prepare", "commit", "acknowledge", "finish"]))
    @precondition(lambda self: self.proposals)
    def one_message(self, name: str, pick: int, move: str) -> None:
        getattr(self, move)(self.proposals[pick % len(self.proposals)], name)

    @rule(name=SIDES, pick=PICK)
    @precondition(lambda self: self.certificates or self.archive)
    def redeliver(self, name: str, pick: int) -> None:
        known = [*self.certificates, *self.archive.values()]
        self.send(name, lambda site: site.accept(known[pick % len(known)]))

    @rule(name=SIDES)
    def catch_up(self, name: str) -> None:
        for epoch in sorted(self.archive):
            self.send(name, lambda site, epoch=epoch: site.accept(self.archive[epoch]))

    @rule(name=SIDES)
    @precondition(lambda self: any(node.site and node.state.vote for node in self.nodes.values()))
    def withdraw(self, name: str) -> None:
        if reply := self.send(name, lambda site: site.withdraw()):
            epoch = Ballot.decode(Signed.decode(reply).statement).epoch
            self.ballots[epoch][name] = reply

    @rule(name=SIDES, pick=PICK)
    @precondition(lambda self: any(len(ballots) == 2 for ballots in self.ballots.values()))
    def some_void(self, name: str, pick: int) -> None:
        epochs = [epoch for epoch, ballots in self.ballots.items() if len(ballots) == 2]
        self.void(name, epochs[pick % len(epochs)])

    def void(self, name: str, epoch: int) -> None:
        ballots = tuple(Signed.decode(self.ballots[epoch][side]) for side in "ab")
        given = Certificate(None, ballots=ballots).encode()
        self.certificates.append(given)
        self.send(name, lambda site: site.accept(given))

    @rule()
    def talk(self) -> None:
        """Both sites look into their tokens and exchange status: from here on a lost key is known at both."""
        for name, node in self.nodes.items():
            self.send(name, lambda site, node=node: site.inspect(node.token.held()))
        self.meet()
        up = [node for node in self.nodes.values() if node.site and not node.state.recovering]
        if len(up) == 2 and up[0].ledger == up[1].ledger:
            self.suspect.clear()

    @rule(name=SIDES, pick=PICK, bit=st.integers(0, 1 << 20))
    def flip(self, name: str, pick: int, bit: int) -> None:
        """One bit of any message: refused, or harmless because it is what was there already; the site stays as it was."""
        kinds: list[tuple[str, bytes]] = [("accept", data) for data in (*self.certificates, *self.archive.values())]
        kinds += [("prepare", proposal.encode()) for proposal in self.proposals]
        node = self.nodes[name]
        if not kinds or node.site is None:
            return
        kind, data = kinds[pick % len(kinds)]
        bad = bytearray(data)
        bad[bit // 8 % len(bad)] ^= 1 << bit % 8
        before = node.state
        if kind == "accept":
            self.send(name, lambda site: site.accept(bytes(bad)))
        else:
            self.send(name, lambda site: site.prepare(bytes(bad), (), node.token.held(), NOW))
        assert node.state.ledger == before.ledger
        assert node.state.vote == before.vote

    @rule(name=SIDES, fuse=st.integers(0, 4) | st.none(), stays_down=STAYS_DOWN)
    def kill(self, name: str, fuse: int | None, stays_down: bool) -> None:
        self.nodes[name].site = None
        if not stays_down:
            self.start(name, fuse)

    @rule(name=SIDES, fuse=st.integers(0, 4) | st.none())
    def start(self, name: str, fuse: int | None) -> None:
        node = self.nodes[name]
        if node.site is None:
            node.fuse = fuse
            try:
                node.start()
            except Crashed:
                pass
            except (StoreRolledBack, TokenRolledBack):
                self.adopt(node)
            node.fuse = None

    def adopt(self, node: Node) -> None:
        try:
            node.adopt()
        except Crashed:
            node.site = None
        if node.site and not node.state.recovering:
            self.floor[node.name] = min(self.floor[node.name], node.ledger.epoch)

    @rule(name=SIDES, back=st.integers(1, 12), what=st.sampled_from(["store", "token", "both"]), stays_down=STAYS_DOWN)
    def restore(self, name: str, back: int, what: str, stays_down: bool) -> None:
        """An older copy of the database, the token, or both comes back."""
        node, known = self.nodes[name], self.snapshots[name]
        if not known or self.only_here(name):
            return
        store, token = copy.deepcopy(known[-min(back, len(known))])
        node.site = None
        if what != "token":
            # A forgotten quarantine comes back when the sites next talk, and not before.
            self.suspect |= set(SiteState.decode(node.store.state).quarantined)
            node.store = store
        if what != "store":
            self.suspect |= set(node.token.keys) - set(token.keys)
            node.token = token
        if what == "both":
            self.forgot = True
            self.floor[name] = 0
        if not stays_down:
            self.start(name, None)

    def only_here(self, name: str) -> bool:
        """Whether officers acted with this site and nobody else knows yet: forgetting that is beyond any protocol."""
        node, other = self.nodes[name], self.nodes["b" if name == "a" else "a"]
        return max(node.store.certificates, default=0) > max(other.store.certificates, default=0)

    @rule(name=SIDES, pick=PICK)
    def delete_key(self, name: str, pick: int) -> None:
        keys = self.nodes[name].token.keys
        if keys:
            gone = sorted(keys)[pick % len(keys)]
            del keys[gone]
            self.suspect.add(gone)

    @rule(name=SIDES, stays_down=STAYS_DOWN)
    def officers_end(self, name: str, stays_down: bool) -> None:
        """The other site is gone and this one is in doubt: M of N officers end the transaction."""
        node, other = self.nodes[name], self.nodes["b" if name == "a" else "a"]
        if node.site and node.state.vote and not self.only_here(other.name):
            other.site = None
            self.end(node, node.state.vote.proposal.manifest.digest)
            if not stays_down:
                self.start(other.name, None)

    def end(self, node: Node, doubt: bytes) -> None:
        epoch = node.ledger.epoch + 2
        act = propose(node.ledger, Op.END, epoch=epoch, survivor=node.name, ended=doubt, reason="the other site does not answer")
        if reply := self.send(node.name, lambda site: site.act(act.encode(), node.token.held(), NOW)):
            self.certificates.append(reply)

    # --- what always holds

    @invariant()
    def nothing_wraps_under_a_master_that_exists_once(self) -> None:
        for node in self.nodes.values():
            other = self.nodes["b" if node.name == "a" else "a"]
            try:
                active = node.state.protecting(RING).name if node.site else None
            except KeyVaultError:
                continue
            if active and active in node.token.keys and active not in self.suspect:
                assert other.token.keys.get(active) == node.token.keys[active], active

    @invariant()
    def at_most_one_version_is_active(self) -> None:
        for node in self.nodes.values():
            assert list(node.store.versions.values()).count(KeyState.ACTIVE) <= 1

    @invariant()
    def history_is_one_and_only_grows(self) -> None:
        for node in self.nodes.values():
            for epoch, data in node.store.certificates.items():
                head = Certificate.decode(data).head
                assert self.heads.setdefault(epoch, head) == head, f"two histories at epoch {epoch}"
            if node.site and not node.state.recovering:
                assert node.ledger.epoch >= self.floor[node.name]
                self.floor[node.name] = node.ledger.epoch
                if node.ledger.epoch:
                    assert self.heads[node.ledger.epoch] == node.ledger.head

    @invariant()
    def remember(self) -> None:
        for name, node in self.nodes.items():
            known = self.snapshots[name]
            if not known or known[-1] != (node.store, node.token):
                self.snapshots[name] = [*known, node.snapshot()][-12:]

    @invariant()
    def honest_sites_freeze_only_after_forgetting(self) -> None:
        for node in self.nodes.values():
            assert self.forgot or node.site is None or not node.state.evidence

    # --- and at the end

    def teardown(self) -> None:
        if not self.archive:
            return
        for node in self.nodes.values():
            node.fuse = None
            if node.site is None:
                try:
                    node.start()
                except (StoreRolledBack, TokenRolledBack):
                    node.adopt()
        for _ in range(3):
            for name in "ab":
                self.catch_up(name)
            if any(node.state.evidence for node in self.nodes.values()):
                break
            self.talk()
            self.settle()
        self.offline_verifier_agrees()
        if not any(node.state.evidence for node in self.nodes.values()):
            self.suspect.clear()
            self.nothing_wraps_under_a_master_that_exists_once()
            self.rotate_again()

    def rotate_again(self) -> None:
        """Whatever happened, the cluster can be brought to a new version that both sites hold."""
        stuck = [node for node in self.nodes.values() if node.state.vote or node.state.recovering]
        pair = self.replaced() if stuck else list(self.nodes.values())
        name = f"{RING}/{self.version + 1}"
        ceremony(pair, name)
        run(rotation(pair[0].ledger, self.version + 1), pair)
        assert pair[0].state.protecting(RING) == pair[1].state.protecting(RING)
        self.archive |= pair[0].store.certificates
        self.offline_verifier_agrees(pair)

    def replaced(self) -> list[Node]:
        """One site lost what it acknowledged: officers replace it, and the new site joins from the certificates."""
        survivor = next(node for node in self.nodes.values() if not node.state.recovering)
        ledger, doubt = survivor.ledger, survivor.state.vote.proposal.manifest.digest if survivor.state.vote else b""
        roster = make_roster(survivor.name + "c", epoch=2)
        rows = with_sites(ledger.records, survivor.name, roster.names)
        fields = {"epoch": ledger.epoch + (2 if doubt else 1), "ended": doubt, "survivor": survivor.name, "reason": "lost"}
        act = propose(ledger, Op.REPLACE, rows, roster, **fields)
        survivor.do(lambda site: site.act(act.encode(), survivor.token.held(), NOW))
        self.archive = {epoch: data for epoch, data in self.archive.items() if epoch <= ledger.epoch} | survivor.store.certificates
        return [survivor, Node("c", self.roster, join=[self.archive[epoch] for epoch in sorted(self.archive)])]

    def settle(self) -> None:
        """What a coordinator does with an open vote: finish it if every site can, void it, or call the officers."""
        known = {proposal.manifest.digest: proposal for proposal in self.proposals}
        states = [node.state for node in self.nodes.values()]
        open_votes = [state.vote.proposal for state in states if state.vote]
        open_votes += [known[state.recovering.head] for state in states if state.recovering and state.recovering.head in known]
        for proposal in open_votes:
            self.meet()
            for move in (self.prepare, self.commit, self.acknowledge, self.finish):
                for name in "ab":
                    move(proposal, name)
        states = [node.state for node in self.nodes.values()]
        for name in "ab" if any(state.vote or state.recovering or state.withdrawn for state in states) else "":
            self.withdraw(name)
        for epoch in [epoch for epoch, ballots in self.ballots.items() if len(ballots) == 2]:
            for name in "ab":
                self.void(name, epoch)
        self.end_what_cannot_finish()

    def end_what_cannot_finish(self) -> None:
        """A voter has lost the key, or the store that knew the vote: officers end it with a site that has not acknowledged."""
        for node in self.nodes.values():
            state = node.state
            if (state.vote and not state.vote.acknowledge) or (state.recovering and state.recovering.step == VOTED):
                self.end(node, state.vote.proposal.manifest.digest if state.vote else state.recovering.head)
                break

    def offline_verifier_agrees(self, nodes: Iterable[Node] = ()) -> None:
        for node in nodes or self.nodes.values():
            if node.state.evidence:
                continue
            chain = [self.archive[epoch] for epoch in sorted(self.archive) if epoch <= node.ledger.epoch]
            summary = verify_certificates(chain, self.roster.encode())
            assert (summary.epoch, summary.head) == (node.ledger.epoch, node.ledger.head)
            assert (summary.records, summary.marks) == (node.ledger.records, node.ledger.marks)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}

TestTwoSites = TwoSites.TestCase
TestTwoSites.settings = settings(max_examples=25, stateful_step_count=30, **QUIET)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_sites_for_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(TwoSites, settings=settings(max_examples=600, stateful_step_count=60, **QUIET))
