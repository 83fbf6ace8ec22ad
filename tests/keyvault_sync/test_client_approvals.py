"""Clients whose roles officers marked: approved, exactly as signed, and once; everybody else comes in as ever."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from real_sites import Sites
from sqlalchemy import text
from sync_world import PEOPLE, Signer

from keyvault.approvals import Operation, signed_by
from keyvault.records import RecordMac
from keyvault.sync.errors import ApprovalInvalid
from policies.audit.store import AuditStore
from policies.authority import Client, ClientState
from policies.engine import SHIPPED
from policies.errors import ClientUnknown, RowChanged
from policies.sets.policy_set import APPROVED_ROLES, PERMISSIONS, PolicySet
from policies.store import PolicyStore
from service.approving import site_inbox
from service.blast_radius import reached
from service.client_approvals import ClientApprovals, OfficersAwaited
from service.policy_sets import ActiveSet, PolicyCommands
from service.registration import Registration

MARKED = json.dumps({"client_roles": ["enroller"]})
KEYS = {"cert_sha256": "A" * 43, "jkt": "B" * 43}


class Desk:
    """A site where officers marked the enroller's role."""

    def __init__(self, sites: Sites, folder: Path, name: str = "a") -> None:
        self.site, roster_file = sites.all[name], folder / "roster"
        roster_file.write_bytes(sites.roster.encode())
        node = self.site.alive()
        self.inbox, active = site_inbox(node), ActiveSet(self.site.hsm, name, roster_file)
        policies = PolicyCommands(self.inbox, node, active)
        files = ((APPROVED_ROLES, MARKED), (PERMISSIONS, (SHIPPED / PERMISSIONS).read_text()))
        files += (("cases/roles.json", (SHIPPED / "cases" / "roles.json").read_text()),)
        self.active = policies
        self.marked = PolicySet(tuple(sorted(files)))
        self.audit = AuditStore(self.site.database, self.site.hsm)
        self.store = PolicyStore(RecordMac(self.site.hsm))
        approvals = ClientApprovals(self.site.database, active, self.inbox, sites.roster, name)
        self.registration = Registration(self.site.database, self.store, self.audit, approvals)

    def mark(self) -> None:
        import base64

        name = self.active.policy_propose(base64.b64encode(self.marked.encode()).decode())["request"]
        self.approve(name, "bo", "cy")
        self.active.policy_activate(name)

    def approve(self, name: str, *people: str, key: Signer | None = None) -> None:
        request = self.inbox.one(name).request
        for person in people:
            approval = signed_by(request.operation, person, "approve", key or PEOPLE[person])
            self.inbox.add(replace(request, approvals=(approval,)))

    def asked(self, client: str = "app", tenant: str = "acme", roles: tuple[str, ...] = ("enroller",), **keys: str) -> str:
        """The request that stands in the way of this client."""
        with pytest.raises(OfficersAwaited) as awaited:
            self.registration.register(client, tenant, roles, **KEYS | keys)
        return awaited.value.request

    def there(self, client: str = "app") -> Client | None:
        with self.site.database.begin() as transaction:
            return self.store.client(transaction, client)


