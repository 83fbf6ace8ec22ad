"""A set of policies decides once officers signed its version and hash; whatever else stands in the database does not."""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from real_sites import OneSite, Sites
from sqlalchemy import text
from sync_world import PEOPLE, Signer, make_roster

from keyvault.approval_kinds import Kind, Request, described
from keyvault.approvals import signed_by
from keyvault.errors import RowChanged
from keyvault.records import RecordMac
from keyvault.sync.errors import ApprovalInvalid, ApprovalMissing, RequesterApproved, SyncRefused
from policies import cases
from policies.engine import SHIPPED, PolicyEngine
from policies.errors import PolicySetInvalid, PolicySetTampered
from policies.grants import Purpose
from policies.sets.active import RETRY_S, ActivePolicies
from policies.sets.policy_set import PolicySet, changes
from policies.sets.store import ActivationStore
from service.approving import site_inbox
from service.errors import PolicySetRefused
from service.policy_sets import ActiveSet, PolicyCommands, _rosters
from service.policy_sets import active_policies as policies_of

READERS_SPEAK = """
// Every reader who verifies may make voices speak.
@id("own.readers-speak")
permit (principal, action == Action::"speak", resource)
when { principal.roles == ["reader", "verifier"] && !principal.roles.contains("speaker") };
"""
ROW = (
    '{"name": "a reader", "action": "speak", "client": {"roles": ["reader", "verifier"]},'
    ' "allowed": true, "decided_by": ["own.readers-speak"]}'
)
READER = replace(cases.HONEST, client=replace(cases.HONEST.client, roles=("reader", "verifier")))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the shipped set with one policy more."""
    for source in (*SHIPPED.glob("*.cedar"), SHIPPED / "schema.cedarschema"):
        shutil.copy(source, tmp_path)
    shutil.copytree(SHIPPED / "cases", tmp_path / "cases")
    (tmp_path / "own.cedar").write_text(READERS_SPEAK)
    (tmp_path / "cases" / "own.json").write_text(f'{{"cases": [{ROW}]}}')
    return tmp_path


class Site:
    """One site's commands, officers, and a worker that decides there."""

    def __init__(self, site: OneSite, roster_file: Path) -> None:
        self.site, self.roster_file, self.time = site, roster_file, 0.0
        self.commands = self.new_commands()
        self.worker = self.new_worker()

    def new_commands(self) -> PolicyCommands:
        node = self.site.alive()
        return PolicyCommands(site_inbox(node), node, ActiveSet(self.site.hsm, self.site.name, self.roster_file))

    def new_worker(self) -> ActivePolicies:
        return policies_of(self.site.hsm, self.site.name, self.roster_file)

    def decides(self, worker: ActivePolicies | None = None) -> bool:
        """Whether a reader speaks here now, by what a decision's own transaction reads."""
        with self.site.database.begin() as transaction:
            version = ActivationStore(RecordMac(self.site.hsm)).newest(transaction)
            return (worker or self.worker).at(version, transaction).decide(READER).allowed

    def propose(self, policies: PolicySet) -> str:
        return str(self.commands.policy_propose(text_of(policies))["request"])

    def approve(self, name: str, *people: str) -> None:
        request = self.commands.inbox.one(name).request
        for person in people:
            approval = signed_by(request.operation, person, "approve", PEOPLE[person])
            self.commands.inbox.add(replace(request, approvals=(approval,)))

    def activated(self, policies: PolicySet) -> dict[str, Any]:
        name = self.propose(policies)
        self.approve(name, "bo", "cy")
        return self.commands.policy_activate(name)

    def sql(self, statement: str, **values: object) -> None:
        with self.site.database.begin() as transaction:
            transaction.execute(text(statement), values)


