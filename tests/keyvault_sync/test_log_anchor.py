"""A log whose signed end is gone goes on only where officers said so, for exactly these two ends; the older end stays beside."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from real_sites import Sites
from sqlalchemy import text
from sync_world import PEOPLE, Signer

from keyvault.approval_kinds import Request, described
from keyvault.approvals import signed_by
from keyvault.sync.errors import ApprovalExpired, ApprovalInvalid, ApprovalMissing
from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.errors import AuditDiverged
from policies.audit.sequencer import Sequencer
from policies.audit.store import AuditStore
from policies.intents import Intent
from service import log_anchor
from service.settings import Settings


class Log:
    """Site a's log, whose key is the test's, with its file and its database."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self.site, self.roster, signer = sites.a, sites.roster, Ed25519PrivateKey.generate()
        self.sign = signer.sign
        spki = signer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.key = verifier_key("voice.example/audit", spki)
        self.settings = Settings.load({"GLOTTIS_STATE_DIR": str(folder)})
        self.settings.checkpoint_file.parent.mkdir(parents=True)
        url = self.settings.url_file("log")
        url.parent.mkdir(parents=True)
        url.write_text(self.site.database.url.render_as_string(hide_password=False))
        url.chmod(0o600)

    def write(self, entries: int) -> None:
        audit = AuditStore(self.site.database, self.site.hsm)  # nothing ran while the log was put back
        for _ in range(entries):
            with self.site.database.begin() as transaction:
                audit.append(transaction, Intent("voice.open", "allowed", "acme", "app", UUID(int=7), "speak", {}))
        self.sequence()

    def sequence(self) -> int:
        last = LastCheckpoint(self.settings.checkpoint_file)
        with Sequencer(self.site.database, self.key, self.sign, last) as sequencer:
            return sequencer.step().size

    def roll_back(self, size: int) -> None:
        with self.site.database.begin() as transaction:
            for statement in (
                "DELETE FROM checkpoint WHERE size > :size",
                "DELETE FROM detail WHERE intent_id IN (SELECT ref FROM leaf WHERE seq >= :size)",
                "CREATE TEMPORARY TABLE gone ON COMMIT DROP AS SELECT ref FROM leaf WHERE seq >= :size",
                "DELETE FROM leaf WHERE seq >= :size",
                "DELETE FROM intent WHERE intent_id IN (SELECT ref FROM gone)",
            ):
                transaction.execute(text(statement), {"size": size} if ":size" in statement else {})

    def ends(self) -> dict[str, str]:
        found = log_anchor.ends(self.settings, self.key)
        return {name: found[name] for name in ("kept", "database")}

    @property
    def parted(self) -> bool:
        return bool(log_anchor.ends(self.settings, self.key)["parted"])

    def asked(self) -> Request:
        return log_anchor.request(self.site.parts, self.roster, self.ends(), "a drill")

    def approve(self, asked: Request) -> None:
        log_anchor.approve(self.site.parts, self.roster, asked, self.ends())


def signed(request: Request, *people: str, key: Signer | None = None) -> Request:
    given = tuple(signed_by(request.operation, person, "approve", key or PEOPLE[person]) for person in people)
    return replace(request, approvals=(*request.approvals, *given))


@pytest.fixture
def log(sites: Sites, tmp_path: Path) -> Log:
    made = Log(sites, tmp_path)
    made.write(3)
    made.write(2)
    return made


