"""A new key for one voice: the same numbers under another key, for a maintenance grant alone, and nothing is left in memory."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from erasing import ErasingVault
from test_forgetting import Child, child, needles, secrets, speech  # noqa: F401 — fixtures
from vault import SmallVault

from keyvault.approval_kinds import Kind, explained
from keyvault.approvals import Officer, Operation, signed_by
from keyvault.errors import KeyCompromised, KeyNotFound, KeyStateForbids, RowChanged, SealBroken
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.records import WrappedKey
from keyvault.states import KeyState
from keyvault.store import KeyStore, TombstoneStore, wrapped_key
from keyvault.sync.errors import ApprovalExpired, ApprovalInvalid, ApprovalMissing, RequesterApproved
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.signatures import verify_p256
from policies.errors import AuditUnavailable, GrantExpired, GrantMismatch, VoiceUnknown
from policies.grants import REKEY, MaintenanceGrant, rekey_description
from service.voices import Voices
from voiceprints.sealing import place
from voiceprints.store import RowKind, VoiceprintStore


@pytest.fixture
def erasing(vault: SmallVault) -> ErasingVault:
    return ErasingVault(vault)


@pytest.fixture
def enrolled(erasing, anna):
    return erasing.small.enrol(anna)


def numbers(vault: SmallVault, voice) -> tuple[np.ndarray, np.ndarray]:
    with vault.voices.opened(voice.voice_id, vault.speak(voice)) as known:
        return known.embedding.copy(), known.conditioning.copy()


def keys_of(erasing: ErasingVault, voice) -> list[WrappedKey]:
    with erasing.database.begin() as transaction:
        return TombstoneStore().keys_of(transaction, voice.voice_id)


def reseal(erasing: ErasingVault, voice, **options):
    ref = erasing.resealing.reseal(voice.voice_id, options.get("grant") or erasing.grant(voice.voice_id))
    return replace(voice, key=ref)


def test_the_voice_is_the_same_under_another_key(erasing, enrolled):
    before, old = numbers(erasing.small, enrolled), keys_of(erasing, enrolled)[0]
    with erasing.database.begin() as transaction:
        kept = VoiceprintStore().load(transaction, "acme", enrolled.voice_id)
    after = reseal(erasing, enrolled)
    assert after.key.version == 2
    assert after.key.id != enrolled.key.id
    for one, other in zip(before, numbers(erasing.small, after), strict=True):
        assert np.array_equal(one, other)
    with erasing.database.begin() as transaction:
        voice = erasing.policies.voice_anywhere(transaction, enrolled.voice_id)
        now = VoiceprintStore().load(transaction, "acme", enrolled.voice_id)
    assert (voice.dek_id, voice.key_version) == (after.key.id, 2)
    assert {(row.dek_id, row.dek_version) for row in now} == {(after.key.id, 2)}
    assert not {row.sealed for row in kept} & {row.sealed for row in now}
    with erasing.hsm.open_dek(RingMaster("main", 1), old.blob) as dek, LockedBuffer(8192) as buffer:
        part, _ = place(now[0], tenant="acme", voice=enrolled.voice_id, kind=RowKind.EMBEDDING, target=buffer)
        with pytest.raises(SealBroken):
            dek.open_into(part.data, part.aad, part.target, part.offset)
    assert erasing.small.memory.taken == 0


def test_the_old_version_is_destroyed_and_its_number_stays_taken(erasing, enrolled):
    after = reseal(erasing, reseal(erasing, enrolled))
    keys = keys_of(erasing, enrolled)
    assert [(key.ref.version, key.state, bool(key.blob)) for key in keys] == [
        (1, KeyState.DESTROYED, False),
        (2, KeyState.DESTROYED, False),
        (3, KeyState.ACTIVE, True),
    ]
    assert all(key.synced == key.row_version for key in keys[:2])
    with erasing.database.begin() as transaction:
        assert KeyStore().references(transaction, "main") == {1: 1}, "no master is kept for a destroyed key"
        with pytest.raises(KeyStateForbids):
            erasing.small.keys.open(erasing.small.keys.get(transaction, keys[0].ref.id), [], lambda: None)
    stone = erasing.erase(enrolled.voice_id).tombstone
    assert stone.dek_ids == (*(key.ref.id for key in keys[:2]), after.key.id)
    assert (stone.first_ring_version, stone.last_ring_version) == (1, 1)


def test_a_token_for_the_old_version_is_refused(erasing, enrolled):
    grant = erasing.small.speak(enrolled)
    reseal(erasing, enrolled)
    with pytest.raises(GrantMismatch), erasing.small.voices.opened(enrolled.voice_id, grant):
        pytest.fail("opened")


def test_what_is_done_is_on_record_before_anything_opens(erasing, enrolled, tmp_path):
    reseal(erasing, enrolled)
    said = [facts.get("job") for action in ("voice.resealing", "voice.resealed") for _, facts in moments(erasing, action)]
    assert said == ["job", "job"]
    assert [facts["version"] for _, facts in moments(erasing, "key.destroyed")] == [1]
    erasing.edit("CREATE FUNCTION lost() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    erasing.edit("CREATE TRIGGER lost BEFORE INSERT ON intent FOR EACH ROW EXECUTE FUNCTION lost()")
    erasing.small.keys._hsm = SimpleNamespace(masters=erasing.small.hsm.masters)  # whoever asks the token fails otherwise
    with pytest.raises(AuditUnavailable):
        reseal(erasing, enrolled)


def moments(erasing, action):
    with erasing.database.begin() as transaction:
        return erasing.erasure._details.of(transaction, action)


def test_a_maintenance_grant_speaks_and_compares_for_nobody(erasing, enrolled):
    grant = erasing.grant(enrolled.voice_id)
    with pytest.raises(GrantMismatch), erasing.small.voices.opened(enrolled.voice_id, grant):
        pytest.fail("opened")
    with pytest.raises(GrantMismatch):
        erasing.small.matching.compare(np.zeros(16_000, np.float32), enrolled.voice_id, grant)


def test_a_grant_is_for_its_batch_and_its_time(erasing, enrolled, ben):
    other = erasing.small.enrol(ben, "Ben")
    with pytest.raises(GrantMismatch):
        reseal(erasing, enrolled, grant=erasing.grant(other.voice_id))
    late = replace(erasing.grant(enrolled.voice_id), expires_at=erasing.now())
    with pytest.raises(GrantExpired):
        reseal(erasing, enrolled, grant=late)
    unknown = uuid4()
    with pytest.raises(VoiceUnknown):
        erasing.resealing.reseal(unknown, erasing.grant(unknown))
    assert numbers(erasing.small, enrolled)


def test_a_grant_that_ends_while_it_is_used_opens_nothing(erasing, enrolled, monkeypatch):
    grant = erasing.grant(enrolled.voice_id)
    begun = erasing.resealing._begun

    def slowly(voice, grant):
        found = begun(voice, grant)
        erasing.small.now += 7200
        return found

    monkeypatch.setattr(erasing.resealing, "_begun", slowly)
    with pytest.raises(GrantExpired):
        reseal(erasing, enrolled, grant=grant)
    assert [key.ref.version for key in keys_of(erasing, enrolled)] == [1]


def test_a_voice_that_changed_meanwhile_stays_as_it_is(erasing, enrolled, monkeypatch):
    begun = erasing.resealing._begun

    def overtaken(voice, grant):
        found = begun(voice, grant)
        monkeypatch.setattr(erasing.resealing, "_begun", begun)
        reseal(erasing, enrolled)
        return found

    monkeypatch.setattr(erasing.resealing, "_begun", overtaken)
    with pytest.raises((RowChanged, KeyNotFound)):
        reseal(erasing, enrolled)
    assert [key.state for key in keys_of(erasing, enrolled)] == [KeyState.DESTROYED, KeyState.ACTIVE]


def test_a_failure_at_the_last_step_changes_nothing(erasing, enrolled, monkeypatch):
    before = numbers(erasing.small, enrolled)

    def broken(*_: object) -> None:
        raise RowChanged("broken")

    monkeypatch.setattr(erasing.tombstones, "retire_older", broken)
    with pytest.raises(RowChanged):
        reseal(erasing, enrolled)
    with erasing.database.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(wrapped_key)) == 1
    assert np.array_equal(before[0], numbers(erasing.small, enrolled)[0])
    assert erasing.small.memory.taken == 0


# The grant


def key_pair():
    private = ec.generate_private_key(ec.SECP256R1())
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

    def sign(data: bytes) -> bytes:
        r, s = decode_dss_signature(private.sign(data, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + min(s, order - s).to_bytes(32, "big")

    return private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), sign


class Officers:
    """Three officers, of whom two must approve."""

    def __init__(self, erasing: ErasingVault) -> None:
        self.erasing, self.pairs = erasing, {name: key_pair() for name in ("ann", "bob", "cid")}
        officers = tuple(Officer(name, (public,)) for name, (public, _) in self.pairs.items())
        self.roster = Roster("c", 1, erasing.roster.sites, officers, 2)

    def granted(self, voices, *, people=("bob", "cid"), about=None, kind=REKEY, cluster="c", late=False) -> MaintenanceGrant:
        subject = sha256(rekey_description("c", about or voices)).digest()
        operation = Operation(cluster, kind, subject, "ann", bytes(16), self.erasing.now() + timedelta(minutes=5))
        signers = [("ann", "request"), *((person, "approve") for person in people)]
        approvals = [signed_by(operation, person, role, self.pairs[person][1]) for person, role in signers]
        now = self.erasing.now() + timedelta(minutes=6 if late else 0)
        return MaintenanceGrant.approved(self.roster, operation, approvals, voices, now=now, verify=verify_p256)


@pytest.fixture
def officers(erasing) -> Officers:
    return Officers(erasing)


def test_officers_approve_a_batch(erasing, enrolled, officers):
    grant = officers.granted([enrolled.voice_id])
    assert grant.approved_by == ("bob", "cid")
    assert reseal(erasing, enrolled, grant=grant).key.version == 2


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"people": ("bob",)}, ApprovalMissing),
        ({"people": ("bob", "bob")}, ApprovalMissing),
        ({"people": ("bob", "ann")}, RequesterApproved),
        ({"about": [uuid4()]}, GrantMismatch),
        ({"kind": "keys.destroy"}, GrantMismatch),
        ({"cluster": "other"}, GrantMismatch),
        ({"late": True}, ApprovalExpired),
    ],
)
def test_no_other_approval_makes_a_grant(officers, changed, error):
    with pytest.raises(error):
        officers.granted([uuid4()], **changed)


def test_a_signature_of_another_operation_approves_nothing(officers):
    private = officers.pairs["bob"]
    officers.pairs["bob"] = key_pair()
    with pytest.raises(ApprovalInvalid):
        officers.granted([uuid4()])
    officers.pairs["bob"] = private
    assert officers.granted([uuid4()])


def test_more_voices_than_approved_are_refused(erasing, officers):
    approved, more = uuid4(), uuid4()
    with pytest.raises(GrantMismatch):
        officers.granted([approved, more], about=[approved])


def test_where_there_are_two_sites_nobody_grants_by_himself(erasing, officers):
    second = SiteKey("b", "2", key_pair()[0])
    roster = replace(officers.roster, sites=(*officers.roster.sites, second))
    with pytest.raises(GrantMismatch):
        MaintenanceGrant.development(roster, "job", [uuid4()], now=erasing.now())
    assert MaintenanceGrant.development(officers.roster, "job", [uuid4()], now=erasing.now()).approved_by == ()


def test_the_operators_call_files_a_request_and_does_it_once_officers_have_approved(erasing, enrolled, officers):
    second = SiteKey("b", "2", key_pair()[0])
    roster = replace(officers.roster, sites=(*officers.roster.sites, second))
    parts = (erasing.policies, erasing.audit, erasing.tombstones, erasing.erasure, roster)
    office = Voices(SimpleNamespace(site="a"), erasing.database, erasing.hsm, *parts)
    asked = office.rekey([enrolled.voice_id])
    assert asked["voices"] == []
    assert office.rekey([enrolled.voice_id])["request"] == asked["request"], "it is filed once"
    inbox = office._inbox()
    request = inbox.one(asked["request"]).request
    for person in ("ann", "bob"):
        inbox.add(replace(request, approvals=(signed_by(request.operation, person, "approve", officers.pairs[person][1]),)))
    with erasing.database.begin() as transaction:  # as if both sites had signed for it
        key = KeyStore().key(transaction, enrolled.key.id)
        signed = replace(key, synced=key.row_version + 1, row_version=key.row_version + 1)
        KeyStore().replace_key(transaction, key, replace(signed, mac=erasing.mac.make(signed.DOMAIN, *signed.fields)))
    assert office.rekey([enrolled.voice_id, uuid4()])["request"] != asked["request"], "another batch is another request"
    done = office.rekey([enrolled.voice_id])
    assert done["approved_by"] == ["ann", "bob"]
    assert done["voices"] == [{"voice": str(enrolled.voice_id), "key_version": 2, "code": None}]
    assert office.rekey([enrolled.voice_id])["request"] not in (None, asked["request"]), "an approval is used once"


def test_under_a_compromised_version_the_grant_opens_nothing_without_broken_glass(erasing, enrolled):
    erasing.set_ring(1, KeyState.COMPROMISED)
    with pytest.raises(KeyCompromised):
        reseal(erasing, enrolled)
    assert [key.state for key in keys_of(erasing, enrolled)] == [KeyState.ACTIVE], "nothing has changed"
    asked = []

    def broken(key):
        asked.append(key.ref.id)
        erasing.set_ring(1, KeyState.ACTIVE)  # the small token holds no second version to seal under

    erasing.resealing._break_glass = broken
    after = reseal(erasing, enrolled)
    assert (after.key.version, asked) == (2, [enrolled.key.id])
    reseal(erasing, after)
    assert len(asked) == 1, "officers are asked for nothing where the version is not compromised"


def test_officers_break_the_glass_for_the_operators_call_and_it_is_on_record(erasing, enrolled, officers, tmp_path):
    (tmp_path / "roster").write_bytes(officers.roster.encode())
    parts = (erasing.policies, erasing.audit, erasing.tombstones, erasing.erasure, officers.roster)
    office = Voices(SimpleNamespace(site="a", roster_file=tmp_path / "roster"), erasing.database, erasing.hsm, *parts)
    erasing.set_ring(1, KeyState.COMPROMISED)

    def code():
        return office.rekey([enrolled.voice_id])["voices"][0]["code"]

    facts = {"site": "a", "reason": "a last message", "version": "ring/main/1"}
    inbox, about = office._inbox(), explained(Kind.OPEN_COMPROMISED, "c", facts)
    request = inbox.one(inbox.request(Kind.OPEN_COMPROMISED, about.subject, facts, datetime.now(UTC) + timedelta(hours=1))).request
    for person in ("ann", "bob"):
        assert code() == "key_compromised"
        inbox.add(replace(request, approvals=(signed_by(request.operation, person, "approve", officers.pairs[person][1]),)))
    assert code() == "key_state_forbids", "it opened, and there is no version to seal under"
    assert [facts["version"] for _, facts in moments(erasing, "key.glass_broken")] == ["ring/main/1"]
    inbox.cancel(request.operation.digest.hex())
    assert code() == "key_compromised"


@pytest.mark.timeout(300)
def test_no_voice_is_left_in_memory_after_a_new_key(child: Child, secrets):  # noqa: F811
    vectors, _ = secrets
    stored = {name: run for name, run in vectors.items() if not name.startswith("probe")}
    child.tell("enrol", "reseal", "reseal")
    assert child.find(needles(stored)) == []
    child.tell("hold")
    assert {found.needle.split("[")[0] for found in child.find(needles(stored))} == {"stored embedding", "conditioning"}, (
        "the control"
    )
    child.tell("release")