@pytest.fixture
def desk(sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    found = Desk(sites, tmp_path)
    monkeypatch.setattr("service.client_approvals.inbox_now", lambda: found.site.now)
    return found


def test_officers_approve_one_client_exactly_and_once(desk: Desk) -> None:
    assert desk.registration.register("first", "acme", ("enroller",), cert_sha256="F" * 43, jkt="F" * 43).roles == ("enroller",)
    desk.mark()
    assert desk.registration.register("reader", "acme", ("reader",), cert_sha256="R" * 43, jkt="R" * 43).roles == ("reader",)
    name = desk.asked()
    assert desk.asked() == name, "one request, however often it is asked for"
    signed = dict(desk.inbox.one(name).request.meaning().signed)
    assert (signed["client"], signed["tenant"], signed["roles"]) == ("app", "acme", "enroller")
    assert (signed["certificate"], signed["DPoP key"]) == (f"x5t:{KEYS['cert_sha256']}", KEYS["jkt"])
    with desk.site.database.begin() as transaction:
        told = reached(transaction, desk.inbox.one(name).request)
    assert told == ["a client that is not there yet", "0 voices of its tenant"]
    desk.approve(name, "bo")
    assert desk.asked() == name
    with pytest.raises(ApprovalInvalid):
        desk.approve(name, "cy", key=Signer())
    desk.approve(name, "cy")
    for other in (
        desk.asked("other"),
        desk.asked(tenant="rival"),
        desk.asked(roles=("enroller", "speaker")),
        desk.asked(cert_sha256="C" * 43),
        desk.asked(jkt="C" * 43),
    ):
        assert other != name, "what was approved is for nothing else"
        desk.inbox.cancel(other)
    assert desk.there() is None
    made = desk.registration.register("app", "acme", ("enroller",), **KEYS)
    assert (made, desk.inbox.one(name).outcome) == (desk.there(), "done")


def test_new_keys_and_wider_roles_need_them_too(desk: Desk) -> None:
    registration = desk.registration
    registration.register("enroller", "acme", ("enroller",), **KEYS)
    registration.register("app", "acme", ("reader",), cert_sha256="C" * 43, jkt="C" * 43)
    desk.mark()
    with pytest.raises(OfficersAwaited) as rotating:
        registration.rotate("enroller", cert_sha256="D" * 43, jkt="D" * 43)
    with pytest.raises(OfficersAwaited) as widening:
        registration.change_roles("app", ("reader", "enroller"))
    found = desk.there("app")
    assert found is not None
    assert found.roles == ("reader",)
    assert registration.rotate("app", cert_sha256="E" * 43, jkt="E" * 43).state is ClientState.ACTIVE
    assert registration.change_roles("app", ("reader", "speaker")).roles == ("reader", "speaker")
    desk.approve(rotating.value.request, "bo", "cy")
    desk.approve(widening.value.request, "bo", "cy")
    assert registration.rotate("enroller", cert_sha256="D" * 43, jkt="D" * 43).cert_sha256 == "D" * 43
    with pytest.raises(OfficersAwaited):  # its keys were others when officers signed
        registration.change_roles("app", ("reader", "enroller"))
    assert registration.change_roles("enroller", ("reader",)).roles == ("reader",)
    with pytest.raises(ClientUnknown):
        registration.change_roles("nobody", ("reader",))


def test_roles_taken_away_meanwhile_do_not_come_back_without_officers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the row and its change somebody else narrows it: what needed no officer then would widen it now."""
    registration = desk.registration
    registration.register("app", "acme", ("enroller", "reader"), **KEYS)
    desk.mark()
    asked = ClientApprovals.require

    def meanwhile(self: ClientApprovals, client: Client, act: str, new: Collection[str]) -> Operation | None:
        monkeypatch.setattr(ClientApprovals, "require", asked)
        registration.change_roles("app", ("reader",))
        return asked(self, client, act, new)

    for change in (
        lambda: registration.change_roles("app", ("enroller", "reader")),
        lambda: registration.rotate("app", "D" * 43, "D" * 43),
    ):
        monkeypatch.setattr(ClientApprovals, "require", meanwhile)
        with pytest.raises((RowChanged, OfficersAwaited)):
            change()
        found = desk.there()
        assert found is not None
        assert (found.roles, found.jkt) == (("reader",), KEYS["jkt"])


def test_an_approval_of_one_site_registers_nobody_at_the_other(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Desk(sites, tmp_path)
    monkeypatch.setattr("service.client_approvals.inbox_now", lambda: a.site.now)
    a.mark()
    name = a.asked()
    a.approve(name, "bo", "cy")
    b = Desk(sites, tmp_path, "b")
    b.mark()
    b.inbox.file(a.inbox.one(name).request)
    assert len(b.inbox.one(name).approved_by) == 2, "the other site has the request, and its signatures"
    assert b.asked() != name
    assert b.there() is None
    a.registration.register("app", "acme", ("enroller",), **KEYS)
    b.inbox.file(a.inbox.one(name).request)
    assert b.asked() != name


def test_an_approval_is_used_up(desk: Desk) -> None:
    """The row that it let in is gone, as in a database put back: the same signatures let it in no second time."""
    desk.mark()
    name = desk.asked()
    desk.approve(name, "bo", "cy")
    signed = desk.inbox.one(name).request
    desk.registration.register("app", "acme", ("enroller",), **KEYS)
    with desk.site.database.begin() as transaction:
        transaction.execute(text("DELETE FROM client"))
    with pytest.raises(ApprovalInvalid):
        desk.inbox.add(signed)
    assert desk.asked() != name
    assert desk.there() is None


def test_an_approval_is_over_when_it_says(desk: Desk) -> None:
    desk.mark()
    name = desk.asked()
    desk.approve(name, "bo", "cy")
    desk.site.now += timedelta(days=15)
    assert desk.asked() != name
    assert desk.there() is None