def test_a_log_rolled_back_goes_on_where_officers_say(log: Log) -> None:
    assert not log.parted, "the control"
    newer = log.ends()["kept"]
    log.roll_back(3)
    assert log.parted
    with pytest.raises(AuditDiverged):
        log.sequence()
    asked = log.asked()
    shown = dict(asked.meaning().signed)
    assert (shown["site"], shown["goes on from"][:9], shown["given up"][:9]) == ("a", "3 entries", "5 entries")
    for too_few in (asked, signed(asked, "bo")):
        with pytest.raises(ApprovalMissing):
            log.approve(too_few)
    for wrong in (
        signed(asked, "bo", "cy", key=Signer()),
        replace(signed(asked, "bo", "cy"), description=described({**asked.facts, "database": newer})),
        replace(signed(asked, "bo", "cy"), description=described({**asked.facts, "site": "b"})),
    ):
        with pytest.raises(ApprovalInvalid):
            log.approve(wrong)
    assert log.site.journal.of("log.reanchored") == []
    log.approve(signed(asked, "bo", "cy"))
    [told] = log.site.journal.of("log.reanchored")
    assert told["by"] == "bo cy"
    ends, operation = log.ends(), asked.operation.digest.hex()
    done = log_anchor.move(log.settings, **ends, operation=operation)
    assert (done["from"], Path(done["kept"]).read_text()) == (3, newer)
    assert not log.parted
    log.write(1)
    with pytest.raises(ApprovalInvalid):  # what was approved was about the ends of then
        log.approve(signed(asked, "bo", "cy"))
    with pytest.raises(ApprovalInvalid):
        log_anchor.move(log.settings, **ends, operation="another")


def test_an_approval_for_one_end_is_none_for_another(log: Log) -> None:
    log.roll_back(3)
    asked = signed(log.asked(), "bo", "cy")
    log.site.now += timedelta(days=15)
    with pytest.raises(ApprovalExpired):
        log.approve(asked)
    log.site.now -= timedelta(days=15)
    log.roll_back(0)
    assert log.parted
    with pytest.raises(ApprovalInvalid):
        log.approve(asked)


def test_an_approval_that_was_used_moves_the_log_no_second_time(log: Log) -> None:
    """Somebody puts the file and the database back as they were when officers signed, and gives their word again."""
    kept = log.settings.checkpoint_file.read_text()
    log.roll_back(3)
    asked = signed(log.asked(), "bo", "cy")
    log.approve(asked)
    before = log.ends()
    log_anchor.move(log.settings, **before, operation=asked.operation.digest.hex())
    log.write(4)
    log.roll_back(3)
    log.settings.checkpoint_file.write_text(kept)
    assert (log.ends(), log.parted) == (before, True), "everything is as it was"
    with pytest.raises(ApprovalInvalid):
        log_anchor.move(log.settings, **before, operation=asked.operation.digest.hex())
    with pytest.raises(AuditDiverged):
        log.sequence()
    anew = signed(log.asked(), "bo", "cy")
    log.approve(anew)
    log_anchor.move(log.settings, **before, operation=anew.operation.digest.hex())


def test_a_word_of_officers_who_left_or_about_another_site_moves_nothing(log: Log) -> None:
    log.roll_back(3)
    asked = signed(log.asked(), "bo", "cy")
    elsewhere = replace(asked, operation=replace(asked.operation, cluster="cluster-2"))
    with pytest.raises(ApprovalInvalid):
        log.approve(elsewhere)
    stayed = tuple(one for one in log.roster.officers if one.person != "cy")
    whole, log.roster = log.roster, replace(log.roster, epoch=2, officers=stayed)
    with pytest.raises((ApprovalInvalid, ApprovalMissing)):
        log.approve(asked)
    log.roster = whole
    log.approve(asked)


def test_a_lost_file_and_a_lost_database_need_them_too(log: Log) -> None:
    log.settings.checkpoint_file.unlink()
    assert log.parted
    with pytest.raises(AuditDiverged):
        log.sequence()
    log.approve(signed(log.asked(), "bo", "cy"))
    assert log_anchor.move(log.settings, **log.ends(), operation="one") == {"from": 5, "kept": None}
    assert (log.parted, log.sequence()) == (False, 5)
    log.roll_back(0)
    assert log.parted
    log.approve(signed(log.asked(), "bo", "cy"))
    assert log_anchor.move(log.settings, **log.ends(), operation="another")["from"] == 0
    assert not os.path.lexists(log.settings.checkpoint_file)
    log.write(2)
    assert log.sequence() == 2


def test_an_older_file_of_the_same_log_needs_nobody(log: Log) -> None:
    older = log.ends()["kept"]
    log.write(1)
    log.settings.checkpoint_file.write_text(older)
    assert not log.parted
    assert log.sequence() == 6
