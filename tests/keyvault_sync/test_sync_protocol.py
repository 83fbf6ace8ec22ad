"""Prepare, Commit, Acknowledge: each rule, and the attack on it beside the same step accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from sync_world import (
    ATTRIBUTES,
    NOW,
    SITES,
    Crashed,
    Node,
    approve,
    ceremony,
    certificate,
    found_pair,
    history,
    make_roster,
    meet,
    pair_without_masters,
    propose,
    prove,
    record,
    rotation,
    run,
)

from keyvault.errors import KeyNotFound, KeyStateForbids, KeyVaultError
from keyvault.states import KeyState
from keyvault.sync.errors import (
    ApprovalExpired,
    ApprovalMissing,
    CertificateInvalid,
    Conflict,
    KeyQuarantined,
    PeerUnheard,
    ProofFailed,
    SignatureInvalid,
    SiteBehind,
    SiteFrozen,
    StaleEpoch,
    SyncRefused,
)
from keyvault.sync.protocol import Site
from keyvault.sync.state import AdvanceAnchor, FileCertificate, InstallPreActive, SaveState, require_fresh
from keyvault.sync.statement import (
    DESTROY,
    Certificate,
    Endorsement,
    Evidence,
    Op,
    Phase,
    PhaseStatement,
    Proposal,
    Signed,
    destruction_subject,
)

RING = "ring/main"
WRITES = 10
"""Durable writes of one site in an install: 3 to prepare, 1 to commit, 2 to acknowledge, 3 to close, and after the last."""


def active(node: Node) -> str:
    return node.state.protecting(RING).name


def prepare(proposal: Proposal, node: Node, other: Node) -> bytes:
    meet(node, other)
    proofs = prove(proposal, Phase.PREPARE, [node, other])
    return node.do(lambda site: site.prepare(proposal.encode(), proofs[node.name], node.token.held(), NOW))


def vote(a: Node, b: Node, version: int = 2) -> tuple[Proposal, list[bytes]]:
    ceremony([a, b], f"{RING}/{version}")
    proposal = rotation(a.ledger, version)
    return proposal, [prepare(proposal, a, b), prepare(proposal, b, a)]


def commit(a: Node, b: Node, prepares: list[bytes]) -> list[bytes]:
    return [node.do(lambda site: site.commit(prepares)) for node in (a, b)]


def acknowledge(proposal: Proposal, a: Node, b: Node, commits: list[bytes]) -> list[bytes]:
    proofs = prove(proposal, Phase.ACKNOWLEDGE, [a, b])
    return [node.do(lambda site, node=node: site.acknowledge(commits, proofs[node.name], node.token.held())) for node in (a, b)]


def whole(proposal: Proposal, prepares: list[bytes], commits: list[bytes], acks: list[bytes]) -> bytes:
    phases = zip((Phase.PREPARE, Phase.COMMIT, Phase.ACKNOWLEDGE), (prepares, commits, acks), strict=True)
    return certificate(proposal, {phase: dict(zip("ab", taken, strict=True)) for phase, taken in phases}, "ab")


def refused(kind: type[KeyVaultError], node: Node, method: Callable[[Site], object]) -> None:
    before, store = node.site, node.store.state
    with pytest.raises(kind):
        node.do(method)  # type: ignore[arg-type]
    assert (node.site, node.store.state) == (before, store)


def test_a_version_is_active_only_with_both_acknowledgements_and_the_old_one_serves_until_then() -> None:
    a, b = found_pair()
    proposal, prepares = vote(a, b)
    assert [row.name for row in a.state.pre_active] == [f"{RING}/2"]
    commits = commit(a, b, prepares)
    acks = acknowledge(proposal, a, b, commits)
    for node in (a, b):
        assert active(node) == f"{RING}/1"
        assert node.state.opening(RING, 1)
        with pytest.raises(KeyNotFound):
            node.state.opening(RING, 2)
    done = whole(proposal, prepares, commits, acks)
    for node in (a, b):
        node.do(lambda site: site.accept(done))
        assert active(node) == f"{RING}/2"
        assert node.state.opening(RING, 1).state is KeyState.DEACTIVATED
    assert a.ledger == b.ledger


def test_what_is_durable_before_each_reply() -> None:
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    proposal = rotation(a.ledger, 2)
    meet(a, b)
    proofs = prove(proposal, Phase.PREPARE, [a, b])
    step = a.site.prepare(proposal.encode(), proofs["a"], a.token.held(), NOW)  # type: ignore[union-attr]
    assert [type(effect) for effect in step.effects] == [InstallPreActive, SaveState, AdvanceAnchor]
    prepares = [a.do(lambda _: step), b.do(lambda site: site.prepare(proposal.encode(), proofs["b"], b.token.held(), NOW))]
    step = a.site.commit(prepares)  # type: ignore[union-attr]
    assert [type(effect) for effect in step.effects] == [SaveState]
    commits = [a.do(lambda _: step), b.do(lambda site: site.commit(prepares))]
    proofs = prove(proposal, Phase.ACKNOWLEDGE, [a, b])
    step = a.site.acknowledge(commits, proofs["a"], a.token.held())  # type: ignore[union-attr]
    assert [type(effect) for effect in step.effects] == [SaveState, AdvanceAnchor]
    acks = [a.do(lambda _: step), b.do(lambda site: site.acknowledge(commits, proofs["b"], b.token.held()))]
    step = a.site.accept(whole(proposal, prepares, commits, acks))  # type: ignore[union-attr]
    assert [type(effect) for effect in step.effects][:2] == [FileCertificate, SaveState]


def test_messages_again_get_the_same_answers_and_write_nothing() -> None:
    a, b = found_pair()
    proposal, prepares = vote(a, b)
    assert a.do(lambda site: site.prepare(proposal.encode(), (), {}, NOW)) == prepares[0]
    commits = commit(a, b, prepares)
    assert a.do(lambda site: site.commit(prepares)) == commits[0]
    acks = acknowledge(proposal, a, b, commits)
    before = a.store.state
    assert a.do(lambda site: site.acknowledge(commits, (), {})) == acks[0]
    assert a.store.state == before
    done = whole(proposal, prepares, commits, acks)
    a.do(lambda site: site.accept(done))
    assert a.site.accept(done).effects == ()  # type: ignore[union-attr]


def test_every_site_signs_every_phase_or_nothing_is_closed() -> None:
    a, b = found_pair()
    proposal, prepares = vote(a, b)
    refused(SyncRefused, a, lambda site: site.commit(prepares[:1]))
    refused(SyncRefused, a, lambda site: site.commit([prepares[0], prepares[0]]))
    refused(SyncRefused, a, lambda site: site.acknowledge(prepares, (), a.token.held()))
    commits = commit(a, b, prepares)
    refused(SyncRefused, a, lambda site: site.acknowledge(commits[:1], (), a.token.held()))
    refused(CertificateInvalid, a, lambda site: site.acknowledge(prepares, (), a.token.held()))
    acks = acknowledge(proposal, a, b, commits)
    given = Certificate.decode(whole(proposal, prepares, commits, acks))
    for gone in range(6):
        steps = given.endorsements[:gone] + given.endorsements[gone + 1 :]
        refused(CertificateInvalid, a, lambda site, steps=steps: site.accept(Certificate(proposal, steps).encode()))
    doubled = Certificate(proposal, (given.endorsements[0],) * 6).encode()
    refused(CertificateInvalid, a, lambda site: site.accept(doubled))
    a.do(lambda site: site.accept(given.encode()))


def test_a_signature_of_anyone_else_is_refused() -> None:
    a, b = found_pair()
    _, prepares = vote(a, b)
    step = Endorsement.decode(prepares[1])
    said = PhaseStatement.decode(step.step.statement)
    forged = replace(step, step=Signed.make("b", said, SITES["c"])).encode()
    refused(SignatureInvalid, a, lambda site: site.commit([prepares[0], forged]))
    stranger = replace(step, step=Signed.make("c", replace(said, site="c"), SITES["c"])).encode()
    refused(SyncRefused, a, lambda site: site.commit([prepares[0], stranger]))
    a.do(lambda site: site.commit(prepares))


def test_a_site_votes_once_an_epoch_and_the_loser_hears_the_epoch() -> None:
    """C7: two coordinators at once."""
    a, b = found_pair()
    vote(a, b, 2)
    ceremony([a, b], f"{RING}/3")
    other = rotation(a.ledger, 3)
    with pytest.raises(Conflict) as conflict:
        a.do(lambda site: site.prepare(other.encode(), (), a.token.held(), NOW))
    assert conflict.value.epoch == a.ledger.epoch == 2


def test_epochs_n_and_n_plus_k_at_once_stay_monotone() -> None:
    """C7: an older certificate that arrives late changes nothing."""
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    early = run(rotation(a.ledger, 2), [a, b])
    ceremony([a, b], f"{RING}/3")
    run(rotation(a.ledger, 3), [a, b])
    for node in (a, b):
        with pytest.raises(Conflict) as conflict:
            node.do(lambda site: site.accept(early))
        assert conflict.value.epoch == 4


def test_a_site_does_not_vote_before_it_heard_the_other_since_its_start() -> None:
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    proposal = rotation(a.ledger, 2)
    a.start()
    refused(PeerUnheard, a, lambda site: site.prepare(proposal.encode(), (), a.token.held(), NOW))
    prepare(proposal, a, b)


def test_an_old_status_is_not_heard_again() -> None:
    a, b = found_pair()
    challenge = a.challenge()
    status = b.site.status(challenge, b.token.held())  # type: ignore[union-attr]
    a.do(lambda site: site.hear(status))
    refused(SyncRefused, a, lambda site: site.hear(status))
    a.challenge()
    refused(SyncRefused, a, lambda site: site.hear(status))
    own = a.site.status(a.challenge(), a.token.held())  # type: ignore[union-attr]
    refused(SyncRefused, a, lambda site: site.hear(own))


def test_a_site_that_is_behind_catches_up_in_order_and_only_then_votes() -> None:
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    proposal, prepares = vote(a, b)
    commits = commit(a, b, prepares)
    done = whole(proposal, prepares, commits, acknowledge(proposal, a, b, commits))
    b.do(lambda site: site.accept(done))
    meet(a, b)
    following = rotation(b.ledger, 3)
    for node in (a, b):
        with pytest.raises((SiteBehind, Conflict)):
            node.do(lambda site, node=node: site.prepare(following.encode(), (), node.token.held(), NOW))
    a.do(lambda site: site.accept(done))
    ceremony([a, b], f"{RING}/3")
    run(following, [a, b])


def test_different_keys_under_one_name_are_not_voted_for() -> None:
    a, b = found_pair()
    a.token.keys[f"{RING}/2"], b.token.keys[f"{RING}/2"] = os.urandom(32), os.urandom(32)
    proposal = rotation(a.ledger, 2)
    for node, other in ((a, b), (b, a)):
        with pytest.raises(ProofFailed):
            prepare(proposal, node, other)
    assert active(a) == active(b) == f"{RING}/1"
    b.token.keys[f"{RING}/2"] = a.token.keys[f"{RING}/2"]
    prepare(proposal, a, b)


def test_a_key_that_one_site_lacks_is_named() -> None:
    """C1: the message says which site lacks it, and the old version serves."""
    a, b = found_pair()
    ceremony([a], f"{RING}/2")
    meet(a, b)
    proposal = rotation(a.ledger, 2)
    with pytest.raises(KeyQuarantined, match=f"{RING}/2 is not in this site's token"):
        b.do(lambda site: site.prepare(proposal.encode(), (), b.token.held(), NOW))
    weaker = {**a.token.held(), f"{RING}/2": ("EXTRACTABLE=1", "TRUSTED=1")}
    refused(KeyQuarantined, a, lambda site: site.prepare(proposal.encode(), (), weaker, NOW))
    assert active(b) == f"{RING}/1"


def test_a_proof_of_another_time_phase_or_transaction_proves_nothing() -> None:
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    proposal, other = rotation(a.ledger, 2), rotation(a.ledger, 2)
    meet(a, b)
    old = prove(proposal, Phase.PREPARE, [a, b])["a"]
    foreign = prove(other, Phase.PREPARE, [a, b])["a"]
    backwards = prove(proposal, Phase.ACKNOWLEDGE, [a, b])["a"]
    fresh = prove(proposal, Phase.PREPARE, [a, b])["a"]
    own = [replace(fresh[0], peer=Signed.make("a", fresh[0].own, SITES["a"]))]
    data = proposal.encode()
    for proofs in (old, foreign, backwards, [], fresh * 2, own, [replace(fresh[0], own=replace(fresh[0].own, tag=bytes(16)))]):
        refused(ProofFailed, a, lambda site, proofs=proofs: site.prepare(data, proofs, a.token.held(), NOW))
    a.do(lambda site: site.prepare(data, fresh, a.token.held(), NOW))


def test_acknowledging_needs_the_object_read_again_and_the_proof_the_other_way() -> None:
    a, b = found_pair()
    proposal, prepares = vote(a, b)
    commits = commit(a, b, prepares)
    same_way = prove(proposal, Phase.PREPARE, [a, b])["a"]
    refused(ProofFailed, a, lambda site: site.acknowledge(commits, same_way, a.token.held()))
    proofs = prove(proposal, Phase.ACKNOWLEDGE, [a, b])["a"]
    gone = {name: ATTRIBUTES for name in a.token.keys if name != f"{RING}/2"}
    refused(KeyQuarantined, a, lambda site: site.acknowledge(commits, proofs, gone))
    a.do(lambda site: site.acknowledge(commits, proofs, a.token.held()))


def test_a_site_that_voted_does_not_abort_alone_and_two_votes_can_only_be_finished() -> None:
    a, b = found_pair()
    proposal, prepares = vote(a, b)
    ballots = tuple(Signed.decode(node.do(lambda site: site.withdraw())) for node in (a, b))
    assert a.state.vote
    assert b.state.vote
    void = Certificate(None, ballots=ballots).encode()
    for node in (a, b):
        refused(CertificateInvalid, node, lambda site: site.accept(void))
    refused(CertificateInvalid, a, lambda site: site.accept(Certificate(None, ballots=ballots[:1]).encode()))
    commits = commit(a, b, prepares)
    done = whole(proposal, prepares, commits, acknowledge(proposal, a, b, commits))
    a.do(lambda site: site.accept(done))


def test_differing_ballots_void_the_epoch_and_its_versions_are_never_used_again() -> None:
    """B17: a version number of a transaction that came to nothing stays used."""
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    proposal = rotation(a.ledger, 2)
    first = prepare(proposal, a, b)
    ballots = tuple(Signed.decode(node.do(lambda site: site.withdraw())) for node in (a, b))
    refused(Conflict, b, lambda site: site.prepare(proposal.encode(), (), b.token.held(), NOW))
    for node in (a, b):
        node.do(lambda site: site.accept(Certificate(None, ballots=ballots).encode()))
    assert a.ledger == b.ledger
    assert (a.ledger.epoch, active(a)) == (3, f"{RING}/1")
    assert f"{RING}/2" not in a.token.keys
    refused(Conflict, a, lambda site: site.commit([first, first]))
    ceremony([a, b], f"{RING}/2")
    with pytest.raises(SyncRefused, match="reuses a version number"):
        run(rotation(a.ledger, 2), [a, b])
    with pytest.raises(Conflict):  # b never voted for it, and voted now; a's refusal voids this epoch too
        run(rotation(a.ledger, 3), [b, a]) if b.state.vote else a.do(lambda site: site.accept(history(a)[0]))


def test_equivocation_freezes_for_good() -> None:
    a, b = found_pair()
    _, prepares = vote(a, b)
    said = PhaseStatement.decode(Endorsement.decode(prepares[1]).step.statement)
    lie = Signed.make("b", replace(said, manifest=os.urandom(32)), SITES["b"])
    proof = Evidence(Endorsement.decode(prepares[1]).step, lie)
    refused(CertificateInvalid, a, lambda site: site.accuse(Evidence(proof.first, proof.first).encode()))
    forged = replace(lie, signature=SITES["a"](lie.statement))
    refused(SignatureInvalid, a, lambda site: site.accuse(Evidence(proof.first, forged).encode()))
    a.do(lambda site: site.accuse(proof.encode()))
    a.start()
    assert a.store.evidence == [proof.encode()]
    refused(SiteFrozen, a, lambda site: site.commit(prepares))
    refused(SiteFrozen, a, lambda site: site.withdraw())
    with pytest.raises(SiteFrozen):
        a.state.protecting(RING)
    assert a.state.opening(RING, 1)


def test_a_certificate_that_contradicts_the_last_one_freezes() -> None:
    a, b = found_pair()
    branch_a, branch_b = Node("a", make_roster()), Node("b", make_roster())
    for data in history(a):
        for node in (branch_a, branch_b):
            node.do(lambda site, data=data: site.accept(data))
    ceremony([a, b], f"{RING}/2")
    ceremony([branch_a, branch_b], f"{RING}/1")
    ceremony([branch_a, branch_b], f"{RING}/2")
    run(rotation(a.ledger, 2), [a, b])
    other = run(rotation(branch_a.ledger, 2), [branch_a, branch_b])
    a.do(lambda site: site.accept(other))
    assert a.state.evidence
    assert a.store.evidence


@pytest.mark.parametrize("name", "ab")
def test_a_lost_key_is_quarantined_at_both_sites_and_repaired_only_by_a_transaction(name: str) -> None:
    """C3: deleted behind our back."""
    a, b = found_pair()
    loser, other = (a, b) if name == "a" else (b, a)
    lost = loser.token.keys.pop(f"{RING}/1")
    loser.do(lambda site: site.inspect(loser.token.held()))
    meet(a, b)
    for node in (a, b):
        with pytest.raises(KeyQuarantined):
            node.state.protecting(RING)
        assert node.state.opening(RING, 1)  # where the object still is, old voices speak on
    loser.token.keys[f"{RING}/1"] = lost
    loser.do(lambda site: site.inspect(loser.token.held()))
    meet(a, b)
    with pytest.raises(KeyQuarantined):
        other.state.protecting(RING)
    run(propose(a.ledger, Op.REPAIR, repairs=(f"{RING}/1",)), [a, b])
    assert active(a) == active(b) == f"{RING}/1"


def test_a_repair_proves_the_key_again() -> None:
    a, b = found_pair()
    b.token.keys[f"{RING}/1"] = os.urandom(32)
    for node in (a, b):
        node.do(lambda site: site.distrust([f"{RING}/1"]))
    repair = propose(a.ledger, Op.REPAIR, repairs=(f"{RING}/1",))
    with pytest.raises(ProofFailed):
        run(repair, [a, b])
    gone = propose(a.ledger, Op.REPAIR, (record(1, KeyState.DEACTIVATED, "a"),), repairs=(f"{RING}/1",))
    run(gone, [a, b])
    assert a.state.opening(RING, 1)
    with pytest.raises(KeyNotFound):
        b.state.opening(RING, 1)
    ceremony([a, b], f"{RING}/2")
    run(rotation(a.ledger, 2), [a, b])
    assert active(b) == f"{RING}/2"


def test_tables_that_break_a_rule_are_not_voted_for() -> None:
    a, b = found_pair()
    meet(a, b)
    ceremony([a, b], f"{RING}/2")
    one, ledger = record(1), a.ledger
    faults = {
        "two active": propose(ledger, Op.INSTALL, (one, record(2))),
        "one holder": propose(ledger, Op.INSTALL, (record(1, KeyState.DEACTIVATED), record(2, holders="a"))),
        "new and passive": propose(ledger, Op.INSTALL, (one, record(2, KeyState.DEACTIVATED))),
        "lost record": propose(ledger, Op.INSTALL, (record(2),)),
        "described otherwise": propose(ledger, Op.STATE, (replace(one, attributes=("EXTRACTABLE=1",)),)),
        "skipped state": propose(ledger, Op.STATE, (record(1, KeyState.DESTROYED),)),
        "install by another name": propose(ledger, Op.STATE, rotation(ledger, 2).records),
        "install of nothing": propose(ledger, Op.INSTALL),
        "repair of nothing known": propose(ledger, Op.REPAIR, repairs=("ring/main/9",)),
        "another cluster": propose(ledger, Op.STATE, cluster="other"),
        "another roster": propose(ledger, Op.STATE, roster=bytes(32)),
        "the roster again": propose(ledger, Op.ROSTER, new_roster=ledger.roster),
        "roster without naming it": propose(ledger, Op.STATE, new_roster=make_roster(epoch=2)),
    }
    for name, proposal in faults.items():
        with pytest.raises(SyncRefused):
            a.do(lambda site, proposal=proposal: site.prepare(proposal.encode(), (), a.token.held(), NOW))
        assert a.state.vote is None, name
    for wrong in (propose(ledger, Op.STATE, epoch=9), propose(ledger, Op.STATE, previous=bytes(32))):
        refused(Conflict, a, lambda site, wrong=wrong: site.prepare(wrong.encode(), (), a.token.held(), NOW))


def test_version_numbers_are_never_used_again() -> None:
    """B17: going back to an old key takes a new number."""
    a, b = found_pair()
    ceremony([a, b], f"{RING}/3")
    run(rotation(a.ledger, 3), [a, b])
    ceremony([a, b], f"{RING}/2")
    with pytest.raises(SyncRefused, match="reuses a version number"):
        run(rotation(a.ledger, 2), [a, b])
    revived = (record(1), record(3, KeyState.DEACTIVATED))
    with pytest.raises(SyncRefused, match="cannot become"):
        run(propose(a.ledger, Op.STATE, revived), [a, b])


def test_destroying_needs_officers_and_their_time() -> None:
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    run(rotation(a.ledger, 2), [a, b])
    rows = (record(1, KeyState.DESTROYED), record(2))
    with pytest.raises(ApprovalMissing):
        run(propose(a.ledger, Op.STATE, rows, approved=False), [a, b])
    proposal = propose(a.ledger, Op.STATE, rows)
    subject = destruction_subject("cluster-1", [f"{RING}/1"])
    operation, approvals = approve(DESTROY, subject, hours=-1)
    with pytest.raises(ApprovalExpired):
        run(replace(proposal, operation=operation, approvals=approvals), [a, b])
    others = [("sync.state", proposal.manifest.digest), (DESTROY, destruction_subject("cluster-1", [f"{RING}/1", f"{RING}/2"]))]
    others += [(DESTROY, destruction_subject("cluster-2", [f"{RING}/1"])), ("sync.state", subject)]
    for kind, digest in others:
        operation, approvals = approve(kind, digest)
        with pytest.raises(SyncRefused, match="another operation"):
            run(replace(proposal, operation=operation, approvals=approvals), [a, b])
    run(proposal, [a, b])
    assert f"{RING}/1" not in {**a.token.keys, **b.token.keys}
    with pytest.raises(KeyStateForbids):
        a.state.opening(RING, 1)


def test_the_approval_of_a_destruction_outlives_epochs_and_destroys_nothing_twice() -> None:
    """A delay of days lies between signature and destruction; meanwhile the table goes on."""
    a, b = found_pair()
    ceremony([a, b], f"{RING}/2")
    run(rotation(a.ledger, 2), [a, b])
    operation, approvals = approve(DESTROY, destruction_subject("cluster-1", [f"{RING}/1"]))
    ceremony([a, b], f"{RING}/3")
    run(rotation(a.ledger, 3), [a, b])
    rows = (record(1, KeyState.DESTROYED), record(2, KeyState.DEACTIVATED), record(3))
    proposal = propose(a.ledger, Op.STATE, rows, approved=False)
    run(replace(proposal, operation=operation, approvals=approvals), [a, b])
    rows = (record(1, KeyState.DESTROYED), record(2, KeyState.DESTROYED), record(3))
    again = replace(propose(a.ledger, Op.STATE, rows), operation=operation, approvals=approvals)
    with pytest.raises(SyncRefused, match="another operation"):
        run(again, [a, b])


def test_a_change_of_states_says_why_under_both_signatures() -> None:
    a, b = found_pair()
    proposal = propose(a.ledger, Op.STATE, (record(1, KeyState.SUSPENDED),), reason="audit finding")
    certificate = Certificate.decode(run(proposal, [a, b]))
    assert certificate.proposal is not None
    assert certificate.proposal.manifest.reason == "audit finding"
    assert a.ledger.marks == ()
    with pytest.raises(ValueError, match="name a reason"):
        propose(a.ledger, Op.REPAIR, reason="no")


def test_compromised_versions_open_only_behind_broken_glass() -> None:
    a, b = found_pair()
    run(propose(a.ledger, Op.STATE, (record(1, KeyState.COMPROMISED),)), [a, b])
    with pytest.raises(KeyNotFound):
        a.state.protecting(RING)
    with pytest.raises(KeyStateForbids):
        a.state.opening(RING, 1)
    assert a.state.opening(RING, 1, break_glass=True)


def test_a_peer_not_heard_for_too_long_stops_serving() -> None:
    require_fresh(59.0, 60.0)
    require_fresh(60.0, 60.0)
    for age in (60.1, None, -1.0, float("nan"), float("inf")):
        with pytest.raises(StaleEpoch):
            require_fresh(age, 60.0)
        require_fresh(age, 60.0, break_glass=True)


def test_the_first_transaction_endorses_the_roster_with_the_officers() -> None:
    roster = make_roster()
    a, b = Node("a", roster), Node("b", roster)
    ceremony([a, b])
    with pytest.raises(SyncRefused):
        run(rotation(a.ledger, 1), [a, b])
    with pytest.raises(ApprovalMissing):
        run(propose(a.ledger, Op.ROSTER, new_roster=roster, approved=False), [a, b])
    run(propose(a.ledger, Op.ROSTER, new_roster=roster), [a, b])


def test_one_site_is_a_development_mode_with_the_same_steps() -> None:
    roster = make_roster("a", threshold=0)
    node = Node("a", roster)
    run(propose(node.ledger, Op.ROSTER, new_roster=roster, approved=False), [node])
    ceremony([node])
    run(rotation(node.ledger, 1), [node])
    assert active(node) == f"{RING}/1"
    node.start()
    assert active(node) == f"{RING}/1"


def finish(proposal: Proposal, a: Node, b: Node) -> None:
    """What any coordinator does: hand over what the other site closed, or drive the transaction from its start."""
    filed = a.store.certificates | b.store.certificates
    for node in (a, b):
        for data in (filed[epoch] for epoch in sorted(filed) if epoch > node.ledger.epoch):
            node.do(lambda site, data=data: site.accept(data))
    if a.ledger.head != proposal.manifest.digest:
        prepares = [prepare(proposal, a, b), prepare(proposal, b, a)]
        commits = commit(a, b, prepares)
        done = whole(proposal, prepares, commits, acknowledge(proposal, a, b, commits))
        for node in (a, b):
            node.do(lambda site: site.accept(done))


@pytest.mark.parametrize("fuse", range(14))
@pytest.mark.parametrize("side", "ab")
def test_a_crash_before_or_after_any_durable_write_is_resumed(side: str, fuse: int) -> None:
    a, b = pair_without_masters()
    node = {"a": a, "b": b}[side]
    ceremony([a, b])
    proposal = rotation(a.ledger, 1)
    node.fuse = fuse
    if fuse < WRITES:
        with pytest.raises(Crashed):
            finish(proposal, a, b)
        node.start()
    finish(proposal, a, b)
    assert a.ledger == b.ledger
    assert active(a) == active(b) == f"{RING}/1"
    assert a.store.versions == b.store.versions == {f"{RING}/1": KeyState.ACTIVE}
