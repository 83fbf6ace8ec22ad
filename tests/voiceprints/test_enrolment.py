"""Recordings become a sealed voice or nothing; a sealed voice opens for its grant alone, and leaves nothing behind."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest
import sqlalchemy as sa
from sound import flac, samples
from vault import SpectrumConditioner

from keyvault.errors import KeyStateForbids, KeyVaultError, RecordTampered, SealBroken
from keyvault.store import wrapped_key
from policies.errors import ConsentUnknown, GrantExpired, GrantMismatch
from policies.grants import Purpose
from policies.store import voice as voice_table
from voiceprints.embedding import SIZE, centre
from voiceprints.errors import (
    ConditioningInvalid,
    EmbeddingInvalid,
    InvalidSamples,
    LockedMemoryExhausted,
    ModelMismatch,
    QualityRefused,
    VoiceprintMissing,
    VoiceprintsUnavailable,
)
from voiceprints.matching import Band
from voiceprints.memory import LockedMemory
from voiceprints.opening import OpenVoices
from voiceprints.sealing import OVERHEAD
from voiceprints.store import VoiceprintStore, voiceprint


def rows(vault, voice_id=None):
    query = sa.select(voiceprint).order_by(voiceprint.c.kind)
    with vault.database.begin() as transaction:
        return transaction.execute(query if voice_id is None else query.where(voiceprint.c.voice_id == voice_id)).all()


def change(vault, statement):
    with vault.database.begin() as transaction:
        transaction.execute(statement)


def nothing_is_left(vault) -> bool:
    with vault.database.begin() as transaction:
        counts = [
            transaction.scalar(sa.select(sa.func.count()).select_from(table)) for table in (voiceprint, wrapped_key, voice_table)
        ]
    return counts == [0, 0, 0] and vault.memory.taken == 0


def test_enrolled_voice_opens_to_what_was_measured(vault, anna):
    voice = vault.enrol(anna)
    assert voice.quality.speech_seconds > 5
    expected = np.zeros(SIZE, dtype=np.float32)
    speech = [vault.activity.speech(part).only(part) for part in anna]
    centre(vault.encoder.windows(speech, np.zeros), expected)
    colour = np.zeros(48, dtype=np.float32)
    vault.conditioner.measure(np.concatenate(speech), colour, np.zeros)
    with vault.voices.opened(voice.voice_id, vault.speak(voice)) as known:
        assert np.array_equal(known.embedding, expected)
        assert np.array_equal(known.conditioning, colour)
        assert (known.embedding_model, known.conditioning_model) == (vault.encoder.model_id, "spectrum/1")
        assert known.key == voice.key
        embedding, scratch = known.embedding, known.scratch((16, 8), np.float64)
        scratch.fill(1.5)
        assert vault.memory.taken > 0
    assert not embedding.any()
    assert not scratch.any()
    assert vault.memory.taken == 0


def test_stored_bytes_are_sealed_and_of_the_stated_form(vault, anna):
    voice = vault.enrol(anna)
    conditioning, embedding = rows(vault, voice.voice_id)
    assert (conditioning.kind, embedding.kind) == ("conditioning", "embedding")
    assert len(embedding.sealed) == 4 * SIZE + OVERHEAD
    assert len(conditioning.sealed) == 4 * 48 + OVERHEAD
    assert {row.dek_id for row in (conditioning, embedding)} == {voice.key.id}
    assert {row.tenant for row in (conditioning, embedding)} == {"acme"}
    assert embedding.model_id == vault.encoder.model_id


def test_two_enrolments_of_the_same_speech_share_no_sealed_byte_run(vault, anna):
    one, two = (rows(vault, vault.enrol(anna).voice_id)[1].sealed for _ in range(2))
    assert not any(one[at : at + 8] == two[at : at + 8] for at in range(len(one)))


def test_a_repr_of_an_open_voice_shows_no_number(vault, anna):
    voice = vault.enrol(anna)
    with vault.voices.opened(voice.voice_id, vault.speak(voice)) as known:
        assert "array" not in repr(known)
    with vault.database.begin() as transaction:
        assert "sealed=" not in repr(VoiceprintStore().load(transaction, "acme", voice.voice_id))


@pytest.mark.parametrize("kind", ["embedding", "conditioning"])
def test_rows_swapped_between_two_voices_do_not_open(vault, anna, ben, kind):
    one, two = vault.enrol(anna), vault.enrol(ben)
    sealed = {row.voice_id: row.sealed for row in rows(vault) if row.kind == kind}
    for mine, theirs in ((one, two), (two, one)):
        change(vault, _of(mine, kind).values(sealed=sealed[theirs.voice_id]))
    for voice in (one, two):
        with pytest.raises(SealBroken), vault.voices.opened(voice.voice_id, vault.speak(voice)):
            pytest.fail("opened")
    assert vault.memory.taken == 0


def _of(voice, kind):
    return sa.update(voiceprint).where(voiceprint.c.voice_id == voice.voice_id, voiceprint.c.kind == kind)


def test_whole_rows_swapped_with_their_keys_do_not_open(vault, anna, ben):
    one, two = vault.enrol(anna), vault.enrol(ben)
    theirs = {row.kind: row for row in rows(vault, two.voice_id)}
    for kind, row in theirs.items():
        change(vault, _of(one, kind).values(sealed=row.sealed, dek_id=row.dek_id, dek_version=row.dek_version))
    with pytest.raises(RecordTampered), vault.voices.opened(one.voice_id, vault.speak(one, key=two.key)):
        pytest.fail("opened")


def test_kinds_swapped_within_a_voice_do_not_open(vault, anna):
    # The same size for both kinds, so that nothing but the binding can notice.
    conditioner = SpectrumConditioner()
    conditioner.conditioning_size = SIZE
    conditioner.measure = lambda samples, out, scratch: out.fill(0.25)
    voice = vault.enrolling(conditioner=conditioner).enrol(anna, "Anna", vault.grant(Purpose.ENROL, consent=vault.consent))
    conditioning, embedding = rows(vault, voice.voice_id)
    change(vault, _of(voice, "embedding").values(sealed=conditioning.sealed, model_id=conditioning.model_id))
    change(vault, _of(voice, "conditioning").values(sealed=embedding.sealed, model_id=embedding.model_id))
    with pytest.raises(SealBroken), vault.voices.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model_id": "ge2e/other"}, SealBroken),
        ({"dek_version": 2}, RecordTampered),
        ({"sealed": b"x" * 20}, SealBroken),
        ({"sealed": b"x" * 1052}, SealBroken),
        ({"sealed": b"x" * 1051}, SealBroken),
        ({"sealed": b"x" * 1056}, SealBroken),
    ],
)
def test_a_changed_row_does_not_open(vault, anna, values, error):
    voice = vault.enrol(anna)
    change(vault, _of(voice, "embedding").values(**values))
    with pytest.raises(error), vault.voices.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")
    assert vault.memory.taken == 0


def test_one_flipped_bit_anywhere_does_not_open(vault, anna):
    voice = vault.enrol(anna)
    sealed = rows(vault, voice.voice_id)[1].sealed
    for at in (0, 11, 12, 500, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[at] ^= 1
        change(vault, _of(voice, "embedding").values(sealed=bytes(changed)))
        with pytest.raises(SealBroken), vault.voices.opened(voice.voice_id, vault.speak(voice)):
            pytest.fail("opened")
    change(vault, _of(voice, "embedding").values(sealed=sealed))
    with vault.voices.opened(voice.voice_id, vault.speak(voice)):
        pass


def test_a_missing_row_or_another_tenant_is_missing(vault, anna):
    voice = vault.enrol(anna)
    with pytest.raises(VoiceprintMissing), vault.voices.opened(voice.voice_id, vault.speak(voice, tenant="rival")):
        pytest.fail("opened")
    change(vault, sa.delete(voiceprint).where(voiceprint.c.kind == "conditioning"))
    with pytest.raises(VoiceprintMissing), vault.voices.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")


def test_a_changed_key_record_is_refused_before_the_token_is_asked(vault, anna):
    voice = vault.enrol(anna)
    change(vault, sa.update(wrapped_key).values(state="destroyed"))
    with pytest.raises((RecordTampered, KeyStateForbids)), vault.voices.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")


@pytest.mark.parametrize("purpose", [Purpose.ENROL, Purpose.READ, Purpose.CONSENT])
def test_other_purposes_open_nothing(vault, anna, purpose):
    voice = vault.enrol(anna)
    grant = vault.grant(purpose, voice.voice_id, voice.key)
    with pytest.raises(GrantMismatch), vault.voices.opened(voice.voice_id, grant):
        pytest.fail("opened")


def test_a_grant_is_checked_at_the_moment_of_unwrapping(vault, anna, ben):
    one, two = vault.enrol(anna), vault.enrol(ben)
    with pytest.raises(GrantMismatch), vault.voices.opened(one.voice_id, vault.speak(two)):
        pytest.fail("opened")
    with pytest.raises(GrantMismatch), vault.voices.opened(one.voice_id, vault.speak(one, key=two.key)):
        pytest.fail("opened")
    with pytest.raises(GrantMismatch), vault.voices.opened(one.voice_id, vault.speak(one, jkt="another")):
        pytest.fail("opened")
    grant = vault.speak(one)
    vault.now += 6
    with pytest.raises(GrantExpired), vault.voices.opened(one.voice_id, grant):
        pytest.fail("opened")
    assert vault.memory.taken == 0


def test_memory_is_wiped_when_the_block_raises(vault, anna):
    voice = vault.enrol(anna)
    held = []

    def fail() -> None:
        with vault.voices.opened(voice.voice_id, vault.speak(voice)) as known:
            held.extend([known.embedding, known.conditioning])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(held) == 2
    assert not any(part.any() for part in held)
    assert vault.memory.taken == 0


def test_no_locked_memory_left_is_a_refusal_and_passes(vault, anna):
    voice = vault.enrol(anna)
    narrow = LockedMemory(3 << 20, patience_s=0.05)
    voices = OpenVoices(database=vault.database, keys=vault.keys, memory=narrow, clock=vault.clock)
    with voices.opened(voice.voice_id, vault.speak(voice)) as speaking:
        speaking.scratch(1)
        with voices.opened(voice.voice_id, vault.speak(voice)) as waiting:
            assert narrow.taken < 3 << 20, "a voice that waits holds little"
            with pytest.raises(LockedMemoryExhausted):
                waiting.scratch(1)
    with voices.opened(voice.voice_id, vault.speak(voice)) as alone:
        alone.scratch(1)
    assert narrow.taken == 0
    none = OpenVoices(database=vault.database, keys=vault.keys, memory=LockedMemory(1, patience_s=0.05), clock=vault.clock)
    with pytest.raises(LockedMemoryExhausted), none.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")


def test_a_database_that_is_gone_is_named(vault, anna):
    voice = vault.enrol(anna)
    gone = sa.create_engine("postgresql+psycopg://nobody@/nothing?host=/nonexistent")
    voices = OpenVoices(database=gone, keys=vault.keys, memory=vault.memory, clock=vault.clock)
    with pytest.raises(VoiceprintsUnavailable), voices.opened(voice.voice_id, vault.speak(voice)):
        pytest.fail("opened")


def test_a_failed_gate_leaves_nothing(vault):
    short = samples(flac("1998", 1))[:40_000]
    with pytest.raises(QualityRefused) as refusal:
        vault.enrol([short])
    assert [gate.code for gate in refusal.value.failed] == ["too_short"]
    assert refusal.value.failed[0].threshold == 5.0
    assert 0 < refusal.value.failed[0].measured < 2.5
    assert nothing_is_left(vault)


def test_two_speakers_in_one_enrolment_are_refused(vault, anna, ben):
    with pytest.raises(QualityRefused, match="not_one_speaker"):
        vault.enrol([anna[0], ben[0], ben[1]])
    assert nothing_is_left(vault)


def test_a_number_that_is_none_cannot_be_stored(vault, anna):
    for value in (np.nan, np.inf):
        conditioner = SpectrumConditioner()
        conditioner.measure = lambda samples, out, scratch, value=value: out.fill(value)
        with pytest.raises(ConditioningInvalid):
            vault.enrolling(conditioner=conditioner).enrol(anna, "Anna", vault.grant(Purpose.ENROL, consent=vault.consent))
        with pytest.raises(InvalidSamples):
            vault.enrol([np.full(160_000, value, dtype=np.float32)])
    assert nothing_is_left(vault)


class FailingRegistry:
    def register_voice(self, *_: object, **__: object) -> None:
        raise ConsentUnknown


def test_a_failure_at_the_last_step_leaves_nothing(vault, anna):
    with pytest.raises(ConsentUnknown):
        vault.enrolling(registry=FailingRegistry()).enrol(anna, "Anna", vault.grant(Purpose.ENROL, consent=vault.consent))
    with pytest.raises(ConsentUnknown):
        vault.enrolment.enrol(anna, "Anna", vault.grant(Purpose.ENROL, consent=uuid4()))
    assert nothing_is_left(vault)


def test_only_a_grant_to_enrol_under_a_consent_enrols(vault, anna):
    for grant in (vault.grant(Purpose.ENROL), vault.grant(Purpose.SPEAK), vault.grant(Purpose.READ, consent=vault.consent)):
        with pytest.raises(GrantMismatch):
            vault.enrolment.enrol(anna, "Anna", grant)
    assert nothing_is_left(vault)


def test_the_speaker_matches_and_others_do_not(vault, anna):
    voice = vault.enrol(anna)
    for number in (3, 4):
        assert vault.matching.compare(samples(flac("1998", number)), voice.voice_id, vault.compare(voice)) is Band.MATCH
    for other in ("2033", "2414", "impostors"):
        assert vault.matching.compare(samples(flac(other)), voice.voice_id, vault.compare(voice)) is Band.NO_MATCH
    assert vault.memory.taken == 0


def test_a_probe_without_speech_is_refused_before_anything_opens(vault, anna):
    voice = vault.enrol(anna)
    with pytest.raises(QualityRefused, match="no_speech"):
        vault.matching.compare(np.zeros(48_000, dtype=np.float32), voice.voice_id, vault.compare(voice))


def test_a_grant_to_speak_does_not_compare(vault, anna):
    voice = vault.enrol(anna)
    with pytest.raises(GrantMismatch):
        vault.matching.compare(anna[0], voice.voice_id, vault.speak(voice))


def test_another_model_than_the_voice_was_enrolled_with_is_refused(vault, anna):
    voice = vault.enrol(anna)

    class NextEncoder(type(vault.encoder)):
        model_id = "ge2e/next"

    vault.matching._encoder = NextEncoder()
    with pytest.raises(ModelMismatch):
        vault.matching.compare(anna[0], voice.voice_id, vault.compare(voice))


def test_errors_are_ours_and_have_codes():
    for kind in (EmbeddingInvalid, LockedMemoryExhausted, VoiceprintMissing, SealBroken):
        assert kind.code
        assert kind.fix
        assert str(kind())
    assert issubclass(SealBroken, KeyVaultError)
