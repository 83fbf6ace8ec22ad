"""The auditor's check: certificates and a roster, public keys only; and receipts for batches of voices' keys."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from uuid import UUID

import pytest
from sync_world import SITES, ceremony, found_pair, history, make_roster, propose, record, rotation, run

from keyvault.errors import KeyNotFound
from keyvault.states import KeyState
from keyvault.sync.errors import AwaitingSync, CertificateInvalid, SignatureInvalid, StatementMalformed
from keyvault.sync.receipts import check_receipts, receipt
from keyvault.sync.signatures import verify_p256
from keyvault.sync.statement import Certificate, DekRecord, Endorsement, Op, PhaseStatement, Receipt, Signed
from keyvault.sync.verify import verify_certificates

ROSTER = make_roster()


@pytest.fixture(scope="module")
def chain() -> list[bytes]:
    a, b = found_pair()
    ceremony([a, b], "ring/main/2")
    run(rotation(a.ledger, 2), [a, b])
    run(propose(a.ledger, Op.STATE, (record(1, KeyState.DESTROYED), record(2))), [a, b])
    new = make_roster(epoch=2, threshold=3)
    run(propose(a.ledger, Op.ROSTER, new_roster=new), [a, b])
    summary = verify_certificates(history(a), ROSTER.encode())
    assert (summary.epoch, summary.head, summary.records) == (a.ledger.epoch, b.ledger.head, a.ledger.records)
    assert (summary.completed, summary.void, summary.marks, summary.roster.threshold) == (5, 0, (), 3)
    return history(a)


def refused(chain: list[bytes], match: str, roster: bytes = ROSTER.encode()) -> None:
    with pytest.raises(CertificateInvalid, match=match):
        verify_certificates(chain, roster)


def test_a_missing_swapped_or_repeated_certificate_is_named(chain: list[bytes]) -> None:
    refused(chain[1:], "certificate 1, after epoch 0: sync_conflict")
    refused(chain[:2] + chain[3:], "certificate 3, after epoch 2: sync_conflict")
    refused([chain[0], chain[2], chain[1]], "certificate 2, after epoch 1")
    refused([chain[0], chain[0]], "certificate 2, after epoch 1")
    assert verify_certificates(chain[:3], ROSTER.encode()).epoch == 3


def test_another_roster_is_refused(chain: list[bytes]) -> None:
    other = replace(ROSTER, sites=(ROSTER.sites[0], replace(ROSTER.sites[1], public_key=SITES["c"].public)))
    refused(chain, "certificate 1", other.encode())
    refused(chain, "certificate 1", replace(ROSTER, threshold=3).encode())


def test_every_changed_byte_is_named(chain: list[bytes]) -> None:
    data = chain[2]
    for at in range(0, len(data), 131):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        refused([*chain[:2], changed, *chain[3:]], "certificate 3, after epoch 2")


def test_each_phase_of_each_site_is_checked(chain: list[bytes]) -> None:
    given = Certificate.decode(chain[2])
    for place, endorsement in enumerate(given.endorsements):
        said = PhaseStatement.decode(endorsement.step.statement)
        for wrong in (
            replace(endorsement, step=replace(endorsement.step, signature=bytes(64))),
            replace(endorsement, step=Signed.make(said.site, replace(said, root=os.urandom(32)), SITES[said.site])),
            replace(endorsement, step=Signed.make(said.site, replace(said, proofs=os.urandom(32)), SITES[said.site])),
            replace(endorsement, step=Signed.make(said.site, said, SITES["c"])),
            replace(endorsement, answers=endorsement.answers[1:] or (endorsement.step,)),
        ):
            steps: tuple[Endorsement, ...] = (*given.endorsements[:place], wrong, *given.endorsements[place + 1 :])
            refused([*chain[:2], replace(given, endorsements=steps).encode()], "certificate 3, after epoch 2: .*")


def test_approvals_are_checked_against_the_roster_of_their_time(chain: list[bytes]) -> None:
    given = Certificate.decode(chain[3])
    assert given.proposal
    for approvals in (given.proposal.approvals[:2], given.proposal.approvals[1:]):
        fewer = replace(given, proposal=replace(given.proposal, approvals=approvals))
        refused([*chain[:3], fewer.encode()], "certificate 4, after epoch 3: approval")
    a_third = Certificate.decode(chain[4])
    assert a_third.proposal
    assert len(a_third.proposal.approvals) == 3  # two approvals were enough to raise the quorum to three


def test_the_verifier_needs_no_hsm_and_no_database() -> None:
    code = "import sys, keyvault.sync.verify; print([m for m in ('pkcs11', 'sqlalchemy', 'psycopg') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BATCH = UUID(int=7)


def deks(ring_version: int = 1) -> tuple[DekRecord, ...]:
    return tuple(DekRecord(UUID(int=n), 1, "ring/main", ring_version, bytes([n]) * 32) for n in range(1, 4))


def test_a_voice_is_awaiting_sync_until_both_receipts_are_here() -> None:
    a, b = found_pair()
    records = deks()
    from_a, from_b = (receipt(node.state, BATCH, records, SITES[node.name]) for node in (a, b))
    for partial in ([], [from_a], [from_b], [from_b, from_b]):
        with pytest.raises(AwaitingSync):
            check_receipts(a.ledger, BATCH, records, partial, verify_p256)
    check_receipts(a.ledger, BATCH, records, [from_a, from_b], verify_p256)


def test_receipts_are_for_one_batch_and_one_site() -> None:
    a, b = found_pair()
    records = deks()
    good = [receipt(node.state, BATCH, records, SITES[node.name]) for node in (a, b)]
    for other in (records[:2], records[::-1], (*records[:2], replace(records[2], blob_sha256=bytes(32)))):
        with pytest.raises(StatementMalformed):
            check_receipts(a.ledger, BATCH, other, good, verify_p256)
    with pytest.raises(StatementMalformed):
        check_receipts(a.ledger, UUID(int=8), records, good, verify_p256)
    said = Receipt.decode(Signed.decode(good[1]).statement)
    with pytest.raises(SignatureInvalid):
        check_receipts(a.ledger, BATCH, records, [good[0], Signed.make("b", said, SITES["a"]).encode()], verify_p256)
    with pytest.raises(StatementMalformed):
        check_receipts(a.ledger, BATCH, records, [good[0], Signed.make("a", said, SITES["a"]).encode()], verify_p256)


def test_a_site_vouches_only_for_masters_it_agreed_on() -> None:
    a, _ = found_pair()
    with pytest.raises(KeyNotFound):
        receipt(a.state, BATCH, deks(ring_version=2), SITES["a"])
