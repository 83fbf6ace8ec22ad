"""Restores, dead sites and transactions in doubt: noticed, refused, and a way on that M of N officers open for ever marked."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from sync_world import (
    NOW,
    SITES,
    Node,
    approve,
    ceremony,
    found_pair,
    history,
    make_roster,
    meet,
    propose,
    prove,
    record,
    rotation,
    run,
)

from keyvault.errors import KeyNotFound
from keyvault.states import KeyState
from keyvault.sync import steps
from keyvault.sync.errors import (
    ApprovalExpired,
    ApprovalMissing,
    Conflict,
    KeyQuarantined,
    SignatureInvalid,
    SiteBehind,
    SiteFrozen,
    SitesDiverged,
    StoreRolledBack,
    SyncRefused,
    TokenRolledBack,
)
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import CLOSED, NO_ANCHOR, Anchor
from keyvault.sync.statement import Evidence, Op, Phase, PhaseStatement, Proposal, Signed
from keyvault.sync.verify import verify_certificates

RING = "ring/main"
GONE = "site b burned down"


def rotate(a: Node, b: Node, version: int) -> bytes:
    ceremony([a, b], f"{RING}/{version}")
    return run(rotation(a.ledger, version), [a, b])


def voted(a: Node, b: Node, version: int = 2, sites: str = "a") -> Proposal:
    """A transaction in doubt: only `sites` voted."""
    ceremony([a, b], f"{RING}/{version}")
    proposal = rotation(a.ledger, version)
    meet(a, b)
    proofs = prove(proposal, Phase.PREPARE, [a, b])
    for node in (a, b):
        if node.name in sites:
            node.do(lambda site, node=node: site.prepare(proposal.encode(), proofs[node.name], node.token.held(), NOW))
    return proposal


def end(node: Node, proposal: Proposal, **fields: object) -> Proposal:
    values = {"epoch": node.ledger.epoch + 2, "survivor": node.name, "ended": proposal.manifest.digest, "reason": GONE}
    return propose(node.ledger, Op.END, **{**values, **fields})


def act(node: Node, proposal: Proposal) -> bytes:
    return node.do(lambda site: site.act(proposal.encode(), node.token.held(), NOW))


# --- restores


def test_last_weeks_database_is_refused_and_catches_up_after_officers_adopt_it() -> None:
    """C6."""
    a, b = found_pair()
    rotate(a, b, 2)
    week_old = copy.deepcopy(a.store)
    rotate(a, b, 3)
    run(propose(a.ledger, Op.STATE, (record(1, KeyState.DESTROYED), record(2, KeyState.DEACTIVATED), record(3))), [a, b])
    a.store = week_old
    with pytest.raises(StoreRolledBack):
        a.start()
    a.adopt()
    for refusal in (lambda: a.state.protecting(RING), lambda: a.state.opening(RING, 1), lambda: a.do(lambda s: s.withdraw())):
        with pytest.raises(StoreRolledBack):
            refusal()
    for data in history(b)[-2:]:
        a.do(lambda site, data=data: site.accept(data))
    assert a.ledger == b.ledger
    assert a.state.protecting(RING).version == 3
    a.start()
    rotate(a, b, 4)


def test_an_adoption_is_for_one_store_beside_one_anchor_and_ends_in_time() -> None:
    a, b = found_pair()
    old = copy.deepcopy(a.store)
    rotate(a, b, 2)
    newer = a.store
    a.store = old
    subject = steps.adoption_subject(a.store.state, a.token.anchor)
    for wrong in (
        approve("keys.destroy", subject),
        approve(steps.ADOPT, steps.adoption_subject(newer.state, a.token.anchor)),
        approve(steps.ADOPT, steps.adoption_subject(a.store.state, NO_ANCHOR)),
    ):
        with pytest.raises(SyncRefused):
            a.adopt(wrong)
    with pytest.raises(ApprovalMissing):
        a.adopt(approve(steps.ADOPT, subject, people=("bo",)))
    with pytest.raises(ApprovalExpired):
        a.adopt(approve(steps.ADOPT, subject, hours=0))
    a.adopt(approve(steps.ADOPT, subject))


def test_last_months_token_is_refused_and_its_missing_keys_are_quarantined_after_adoption() -> None:
    a, b = found_pair()
    month_old = copy.deepcopy(a.token)
    rotate(a, b, 2)
    a.token = month_old
    with pytest.raises(TokenRolledBack):
        a.start()
    a.adopt()
    with pytest.raises(KeyQuarantined):
        a.state.protecting(RING)
    assert a.token.anchor == a.state.anchor
    meet(a, b)
    with pytest.raises(KeyQuarantined):
        b.state.protecting(RING)
    rows = (record(1, KeyState.DEACTIVATED), record(2, KeyState.DEACTIVATED, "b"))
    run(propose(a.ledger, Op.REPAIR, rows, repairs=(f"{RING}/2",)), [a, b])
    rotate(a, b, 3)
    assert b.state.opening(RING, 2)


def test_an_empty_or_foreign_token_is_refused() -> None:
    """A15, token swapped."""
    a, b = found_pair()
    anchors, a.token.anchors = a.token.anchors, []
    with pytest.raises(TokenRolledBack):
        a.start()
    a.token.anchors = [Anchor(2, CLOSED, bytes(32))]
    with pytest.raises(StoreRolledBack):
        a.start()
    a.token.anchors = anchors
    a.start()
    with pytest.raises(TokenRolledBack):
        steps.found(make_roster(), "b", b.token.anchor)


def test_store_and_token_restored_together_while_the_other_is_down_are_noticed_when_it_is_back() -> None:
    a, b = found_pair()
    both = a.snapshot()
    certificate = rotate(a, b, 2)
    a.store, a.token = both
    a.start()
    following = rotation(a.ledger, 3)
    meet(a, b)
    with pytest.raises(SiteBehind):
        a.do(lambda site: site.prepare(following.encode(), (), a.token.held(), NOW))
    a.do(lambda site: site.accept(certificate))
    a.do(lambda site: site.inspect(a.token.held()))
    assert a.ledger == b.ledger
    with pytest.raises(KeyQuarantined):
        a.state.protecting(RING)


def test_a_forgotten_vote_is_remembered_by_the_anchor() -> None:
    a, b = found_pair()
    before = copy.deepcopy(a.store)
    proposal = voted(a, b, sites="ab")
    a.store = before
    with pytest.raises(StoreRolledBack):
        a.start()
    a.adopt()
    meet(a, b)
    other = rotation(a.ledger, 3)
    with pytest.raises(StoreRolledBack):
        a.do(lambda site: site.prepare(other.encode(), (), a.token.held(), NOW))
    run(proposal, [a, b])
    assert a.state.protecting(RING).version == 2


def test_a_forgotten_acknowledgement_is_given_again_for_the_same_transaction_and_never_ended() -> None:
    """The reply got lost, then the store: only the anchor knows what this HSM signed."""
    a, b = found_pair()
    before = copy.deepcopy(a.store)
    proposal = voted(a, b, sites="ab")
    prepares = [node.state.vote.prepare.encode() for node in (a, b) if node.state.vote]
    commits = [node.do(lambda site: site.commit(prepares)) for node in (a, b)]
    proofs = prove(proposal, Phase.ACKNOWLEDGE, [a, b])
    a.do(lambda site: site.acknowledge(commits, proofs["a"], a.token.held()))
    a.store = before
    a.adopt()
    with pytest.raises(StoreRolledBack):
        act(a, end(a, proposal))
    meet(a, b)
    again = prove(proposal, Phase.PREPARE, [a, b])
    a.do(lambda site: site.prepare(proposal.encode(), again["a"], a.token.held(), NOW))
    with pytest.raises(SyncRefused, match="acknowledged"):
        act(a, end(a, proposal))
    a.start()
    run(proposal, [a, b])
    assert a.ledger == b.ledger
    assert a.state.protecting(RING).version == 2


def test_a_site_that_forgot_its_vote_with_its_token_meets_its_own_signature_and_freezes() -> None:
    a, b = found_pair()
    both = a.snapshot()
    voted(a, b, 2, sites="ab")
    prepares = [node.state.vote.prepare.encode() for node in (a, b) if node.state.vote]
    b.site = None
    a.store, a.token = both
    a.start()
    b.start()
    voted(a, b, 3, sites="a")
    a.do(lambda site: site.commit(prepares))
    assert a.state.evidence
    with pytest.raises(SiteFrozen):
        a.do(lambda site: site.commit(prepares))
    b.do(lambda site: site.accuse(a.store.evidence[0]))
    assert b.state.evidence


# --- in doubt


def test_officers_end_what_is_in_doubt_and_the_other_site_accepts_it() -> None:
    a, b = found_pair()
    proposal = voted(a, b, sites="ab")
    done = act(a, end(a, proposal))
    assert f"{RING}/2" not in a.token.keys
    assert a.state.protecting(RING).version == 1
    b.start()
    b.do(lambda site: site.accept(done))
    assert a.ledger == b.ledger
    assert a.ledger.marks == ("4 end by a: site b burned down",)
    with pytest.raises(SyncRefused):
        rotate(a, b, 2)
    rotate(a, b, 3)
    assert "4 end by a" in verify_certificates(history(a), make_roster().encode()).marks[0]


def test_an_act_needs_the_quorum_its_time_and_exactly_what_is_open() -> None:
    a, b = found_pair()
    proposal = voted(a, b)
    good = end(a, proposal)
    for kind, wrong in (
        (ApprovalMissing, replace(good, operation=None, approvals=())),
        (ApprovalMissing, replace(good, approvals=good.approvals[:2])),
        (SyncRefused, end(a, rotation(a.ledger, 9))),
        (SyncRefused, end(a, proposal, survivor="b")),
        (Conflict, end(a, proposal, epoch=a.ledger.epoch + 1)),
    ):
        with pytest.raises(kind):
            act(a, wrong)
    with pytest.raises(SignatureInvalid, match="no site 'c'"):
        a.ledger.check(end(a, proposal, survivor="c"), verify_p256)
    operation, approvals = approve("sync.end", good.manifest.digest, hours=0)
    with pytest.raises(ApprovalExpired):
        act(a, replace(good, operation=operation, approvals=approvals))
    meet(a, b)
    with pytest.raises(SyncRefused):
        b.do(lambda site: site.prepare(good.encode(), (), b.token.held(), NOW))
    done = act(a, good)
    assert act(a, good) == done


def test_what_this_site_acknowledged_cannot_be_ended_beside_the_other() -> None:
    a, b = found_pair()
    proposal = voted(a, b, sites="ab")
    prepares = [node.state.vote.prepare.encode() for node in (a, b) if node.state.vote]
    commits = [node.do(lambda site: site.commit(prepares)) for node in (a, b)]
    proofs = prove(proposal, Phase.ACKNOWLEDGE, [a, b])
    a.do(lambda site: site.acknowledge(commits, proofs["a"], a.token.held()))
    with pytest.raises(SyncRefused, match="acknowledged"):
        act(a, end(a, proposal))
    done = act(b, end(b, proposal))
    a.do(lambda site: site.accept(done))
    assert a.ledger == b.ledger


# --- a dead site


def replacement(a: Node, names: str = "ac", **fields: object) -> Proposal:
    rows = tuple(replace(row, holders=("a",), state=deactivated(row.state)) for row in a.ledger.records)
    roster = make_roster(names, epoch=a.ledger.roster.epoch + 1)
    return propose(a.ledger, Op.REPLACE, rows, roster, survivor="a", reason=GONE, **fields)


def deactivated(state: KeyState) -> KeyState:
    return KeyState.DEACTIVATED if state is KeyState.ACTIVE else state


def test_a_dead_site_is_replaced_old_voices_open_and_only_a_new_version_wraps() -> None:
    a, b = found_pair()
    b.site = None
    act(a, replacement(a))
    assert a.state.opening(RING, 1)
    with pytest.raises(KeyNotFound):
        a.state.protecting(RING)
    c = Node("c", make_roster(), join=history(a))
    with pytest.raises(KeyNotFound):
        c.state.opening(RING, 1)
    ceremony([a, c], f"{RING}/2")
    rows = (*a.ledger.records, record(2, holders="ac"))
    run(propose(a.ledger, Op.INSTALL, rows), [a, c])
    assert a.state.protecting(RING) == c.state.protecting(RING)
    summary = verify_certificates(history(a), make_roster().encode())
    assert summary.roster.names == ("a", "c")
    assert summary.marks == a.ledger.marks != ()
    b.start()
    b.do(lambda site: site.accept(history(a)[2]))
    for call in (lambda: b.state.protecting(RING), lambda: b.state.opening(RING, 1), lambda: b.do(lambda s: s.withdraw())):
        with pytest.raises(SiteFrozen):
            call()


def test_replacing_ends_what_was_in_doubt_and_lifts_a_freeze_of_the_site_that_lied() -> None:
    a, b = found_pair()
    proposal = voted(a, b, sites="ab")
    said = PhaseStatement.decode(b.state.vote.prepare.step.statement)  # type: ignore[union-attr]
    lie = Signed.make("b", replace(said, manifest=bytes(32)), SITES["b"])
    a.do(lambda site: site.accuse(Evidence(b.state.vote.prepare.step, lie).encode()))  # type: ignore[union-attr]
    with pytest.raises(SiteFrozen):
        act(a, end(a, proposal))
    with pytest.raises(SyncRefused):
        act(a, replacement(a))
    act(a, replacement(a, ended=proposal.manifest.digest, epoch=a.ledger.epoch + 2))
    assert not a.state.evidence
    assert a.store.evidence


def test_a_site_that_lied_is_not_the_survivor() -> None:
    a, b = found_pair()
    proposal = voted(a, b)
    said = PhaseStatement.decode(a.state.vote.prepare.step.statement)  # type: ignore[union-attr]
    lie = Signed.make("a", replace(said, manifest=bytes(32)), SITES["a"])
    a.do(lambda site: site.accuse(Evidence(a.state.vote.prepare.step, lie).encode()))  # type: ignore[union-attr]
    with pytest.raises(SiteFrozen):
        act(a, replacement(a, ended=proposal.manifest.digest, epoch=a.ledger.epoch + 2))


def test_a_replacement_keeps_the_survivor_and_changes_nothing_else() -> None:
    a, b = found_pair()
    b.site = None
    good = replacement(a)
    still_active = propose(a.ledger, Op.REPLACE, (record(1, holders="a"),), good.new_roster, survivor="a", reason=GONE)
    without_survivor = propose(a.ledger, Op.REPLACE, good.records, make_roster("bc", epoch=2), survivor="a", reason=GONE)
    jump = propose(a.ledger, Op.REPLACE, good.records, make_roster("ac", epoch=3), survivor="a", reason=GONE)
    for wrong in (still_active, without_survivor, jump):
        with pytest.raises(SyncRefused):
            act(a, wrong)
    act(a, good)


def test_a_lone_survivor_serves_as_a_named_development_roster() -> None:
    a, b = found_pair()
    b.site = None
    alone = replace(make_roster("a", epoch=2))
    act(a, propose(a.ledger, Op.REPLACE, (record(1, holders="a"),), alone, survivor="a", reason=GONE))
    assert a.state.protecting(RING).version == 1
    assert a.ledger.roster.development
    assert a.ledger.marks


def test_a_second_site_joins_a_development_cluster() -> None:
    roster = make_roster("a")
    a = Node("a", roster)
    run(propose(a.ledger, Op.ROSTER, new_roster=roster), [a])
    ceremony([a])
    run(rotation(a.ledger, 1), [a])
    two = make_roster("ab", epoch=2)
    run(propose(a.ledger, Op.ROSTER, (record(1, KeyState.DEACTIVATED, "a"),), two), [a])
    b = Node("b", roster, join=history(a))
    ceremony([a, b], f"{RING}/2")
    run(propose(a.ledger, Op.INSTALL, (*a.ledger.records, record(2))), [a, b])
    assert a.state.protecting(RING) == b.state.protecting(RING)


def test_officers_adopt_for_good_what_no_other_site_remembers() -> None:
    a, b = found_pair()
    rotate(a, b, 2)
    old = copy.deepcopy(a.store)
    rotate(a, b, 3)
    goal = a.token.anchor
    a.store, b.site = old, None
    a.adopt()
    rows = (record(1, KeyState.DEACTIVATED), record(2, KeyState.DEACTIVATED))
    fields = {"epoch": goal.epoch + 1, "ended": goal.head, "survivor": "a", "reason": "b is lost, so is the newer backup"}
    with pytest.raises(SyncRefused):
        act(a, propose(a.ledger, Op.ADOPT, (record(1, KeyState.DEACTIVATED), record(2)), **fields))
    with pytest.raises(SyncRefused):
        act(a, propose(a.ledger, Op.ADOPT, rows, **{**fields, "ended": bytes(32)}))
    certificate = act(a, propose(a.ledger, Op.ADOPT, rows, **fields))
    assert a.ledger.epoch == goal.epoch + 1
    assert a.state.opening(RING, 2)
    a.start()
    b.start()
    with pytest.raises(Conflict):
        b.do(lambda site: site.accept(certificate))


def test_officers_who_act_at_both_sites_split_them_and_that_is_named() -> None:
    a, b = found_pair()
    proposal = voted(a, b, sites="ab")
    act(a, end(a, proposal))
    act(b, end(b, proposal))
    with pytest.raises(SitesDiverged):
        meet(a, b)
    with pytest.raises(SitesDiverged):
        meet(b, a)
