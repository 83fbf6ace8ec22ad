"""`glottis approvals` and `glottis officers` against a running site: what is shown is what is signed, and both sites check it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from real_sites import MAIN, Sites
from sync_world import PEOPLE
from uvicorn import Config, Server

from keyvault.approval_kinds import Request, described
from keyvault.approvals import Operation, signed_by
from keyvault.errors import KeyVaultError
from keyvault.lifecycle import Approved
from keyvault.states import KeyState
from keyvault.sync.errors import ApprovalExpired, RequesterApproved
from keyvault.sync.statement import DESTROY, Op, destruction_subject
from service.approving import ApprovalCommands, site_inbox
from service.cli.approvals import approvals
from service.cli.officers import officers
from service.errors import OfficerKeyRefused, RequestUnreadable
from service.exits import Exit, exit_for
from service.settings import Settings
from service.sync import admin, operator

FACTS = {"versions": MAIN.label, "delay_hours": 168, "reason": "worn\x1b[2K out"}


class Console:
    """An operator at site a, and officers with their key files."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self.sites, self.folder = sites, folder
        self.settings = Settings.load({"GLOTTIS_STATE_DIR": str(folder / "state")})
        self.settings.run_dir.mkdir(parents=True)
        for name, signer in PEOPLE.items():
            path = folder / f"{name}.pem"
            path.write_bytes(signer._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            path.chmod(0o600)
        sites.a.now = datetime.now(UTC)
        coordinator = sites.coordinator("a")
        self.commands = ApprovalCommands(site_inbox(coordinator.node), coordinator.node, coordinator, threading.Lock())

    def run(self, group: Any, *arguments: str, typed: str = "") -> Result:
        return CliRunner().invoke(group, arguments, env=self.settings.environ(), input=typed)

    def facts(self, group: Any, *arguments: str, code: Exit = Exit.OK) -> dict[str, Any]:
        done = self.run(group, *arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def refused(self, group: Any, *arguments: str) -> Exception:
        done = self.run(group, *arguments)
        assert isinstance(done.exception, Exception), done.output
        return done.exception

    def key(self, name: str) -> tuple[str, str]:
        return "--key", str(self.folder / f"{name}.pem")

    def request(self, hours: float = 48) -> str:
        subject = destruction_subject("cluster-1", [MAIN.label])
        return self.commands.inbox.request(DESTROY, subject, FACTS, datetime.now(UTC) + timedelta(hours=hours))


@pytest.fixture
def console(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    made = Console(sites, tmp_path_factory.mktemp("c"))  # a socket's path is short
    with serving(made):
        yield made


@contextmanager
def serving(console: Console) -> Iterator[None]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(console.settings.admin_socket))
    listener.listen()
    app = operator.create_app(console.commands.calls(), lambda: True)
    server = Server(Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def test_officers_read_and_approve_and_both_sites_destroy(console: Console, sites: Sites) -> None:
    name = console.request()
    assert [one["id"] for one in console.facts(approvals, "list")["requests"]] == [name]
    shown = console.run(approvals, "show", name[:8]).stdout
    assert "Destroy a master version at every site. [keys.destroy]" in shown
    assert f"destroys        {MAIN.label}" in shown
    assert f"0 voices' keys under {MAIN.label}, sites a and b" in shown
    assert "Never: what it still wraps stays shut for good." in shown
    assert "0 of 2 needed: nobody yet" in shown
    assert "site/a" in shown
    assert shown.count("the requester's words, no part of what is signed") == 1
    assert "\x1b" not in shown  # the requester's words cannot paint over what is read
    declined = console.run(approvals, "approve", name, *console.key("bo"), typed="n\n")
    assert declined.exit_code == 1
    assert console.run(approvals, "approve", name, *console.key("bo"), typed="y\n").exit_code == 0
    assert console.facts(approvals, "approve", name, *console.key("cy"), "--yes")["approved_by"] == ["bo", "cy"]
    found = console.commands.inbox.approved(DESTROY, destruction_subject("cluster-1", [MAIN.label]), sites.a.now)
    assert isinstance(found, Approved)
    coordinator = sites.coordinator("a")
    coordinator.change_states({MAIN.label: KeyState.DEACTIVATED}, "worn out")
    coordinator.change_states({MAIN.label: KeyState.DESTROYED}, "worn out", found.operation, found.approvals)
    assert sites.a.states() == sites.b.states() == {MAIN.label: "destroyed"}


def test_an_officer_signs_at_a_console_that_reaches_no_site(console: Console, sites: Sites) -> None:
    name, carried = console.request(), console.folder / "request"
    assert console.run(approvals, "export", name, "--out", str(carried)).exit_code == 0
    roster = console.folder / "roster"
    roster.write_bytes(sites.roster.encode())
    signed = console.run(approvals, "sign", str(carried), *console.key("bo"), "--roster", str(roster), typed="y\n")
    assert signed.exit_code == 0, signed.output
    assert f"destroys        {MAIN.label}" in signed.stderr
    assert console.facts(approvals, "add", str(carried) + ".signed")["approved_by"] == ["bo"]
    assert console.facts(approvals, "add", str(carried) + ".signed")["approved_by"] == ["bo"]
    carried.write_bytes(carried.read_bytes()[:-1])
    assert isinstance(
        console.refused(approvals, "sign", str(carried), *console.key("cy"), "--roster", str(roster)), RequestUnreadable
    )


def test_nothing_is_signed_that_would_be_refused(console: Console, sites: Sites) -> None:
    name, carried, roster = console.request(), console.folder / "request", console.folder / "roster"
    roster.write_bytes(sites.roster.encode())
    request = console.commands.inbox.one(name).request
    at = ("--roster", str(roster), "--yes")
    carried.write_bytes(replace(request, description=request.description.replace(b"main", b"tiny")).encode())
    assert "something else" in str(console.refused(approvals, "sign", str(carried), *console.key("bo"), *at))
    over = replace(request.operation, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    carried.write_bytes(Request(over, request.description).encode())
    assert isinstance(console.refused(approvals, "sign", str(carried), *console.key("bo"), *at), ApprovalExpired)
    own = replace(request.operation, requester="bo")
    carried.write_bytes(Request(own, request.description).encode())
    assert isinstance(console.refused(approvals, "sign", str(carried), *console.key("bo"), *at), RequesterApproved)
    assert console.run(officers, "new", "eve", "--key", str(console.folder / "eve.pem"), "--no-passphrase").exit_code == 0
    refused = console.refused(approvals, "approve", name, *console.key("eve"), "--yes")
    assert isinstance(refused, OfficerKeyRefused)
    assert not list(console.folder.glob("*.signed"))


def test_a_cancelled_request_is_over(console: Console) -> None:
    name = console.request()
    assert "would be cancelled" in console.run(approvals, "cancel", name, "--dry-run").output
    assert console.facts(approvals, "cancel", name, "--yes")["outcome"] == "cancelled"
    assert console.facts(approvals, "list")["requests"] == []
    assert [one["outcome"] for one in console.facts(approvals, "list", "--all")["requests"]] == ["cancelled"]
    refused = console.refused(approvals, "approve", name, *console.key("bo"), "--yes")
    assert exit_for(refused) is Exit.REFUSED
    assert "takes no more signatures" in str(refused)


def test_an_officer_s_key_is_changed_by_the_other_officers(console: Console, sites: Sites) -> None:
    made = console.facts(officers, "new", "bo", "--key", str(console.folder / "bo-2.pem"), "--no-passphrase")
    public = console.folder / "bo-2.pub"
    public.write_text(made["public_key"])
    assert "bo gets the key" in console.run(officers, "change", "--add", "bo", str(public), "--dry-run").output
    filed = console.facts(officers, "change", "--add", "bo", str(public), "--remove", "di", "--threshold", "3", code=Exit.TEMPORARY)
    shown = console.run(approvals, "show", filed["id"]).stdout
    assert "takes away      a key of di" in shown
    assert "must approve    3" in shown
    refused = console.refused(approvals, "carry-out", filed["id"], "--yes")
    assert exit_for(refused) is Exit.TEMPORARY
    for person in ("ada", "bo"):  # the keys of the roster in force, bo's old one too
        console.facts(approvals, "approve", filed["id"], *console.key(person), "--yes")
    done = console.facts(approvals, "carry-out", filed["id"], "--yes")
    assert done["outcome"] == "done"
    listed = console.facts(officers, "list")
    assert {one["officer"]: one["fingerprints"] for one in listed["officers"]}["bo"] == [made["fingerprint"]]
    assert listed["threshold"] == 3
    assert sites.a.alive().ledger.roster == sites.b.alive().ledger.roster
    assert "di" not in {one["officer"] for one in listed["officers"]}


def test_a_roster_that_cannot_be_is_not_filed(console: Console) -> None:
    for change in (("--threshold", "9"), ("--remove", "eve"), ("--threshold", "1")):
        assert exit_for(console.refused(officers, "change", *change)) is not Exit.OK
    assert console.run(officers, "change").exit_code == 2
    assert console.facts(approvals, "list")["requests"] == []


def test_an_approval_for_one_epoch_is_none_for_the_next(console: Console, sites: Sites) -> None:
    """What was approved follows one exact history: a transaction that comes between makes it worthless, and nothing happens."""
    filed = console.facts(officers, "change", "--threshold", "3", code=Exit.TEMPORARY)
    for person in ("ada", "bo"):
        console.facts(approvals, "approve", filed["id"], *console.key(person), "--yes")
    sites.coordinator("a").change_states({MAIN.label: KeyState.SUSPENDED}, "in between")
    refused = console.refused(approvals, "carry-out", filed["id"], "--yes")
    assert isinstance(refused, (KeyVaultError, admin.SiteRefused))
    assert exit_for(refused) in (Exit.CONFLICT, Exit.REFUSED)
    assert console.facts(officers, "list")["threshold"] == 2


def test_every_kind_is_listed_with_what_it_does(console: Console) -> None:
    said = console.facts(approvals, "kinds")["kinds"]
    assert said["keys.destroy"]["does"].startswith("Destroy")
    assert f"sync.{Op.ROSTER}" in said


def test_a_file_that_an_officer_signed_as_requester_is_entered(console: Console) -> None:
    ends = datetime.now(UTC) + timedelta(days=1)
    operation = Operation("cluster-1", DESTROY, destruction_subject("cluster-1", [MAIN.label]), "ada", bytes(16), ends)
    request = Request(operation, described(FACTS), (signed_by(operation, "ada", "request", PEOPLE["ada"]),))
    carried = console.folder / "own"
    carried.write_bytes(request.encode())
    assert console.facts(approvals, "add", str(carried))["requester"] == "ada"
    refused = console.refused(approvals, "approve", operation.digest.hex(), *console.key("ada"), "--yes")
    assert isinstance(refused, RequesterApproved)
