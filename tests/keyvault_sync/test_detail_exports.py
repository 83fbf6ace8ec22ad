"""Sealed details leave for one recipient, of the entries that officers named, once; everybody else sees commitments alone."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from real_sites import Sites
from sync_world import PEOPLE, Signer

from keyvault.approval_kinds import described
from keyvault.approvals import signed_by
from keyvault.sync.errors import ApprovalInvalid, ApprovalMissing, SyncRefused
from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.errors import RangeRefused
from policies.audit.sequencer import Sequencer
from policies.audit.store import AuditStore
from policies.audit.verify import Verifier
from policies.intents import Intent
from service.approving import site_inbox
from service.blast_radius import reached
from service.detail_exports import DetailCommands, opened_bundle
from service.errors import SealedBundleRefused

AUDITOR = ec.generate_private_key(ec.SECP256R1())
PRIVATE = AUDITOR.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
ENTRIES = 6


def public(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = AUDITOR) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class Desk:
    """Site a with a signed log of six entries, of two tenants in turn."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self.site, signer = sites.a, Ed25519PrivateKey.generate()
        node = self.site.alive()
        spki = signer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.key, self.inbox = verifier_key("voice.example/audit", spki), site_inbox(node)
        audit = AuditStore(self.site.database, self.site.hsm)
        for number in range(ENTRIES):
            tenant, details = ("acme", "rival")[number % 2], {"text_sha256": f"{number:064x}"}
            with self.site.database.begin() as transaction:
                audit.append(transaction, Intent("voice.open", "allowed", tenant, "app", UUID(int=7), "speak", {**details}))
        with Sequencer(self.site.database, self.key, signer.sign, LastCheckpoint(folder / "checkpoint")) as sequencer:
            sequencer.step()
        self.commands = DetailCommands(self.inbox, node, self.site.database, self.site.hsm, self.key)

    def ask(self, start: int = 0, end: int = ENTRIES, tenant: str = "", recipient: str = "") -> str:
        said = self.commands.details_request(start, end, tenant, recipient or public(), "a complaint")
        assert said["needed"] == 2
        return str(said["request"])

    def approve(self, name: str, *people: str) -> None:
        request = self.inbox.one(name).request
        for person in people:
            self.inbox.add(replace(request, approvals=(signed_by(request.operation, person, "approve", PEOPLE[person]),)))

    def shown(self, sealed: str) -> list[str]:
        """The text hashes that the recipient reads, after the verifier of auditors held."""
        bundle = opened_bundle(sealed.encode(), PRIVATE, None)
        Verifier(self.key.fingerprint).verify(io.BytesIO(bundle))
        lines = [json.loads(line) for line in bundle.splitlines()]
        return [line["disclosed"]["text_sha256"]["value"][-1] for line in lines if "disclosed" in line]


@pytest.fixture
def desk(sites: Sites, tmp_path: Path) -> Desk:
    return Desk(sites, tmp_path)


def test_approved_details_reach_their_recipient_once(desk: Desk) -> None:
    name = desk.ask(1, 5, tenant="acme")
    signed = dict(desk.inbox.one(name).request.meaning().signed)
    assert (signed["entries"], signed["tenant"]) == ("1 to 4", "acme")
    with desk.site.database.begin() as transaction:
        assert reached(transaction, desk.inbox.one(name).request) == ["details of at most 4 entries"]
    for people in ((), ("bo",)):
        desk.approve(name, *people)
        with pytest.raises(ApprovalMissing):
            desk.commands.details_export(name)
    desk.approve(name, "cy")
    assert desk.site.journal.of("audit.details_exported") == []
    done = desk.commands.details_export(name)
    assert desk.shown(done["sealed"]) == ["2", "4"]
    assert "text_sha256" not in done["sealed"]
    [told] = desk.site.journal.of("audit.details_exported")
    assert (told["from"], told["to"], told["tenant"], told["entries"]) == (1, 5, "acme", 2)
    with pytest.raises(ApprovalMissing):
        desk.commands.details_export(name)
    everything = desk.ask()
    desk.approve(everything, "bo", "cy")
    assert desk.shown(desk.commands.details_export(everything)["sealed"]) == list("012345")


def test_two_who_ask_at_once_get_one_export(desk: Desk) -> None:
    name = desk.ask()
    desk.approve(name, "bo", "cy")

    def one(_: int) -> bool:
        try:
            return bool(desk.commands.details_export(name)["sealed"])
        except ApprovalMissing:
            return False

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(one, range(4))) == [False, False, False, True]
    assert len(desk.site.journal.of("audit.details_exported")) == 1


def test_what_was_approved_is_one_range_one_tenant_one_recipient(desk: Desk) -> None:
    name = desk.ask(0, 2, tenant="acme")
    desk.approve(name, "bo", "cy")
    request, thief = desk.inbox.one(name).request, ec.generate_private_key(ec.SECP256R1())
    der = thief.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for change in ({"end": 6}, {"start": 1}, {"tenant": ""}, {"site": "b"}, {"recipient": base64.b64encode(der).decode()}):
        with pytest.raises(ApprovalInvalid):
            replace(request, description=described({**request.facts, **change})).meaning()
    for other in (desk.ask(0, 6, tenant="acme"), desk.ask(0, 2), desk.ask(0, 2, "acme", public(thief))):
        with pytest.raises(ApprovalMissing):
            desk.commands.details_export(other)
    forged = signed_by(request.operation, "ada", "approve", Signer())
    with pytest.raises(ApprovalInvalid):
        desk.inbox.add(replace(request, approvals=(forged,)))
    sealed = desk.commands.details_export(name)["sealed"].encode()
    pem = thief.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data, key in ((sealed, pem), (sealed[:-8] + b"AAAA" + sealed[-4:], PRIVATE), (b"{}", PRIVATE), (sealed, b"no key")):
        with pytest.raises(SealedBundleRefused):
            opened_bundle(data, key, None)


def test_nothing_is_asked_that_cannot_be_exported(desk: Desk) -> None:
    for start, end in ((3, 3), (0, ENTRIES + 1), (5, 2)):
        with pytest.raises(RangeRefused):
            desk.ask(start, end)
    weak = rsa.generate_private_key(65537, 2048)
    for recipient in (public(weak), public(ec.generate_private_key(ec.SECP384R1())), "no key"):  # type: ignore[arg-type]
        with pytest.raises(SealedBundleRefused):
            desk.ask(recipient=recipient)
    other = desk.inbox.request("keys.rotate", *_rotation(), desk.site.now.replace(year=2027))
    with pytest.raises(SyncRefused):
        desk.commands.details_export(other)


def _rotation() -> tuple[bytes, dict[str, str | int]]:
    from keyvault.approval_kinds import explained

    facts: dict[str, str | int] = {"version": "ring/main/1"}
    return explained("keys.rotate", "cluster-1", facts).subject, facts