@pytest.fixture
def at(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    roster = tmp_path_factory.mktemp("roster") / "roster"
    roster.write_bytes(sites.roster.encode())
    return lambda name: Site(sites.all[name], roster)


def text_of(policies: PolicySet) -> str:
    return base64.b64encode(policies.encode()).decode()


def test_an_approved_set_decides_and_the_way_back_is_an_activation_too(at: Callable[[str], Site], own: Path) -> None:
    a = at("a")
    assert not a.decides()
    name = a.propose(PolicySet.of_folder(own))
    with pytest.raises(ApprovalMissing):
        a.commands.policy_activate(name)
    a.approve(name, "bo")
    with pytest.raises(ApprovalMissing):
        a.commands.policy_activate(name)
    assert not a.decides()
    a.approve(name, "cy")
    done = a.commands.policy_activate(name)
    assert (done["version"], done["approved_by"]) == (1, ["bo", "cy"])
    signed = a.commands.inbox.one(name).request
    assert a.decides(), "the worker that was there before"
    assert a.decides(a.new_worker()), "a new one"
    with pytest.raises(ApprovalMissing):  # it was carried out
        a.commands.policy_activate(name)
    a.activated(PolicySet())
    assert not a.decides()
    b = at("b")
    assert not b.decides()
    b.commands.inbox.file(signed)  # each site activates for itself, by the same signatures
    b.commands.policy_activate(name)
    assert b.decides()
    listed = a.commands.policy_activations()["activations"]
    assert [(one["version"], one["shipped"], one["code"]) for one in listed] == [(1, False, None), (2, True, None)]
    assert [said["version"] for said in a.site.journal.of("policy.activated")] == [1, 2]


def test_what_officers_did_not_sign_is_no_activation(at: Callable[[str], Site], own: Path) -> None:
    a, wanted = at("a"), PolicySet.of_folder(own)
    name = a.propose(wanted)
    request = a.commands.inbox.one(name).request
    forged = signed_by(request.operation, "bo", "approve", Signer())
    with pytest.raises(ApprovalInvalid):
        a.commands.inbox.add(replace(request, approvals=(forged,)))
    other = {**request.facts, "policies": text_of(PolicySet())}
    with pytest.raises(ApprovalInvalid):
        replace(request, description=described(other)).meaning()
    operation = replace(request.operation, requester="ada")
    asked = signed_by(operation, "ada", "request", PEOPLE["ada"])
    own_request = Request(operation, request.description, (asked,))
    with pytest.raises(ApprovalInvalid):  # the nonce is the site's
        a.commands.inbox.file(own_request)
    operation = replace(operation, nonce=bytes(16))
    own_request = Request(operation, request.description, (signed_by(operation, "ada", "request", PEOPLE["ada"]),))
    a.commands.inbox.file(own_request)
    with pytest.raises(RequesterApproved):
        a.approve(operation.digest.hex(), "ada")
    a.approve(name, "bo", "cy")
    a.site.now += timedelta(days=15)
    with pytest.raises(ApprovalMissing):
        a.commands.policy_activate(name)
    assert not a.decides()


def test_a_request_is_for_one_version_after_one_set(at: Callable[[str], Site], own: Path) -> None:
    a = at("a")
    early = a.propose(PolicySet.of_folder(own))
    (own / "own.cedar").write_text(READERS_SPEAK.replace("Every reader", "Each reader"))
    a.activated(PolicySet.of_folder(own))
    a.approve(early, "bo", "cy")
    with pytest.raises(SyncRefused):
        a.commands.policy_activate(early)
    (own / "own.cedar").write_text("this is no policy")
    filed = len(a.commands.inbox.all())
    with pytest.raises(PolicySetRefused):
        a.propose(PolicySet.of_folder(own))
    assert len(a.site.journal.of("policy.refused")) == 1, "a bad set is recorded, and the active one stays"
    assert (len(a.commands.inbox.all()), a.commands.policy_active()["version"]) == (filed, 1)
    assert a.decides()


@pytest.mark.parametrize("turn", range(2))
def test_of_two_activations_at_once_one_wins_and_no_worker_is_in_between(at: Callable[[str], Site], own: Path, turn: int) -> None:
    a, one = at("a"), PolicySet.of_folder(own)
    (own / "other.cedar").write_text((own / "own.cedar").read_text().replace("own.readers-speak", "own.also"))
    (own / "cases" / "other.json").write_text((own / "cases" / "own.json").read_text().replace("own.readers-speak", "own.also"))
    (own / "own.cedar").unlink()
    (own / "cases" / "own.json").unlink()
    sets = {a.propose(policies): policies for policies in (one, PolicySet.of_folder(own))}
    for name in sets:
        a.approve(name, "bo", "cy")
    begin, seen = threading.Barrier(3), []

    def activate(name: str) -> str:
        commands = a.new_commands()
        begin.wait(10)
        try:
            commands.policy_activate(name)
        except (SyncRefused, RowChanged) as refused:
            return refused.code
        return name

    def decide() -> None:
        begin.wait(10)
        while not seen or not seen[-1]:
            seen.append(a.decides())

    with ThreadPoolExecutor(3) as threads:
        deciding = threads.submit(decide)
        ended = list(threads.map(activate, sets))
        deciding.result(10)
    [winner] = set(ended) & set(sets)
    assert set(ended) - set(sets) <= {"sync_refused", "row_changed"}
    assert seen == sorted(seen), "the old set, then the one that won, and nothing between or after"
    assert a.decides(a.new_worker())
    standing = a.commands.policy_active()
    assert (standing["version"], standing["set"]) == (1, sets[winner].digest.hex())
    [loser] = set(sets) - {winner}
    with pytest.raises(SyncRefused):  # it follows a set that is no longer the active one
        a.commands.policy_activate(loser)


def test_writing_the_database_changes_no_policy(at: Callable[[str], Site], own: Path) -> None:
    """A worker that has the set goes on by it; one that starts afterwards decides nothing; the site process names the row."""
    a = at("a")
    a.activated(PolicySet.of_folder(own))
    a.sql("CREATE TABLE aside AS SELECT * FROM policy_activation")
    for column in ("policies", "before_sha256", "operation", "approvals", "roster", "activated_at"):
        cut = f"substring({column} for octet_length({column}) - 1) || '\\x00'::bytea"
        value = {"approvals": "approvals[1:1]", "activated_at": "activated_at + interval '1 s'"}.get(column, cut)
        assert a.decides()
        a.sql(f"UPDATE policy_activation SET {column} = {value}")
        assert a.decides()
        with pytest.raises(PolicySetTampered):
            a.decides(a.new_worker())
        with pytest.raises(PolicySetTampered):
            a.commands.policy_active()
        assert [one["code"] for one in a.commands.policy_activations()["activations"]] == ["policy_set_tampered"]
        a.sql("DELETE FROM policy_activation")
        a.sql("INSERT INTO policy_activation SELECT * FROM aside")


def test_an_older_set_put_back_is_noticed(at: Callable[[str], Site], own: Path) -> None:
    a = at("a")
    a.activated(PolicySet.of_folder(own))
    a.activated(PolicySet())
    assert not a.decides()
    a.sql("DELETE FROM policy_activation WHERE version = 2")
    assert not a.decides()
    with pytest.raises(PolicySetTampered):
        a.decides(a.new_worker())
    # The list shortened too, as only the tables' owner can: who decided by the newer set goes on by it.
    a.sql("DELETE FROM authority_change WHERE kind = 'policy_activation' AND row_version = 2")
    assert not a.decides()


def test_signatures_of_another_roster_or_version_are_none(at: Callable[[str], Site], own: Path) -> None:
    """With the record MAC in hand, though without the officers: a made-up roster, or a signature for another version."""
    a = at("a")
    a.activated(PolicySet.of_folder(own))
    store = ActivationStore(RecordMac(a.site.hsm))
    with a.site.database.begin() as transaction:
        good = store.activation(transaction, 1)
    assert a.decides()
    roster = a.site.alive().ledger.roster
    made_up = replace(
        roster, officers=tuple(replace(one, keys=(Signer().public,)) for one in roster.officers[:1]) + roster.officers[1:]
    )
    for number, forged in enumerate(
        (replace(good, roster=made_up.encode()), replace(good, version=2, approvals=good.approvals)), 2
    ):
        with a.site.database.begin() as transaction:
            store.activate(transaction, replace(forged, version=number))
        assert a.decides(), "by version 1, which holds"
        with pytest.raises(PolicySetTampered):
            a.decides(a.new_worker())


def test_officers_of_an_earlier_roster_activated_for_those_after(at: Callable[[str], Site], sites: Sites, own: Path) -> None:
    from real_sites import signed

    from keyvault.sync.statement import Op

    a = at("a")
    a.activated(PolicySet.of_folder(own))
    roster = a.site.alive().ledger.roster
    new = replace(roster, epoch=roster.epoch + 1, officers=tuple(one for one in roster.officers if one.person != "cy"))
    sites.coordinator("a").transact(signed(sites.coordinator("a").propose(Op.ROSTER, new_roster=new)))
    assert a.decides(a.new_worker())
    assert a.commands.policy_active()["current_roster"] is False


def test_a_worker_that_could_not_load_tries_again(at: Callable[[str], Site], own: Path) -> None:
    a, time = at("a"), [0.0]
    a.activated(PolicySet.of_folder(own))
    a.sql("CREATE TABLE aside AS SELECT * FROM policy_activation")
    a.sql("DELETE FROM policy_activation")
    store, sync = ActivationStore(RecordMac(a.site.hsm)), a.commands.active._sync
    worker = ActivePolicies(store, lambda tx: _rosters(sync, tx, "a", a.roster_file), _verify(), lambda: time[0])
    with pytest.raises(PolicySetTampered):
        a.decides(worker)
    a.sql("INSERT INTO policy_activation SELECT * FROM aside")
    with pytest.raises(PolicySetTampered):
        a.decides(worker)
    time[0] += RETRY_S
    assert a.decides(worker)


def _verify() -> Any:
    from keyvault.sync.signatures import verify_p256

    return verify_p256


# --- what a set may be


def test_no_set_unloads_a_prohibition(own: Path) -> None:
    for name in ("base.cedar", "consent.cedar", "quotas.cedar", "schema.cedarschema"):
        changed, kept = own / name, (own / name).read_text()
        changed.write_text(kept + "\n// more\n")
        with pytest.raises(PolicySetInvalid) as refused:
            PolicySet.of_folder(own)
        assert name in str(refused.value.detail)
        changed.unlink()
        engine = PolicySet.of_folder(own).check()
        assert {"base.tenant-isolation", "base.client-active", "consent.active"} <= set(engine.ids)
        changed.write_text(kept)
    (own / "own.cedar").write_text(READERS_SPEAK.replace("own.readers-speak", "base.client-active"))
    with pytest.raises(PolicySetInvalid):
        PolicySet.of_folder(own).check()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("own.cedar", READERS_SPEAK.replace("principal.roles", "principal.rolls")),
        ("own.cedar", READERS_SPEAK.replace("// Every reader who verifies may make voices speak.\n", "")),
        ("own.cedar", "this is no policy"),
        ("cases/own.json", f'{{"cases": [{ROW.replace("true", "false")}]}}'),
        ("cases/own.json", '{"cases": []}'),
        ("cases/own.json", "{"),
        ("officers.json", '{"client_roles": ["king"]}'),
        ("officers.json", "[]"),
    ],
)
def test_a_set_that_does_not_hold_is_refused(own: Path, name: str, content: str) -> None:
    (own / name).write_text(content)
    with pytest.raises(PolicySetInvalid) as refused:
        PolicySet.of_folder(own).check()
    assert refused.value.detail


