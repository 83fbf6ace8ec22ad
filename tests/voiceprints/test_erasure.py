"""Erasure: of a voice nothing is left but what names nobody, whatever its rows were like, and the log still verifies."""

from __future__ import annotations

import io
import json
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from erasing import ErasingVault
from vault import SmallVault

from keyvault.errors import KeyNotFound, KeyVaultError, RecordTampered, RowChanged
from keyvault.hsm import RingMaster
from keyvault.keys import VoiceKeys
from keyvault.records import Tombstone
from keyvault.states import KeyState
from keyvault.store import KeyStore, TombstoneStore, tombstone, wrapped_key
from keyvault.tombstones import MISSING
from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.details import Details
from policies.audit.export import export
from policies.audit.sequencer import Sequencer
from policies.audit.verify import Verifier
from policies.consent import ConsentState
from policies.errors import AuditUnavailable, PolicyError, VoiceUnknown
from policies.intents import Intent
from policies.store import voice as voice_table
from service.replication import VoiceRows
from voiceprints.errors import VoiceprintMissing
from voiceprints.opening import OpenVoices
from voiceprints.store import voiceprint

NAME = "Annabel Lee of the kingdom by the sea"
TABLES = (voiceprint, wrapped_key, voice_table)


@pytest.fixture
def erasing(vault: SmallVault) -> ErasingVault:
    return ErasingVault(vault)


@pytest.fixture
def enrolled(erasing, anna):
    return erasing.small.enrol(anna, NAME)


def opens(vault: SmallVault, voice) -> bool:
    with vault.voices.opened(voice.voice_id, vault.speak(voice)) as known:
        return bool(known.embedding.any())


def dump(erasing: ErasingVault) -> dict:
    with erasing.database.connect() as connection:
        return {table: [dict(row) for row in connection.execute(sa.select(table)).mappings()] for table in TABLES}


def restore(erasing: ErasingVault, rows: dict) -> None:
    with erasing.database.begin() as transaction:
        for table, kept in rows.items():
            transaction.execute(sa.insert(table), kept)


def stone_of(erasing: ErasingVault, voice) -> Tombstone:
    with erasing.database.begin() as transaction:
        found = erasing.tombstones.of(transaction, voice.voice_id)
    assert found is not None
    return found


def shred(erasing: ErasingVault):
    with erasing.database.begin() as transaction:
        return erasing.tombstones.shred_due(transaction, now=erasing.now())


def test_of_an_erased_voice_no_table_holds_anything(erasing, enrolled):
    needles = [NAME, *(row["sealed"] for row in dump(erasing)[voiceprint]), *(row["blob"] for row in dump(erasing)[wrapped_key])]
    assert erasing.holding(*needles) == {"voice", "voiceprint", "wrapped_key"}, "the control: the scan finds what is there"
    ids = (str(enrolled.voice_id), str(enrolled.key.id))
    done = erasing.erase(enrolled.voice_id)
    assert (done.changed, done.keys, done.sealed_rows, done.findings) == (True, 1, 2, ())
    assert erasing.holding(*needles) == set()
    assert erasing.holding(*ids) == {"tombstone", "authority_change"}, "ids alone: that it is gone, and stays so"
    with pytest.raises(VoiceprintMissing):
        opens(erasing.small, enrolled)
    stone = stone_of(erasing, enrolled)
    assert (stone.tenant, stone.dek_ids, stone.peer_erased_at, stone.shredded_at) == (
        "acme",
        (enrolled.key.id,),
        stone.erased_at,
        None,
    )
    assert (stone.first_ring_version, stone.last_ring_version) == (1, 1)


def test_other_voices_are_untouched(erasing, enrolled, ben):
    other = erasing.small.enrol(ben, "Ben")
    erasing.erase(enrolled.voice_id)
    assert opens(erasing.small, other)


def test_a_second_erasure_says_so_and_changes_nothing(erasing, enrolled):
    first = erasing.erase(enrolled.voice_id).tombstone
    erasing.small.now += 60
    again = erasing.erase(enrolled.voice_id)
    assert not again.changed
    assert again.tombstone == first == stone_of(erasing, enrolled)


def test_a_voice_that_never_was_is_unknown(erasing):
    with pytest.raises(VoiceUnknown):
        erasing.erase(uuid4())


def test_another_tenant_erases_nothing(erasing, enrolled):
    with pytest.raises(VoiceUnknown):
        erasing.erase(enrolled.voice_id, tenant="rival")
    assert opens(erasing.small, enrolled)


def test_what_cannot_be_recorded_is_not_erased(erasing, enrolled):
    erasing.edit("CREATE FUNCTION lost() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    erasing.edit("CREATE TRIGGER lost BEFORE INSERT ON intent FOR EACH ROW EXECUTE FUNCTION lost()")
    with pytest.raises(AuditUnavailable):
        erasing.erase(enrolled.voice_id)
    assert opens(erasing.small, enrolled)


DAMAGE = {
    "the voice's row is changed": ("UPDATE voice SET name = 'x'", "the voice's row does not carry its MAC"),
    "the voice's row is gone": ("DELETE FROM voice", "the voice's row is missing"),
    "the key is changed": ("UPDATE wrapped_key SET first_ring_version = 7", "key version 1 does not carry its MAC"),
    "the key's state is none": ("UPDATE wrapped_key SET state = 'nonsense'", "key version 1 does not carry its MAC"),
    "the key is gone": ("DELETE FROM wrapped_key", "the key is missing"),
    "a sealed row is gone": ("DELETE FROM voiceprint WHERE kind = 'embedding'", "the second sealed row is missing"),
    "both sealed rows are gone": ("DELETE FROM voiceprint", "the voiceprint is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_stops_no_erasure(erasing, enrolled, damage):
    statement, finding = DAMAGE[damage]
    erasing.set_ring(2, KeyState.ACTIVE)
    erasing.edit(statement)
    done = erasing.erase(enrolled.voice_id)
    assert finding in done.findings
    assert dump(erasing) == {table: [] for table in TABLES}
    doubtful = "key" in damage
    assert done.tombstone.last_ring_version == (2 if doubtful else 1), "a key that is not believed is under every version"


def test_a_tombstone_that_was_changed_is_written_again(erasing, enrolled):
    erasing.erase(enrolled.voice_id)
    erasing.set_ring(2, KeyState.ACTIVE)
    erasing.edit("UPDATE tombstone SET shredded_at = now()")
    with pytest.raises(RecordTampered):
        stone_of(erasing, enrolled)
    done = erasing.erase(enrolled.voice_id)
    assert done.findings[0] == "the tombstone does not carry its MAC"
    assert stone_of(erasing, enrolled).shredded_at is None
    assert stone_of(erasing, enrolled).last_ring_version == 2


def test_an_old_copy_opens_the_voice_until_it_is_shredded(erasing, enrolled):
    """Erased alone is not enough, which the first half shows."""
    kept = dump(erasing)
    erasing.erase(enrolled.voice_id)
    restore(erasing, kept)
    assert opens(erasing.small, enrolled), "the control: before the destruction an old copy opens"
    erasing.erase(enrolled.voice_id)
    assert shred(erasing).shredded == ()
    erasing.set_ring(1, KeyState.DEACTIVATED)
    erasing.set_ring(1, KeyState.DESTROYED)
    assert shred(erasing).shredded == (enrolled.voice_id,)
    restore(erasing, kept)
    vault = erasing.small
    keys = VoiceKeys(_Destroyed(vault.hsm), KeyStore(), vault.keys._recorder, erasing.mac)
    voices = OpenVoices(database=vault.database, keys=keys, memory=vault.memory, clock=vault.clock)
    with pytest.raises(KeyVaultError), voices.opened(enrolled.voice_id, vault.speak(enrolled)):
        pytest.fail("opened")
    assert vault.memory.taken == 0


class _Destroyed:
    """A token whose masters are destroyed: it knows none."""

    def __init__(self, hsm) -> None:
        self._hsm = hsm

    def __getattr__(self, name):
        return getattr(self._hsm, name)

    def masters(self):
        return ()

    def open_dek(self, master: RingMaster, wrapped, check=None):
        raise KeyNotFound(f"this token does not serve {master.label}")


def test_shredded_needs_every_version_that_ever_covered_the_key(erasing, enrolled):
    store = KeyStore()
    erasing.set_ring(1, KeyState.DEACTIVATED)
    erasing.set_ring(2, KeyState.ACTIVE)
    with erasing.database.begin() as transaction:  # as a re-wrap does
        old = store.key(transaction, enrolled.key.id)
        new = replace(old, ref=replace(old.ref, ring_version=2), row_version=2)
        store.replace_key(transaction, old, replace(new, mac=erasing.mac.make(new.DOMAIN, *new.fields)))
    stone = erasing.erase(enrolled.voice_id).tombstone
    assert (stone.first_ring_version, stone.last_ring_version) == (1, 2)
    erasing.set_ring(1, KeyState.DESTROYED)
    assert shred(erasing).shredded == ()
    due = erasing.now() + timedelta(days=7)
    erasing.set_ring(2, KeyState.DEACTIVATED, destroy_at=due)
    with erasing.database.begin() as transaction:
        outlook = erasing.tombstones.outlook(transaction, stone)
    assert (outlook.left, outlook.due) == (("main/2",), due)
    erasing.set_ring(2, KeyState.DESTROYED, destroy_at=None)
    assert shred(erasing).shredded == (enrolled.voice_id,)
    assert stone_of(erasing, enrolled).shredded_at == erasing.now()
    assert shred(erasing).shredded == ()
    assert [facts["voice"] if "voice" in facts else facts["ring"] for _, facts in moments(erasing, "voice.shredded")] == ["main"]


def moments(erasing, action):
    with erasing.database.begin() as transaction:
        return erasing.erasure._details.of(transaction, action)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE ring_version SET state = 'destroyed'", "DELETE FROM ring_version"],
)
def test_no_row_written_by_hand_makes_a_voice_look_shredded(erasing, enrolled, statement):
    erasing.erase(enrolled.voice_id)
    erasing.edit(statement)
    with suppress(RecordTampered):
        assert shred(erasing).shredded == ()
    assert stone_of(erasing, enrolled).shredded_at is None


def test_a_changed_tombstone_is_named_and_holds_no_other_up(erasing, enrolled, ben):
    other = erasing.small.enrol(ben, "Ben")
    erasing.erase(enrolled.voice_id)
    erasing.erase(other.voice_id)
    erasing.edit("UPDATE tombstone SET last_ring_version = 0 WHERE voice_id = :id", id=enrolled.voice_id)
    erasing.set_ring(1, KeyState.DEACTIVATED)
    erasing.set_ring(1, KeyState.DESTROYED)
    found = shred(erasing)
    assert (found.shredded, found.tampered) == ((other.voice_id,), (enrolled.voice_id,))


def test_two_sites_the_other_one_has_to_confirm(vault, anna):
    here = ErasingVault(vault, alone=False)
    voice = vault.enrol(anna, NAME)
    stone = here.erase(voice.voice_id).tombstone
    assert stone.peer_erased_at is None
    with here.database.begin() as transaction:
        assert TombstoneStore().untold(transaction) == [stone]
        vault.now += 5
        wider = replace(stone, first_ring_version=1, last_ring_version=3)
        done = here.tombstones.confirm(transaction, wider, now=here.now())
        assert TombstoneStore().untold(transaction) == []
    assert (done.erased_at, done.peer_erased_at) == (stone.erased_at, here.now())
    assert done.last_ring_version == 3, "the other site's copies count too"


def test_the_other_site_drops_its_copies_and_covers_its_own(vault, anna):
    there = ErasingVault(vault, alone=False)
    voice = vault.enrol(anna, NAME)
    theirs = Tombstone(voice.voice_id, "acme", (voice.key.id,), "main", 2, 2, there.now() - timedelta(seconds=9))
    with there.database.begin() as transaction:
        VoiceRows(there.policies, Details(there.hsm)).drop(transaction, voice.voice_id)
        mine = there.tombstones.receive(transaction, theirs, now=there.now())
        again = there.tombstones.receive(transaction, theirs, now=there.now())
    assert mine == again == stone_of(there, voice)
    assert (mine.first_ring_version, mine.last_ring_version) == (1, 2)
    assert (mine.erased_at, mine.peer_erased_at) == (there.now(), theirs.erased_at)
    assert dump(there) == {table: [] for table in TABLES}


def test_a_withdrawal_ends_the_consent_and_erases_every_voice_under_it(erasing, enrolled, ben):
    second = erasing.small.enrol(ben, "Ben")
    with erasing.database.begin() as transaction:
        done = erasing.erasure.withdraw(transaction, erasing.small.consent)
    assert {erased.tombstone.voice for erased in done} == {enrolled.voice_id, second.voice_id}
    with erasing.database.begin() as transaction:
        assert erasing.policies.consent(transaction, erasing.small.consent).state is ConsentState.WITHDRAWN
        assert erasing.erasure.withdraw(transaction, erasing.small.consent) == ()
    assert dump(erasing) == {table: [] for table in TABLES}


def test_a_changed_consent_stops_no_withdrawal(erasing, enrolled):
    erasing.edit("UPDATE consent SET subject = 'somebody else'")
    with erasing.database.begin() as transaction:
        assert len(erasing.erasure.withdraw(transaction, erasing.small.consent)) == 1


class Log:
    """The log's own process, in short, and the auditor."""

    def __init__(self, erasing: ErasingVault, folder: Path) -> None:
        self.erasing, self.last, self.private = erasing, LastCheckpoint(folder / "checkpoint"), Ed25519PrivateKey.generate()
        spki = self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.key = verifier_key("voice.example/audit", spki)

    def bundle(self) -> bytes:
        with Sequencer(self.erasing.database, self.key, self.private.sign, self.last) as sequencer:
            while sequencer.step().added:
                pass
        out = io.StringIO()
        export(self.erasing.database, self.key, out, disclose=self.erasing.audit.disclose)
        return out.getvalue().encode()

    def verified(self) -> list[dict]:
        bundle = self.bundle()
        Verifier(self.key.fingerprint).verify(io.BytesIO(bundle))  # raises at what does not hold
        entries = [json.loads(line) for line in bundle.splitlines()[1:-1]]
        return [json.loads(entry["entry"]) | {"disclosed": "disclosed" in entry} for entry in entries if "entry" in entry]


def test_the_log_loses_the_voices_details_and_still_verifies(erasing, enrolled, ben, tmp_path):
    log, other = Log(erasing, tmp_path), erasing.small.enrol(ben, "Ben")
    for voice, purpose in ((enrolled, "speak"), (other, "speak"), (enrolled, "erase")):
        intent = Intent("request.admit", "allowed", "acme", "app", voice.voice_id, purpose, {"jti": "j"})
        with erasing.database.begin() as transaction:
            erasing.audit.append(transaction, intent)
    before = log.verified()
    assert all(entry["disclosed"] for entry in before)
    done = erasing.erase(enrolled.voice_id)
    assert done.details == 2  # its key's making, and one request
    after = log.verified()
    assert [{**entry, "disclosed": True} for entry in after[: len(before)]] == before
    gone = [(entry["action"], entry["purpose"]) for entry in after if not entry["disclosed"]]
    assert gone == [("key.created", "keys"), ("request.admit", "speak")]
    assert after[-1]["action"] == "voice.erased"
    assert erasing.audit.check_macs() == len(after)
    assert erasing.erase(enrolled.voice_id).details == 0
    assert log.verified()[-1]["disclosed"], "what says that it was erased keeps its details"


def test_an_entry_written_while_the_voice_was_erased_loses_its_details_later(erasing, enrolled):
    erasing.erase(enrolled.voice_id)
    with erasing.database.begin() as transaction:
        erasing.audit.append(
            transaction, Intent("request.admit", "allowed", "acme", "app", enrolled.voice_id, "speak", {"jti": "j"})
        )
    assert erasing.erase(enrolled.voice_id).details == 1


def together(*calls) -> list[Exception | None]:
    """Run these at once; what each raised."""
    start, came = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        start.wait()
        try:
            calls[number]()
        except Exception as error:  # noqa: BLE001 — the test looks at it
            came[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def test_of_two_erasures_at_once_one_does_it(erasing, enrolled):
    done = []
    assert together(*[lambda: done.append(erasing.erase(enrolled.voice_id))] * 4) == [None] * 4
    assert sorted(erased.changed for erased in done) == [False, False, False, True]
    with erasing.database.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(tombstone)) == 1


def test_erasing_while_the_voice_is_spoken_with_re_wrapped_and_sealed_again(erasing, anna):
    store, vault = KeyStore(), erasing.small

    def speak_on():
        for _ in range(6):
            opens(vault, voice)

    def rewrap_on():
        for _ in range(20):
            with erasing.database.begin() as transaction:
                old = store.newest_key(transaction, voice.voice_id)
                if old is None:
                    return
                blob = erasing.hsm.rewrap(old.blob, RingMaster("main", 1), RingMaster("main", 1))
                new = replace(old, blob=blob, row_version=old.row_version + 1)
                store.replace_key(transaction, old, replace(new, mac=erasing.mac.make(new.DOMAIN, *new.fields)))

    for _ in range(6):
        voice = vault.enrol(anna, NAME)
        came = together(
            speak_on,
            rewrap_on,
            partial(erasing.resealing.reseal, voice.voice_id, erasing.grant(voice.voice_id)),
            partial(erasing.erase, voice.voice_id),
        )
        assert came[3] is None
        allowed = (PolicyError, KeyVaultError, VoiceprintMissing)
        assert all(error is None or isinstance(error, allowed) for error in came), came
        assert isinstance(came[1], RowChanged | None)
        assert dump(erasing) == {table: [] for table in TABLES}, "nothing half, and nothing came back"
        assert stone_of(erasing, voice).dek_ids[0] in (voice.key.id, MISSING)
        assert vault.memory.taken == 0