def test_a_set_has_one_spelling(own: Path) -> None:
    data = PolicySet.of_folder(own).encode()
    assert PolicySet.decode(data) == PolicySet.of_folder(own)
    for changed in (
        b" " + data,
        data[:-1],
        data.replace(b"own.cedar", b"../x.cedar"),
        data.replace(b'"own.cedar"', b'"base.cedar"'),
    ):
        with pytest.raises(PolicySetInvalid):
            PolicySet.decode(changed)
    assert PolicySet.decode(PolicySet().encode()).shipped
    assert PolicySet().check().ids == PolicyEngine.shipped().ids


def test_an_officer_reads_what_a_set_changes(own: Path) -> None:
    found = changes(PolicySet(), PolicySet.of_folder(own))
    assert [(one.how, one.policy.id) for one in found] == [("adds", "own.readers-speak")]
    (own / "roles.cedar").write_text((own / "roles.cedar").read_text().replace('contains("verifier")', 'contains("reader")'))
    assert ("changes", "role.verifier") in [(one.how, one.policy.id) for one in changes(PolicySet(), PolicySet.of_folder(own))]


def test_a_set_without_permissions_permits_nothing(own: Path) -> None:
    (own / "roles.cedar").unlink()
    (own / "own.cedar").write_text(READERS_SPEAK)
    engine = PolicySet.of_folder(own).engine()
    assert not engine.decide(replace(cases.HONEST, purpose=Purpose.COMPARE)).allowed


def test_a_development_roster_asks_for_one_officer() -> None:
    from keyvault.approval_kinds import quorum_for

    roster = make_roster()
    alone = replace(roster, sites=roster.sites[:1])
    assert [quorum_for(kind, alone).threshold for kind in (Kind.POLICY, Kind.CLIENT, Kind.DESTROY, Kind.DETAILS)] == [1, 0, 2, 2]
    assert quorum_for(Kind.POLICY, roster).threshold == 2
