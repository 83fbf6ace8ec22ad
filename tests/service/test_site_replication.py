"""What travels with a voice arrives whole, under the taker's own MAC, and never makes a stricter row laxer."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from fakes import FakeHsm

from keyvault.records import RecordMac
from keyvault.sync.errors import StatementMalformed, SyncRefused
from policies.audit.details import Details
from policies.authority import Voice, VoiceState
from policies.consent import Consent, ConsentState
from policies.errors import AuthorityRowTampered
from policies.store import PolicyStore
from service.replication import VoiceRows
from voiceprints.store import RowKind, SealedRow, VoiceprintStore

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


def a_consent(tenant: str = "t", **changes) -> Consent:
    made = Consent(
        uuid4(), tenant, "Ann", ("compare", "speak"), ("*",), NOW + timedelta(days=9), "e" * 64, ConsentState.ACTIVE, NOW, 1
    )
    return replace(made, **changes)


def a_voice(consent: Consent, **changes) -> Voice:
    made = Voice(uuid4(), consent.tenant, "Ann", consent.consent_id, VoiceState.ACTIVE, uuid4(), 1, NOW, 1)
    return replace(made, **changes)


def sealed(voice: Voice, content: bytes = b"sealed") -> list[SealedRow]:
    about = (voice.tenant, voice.dek_id, voice.key_version, "model")
    return [SealedRow(voice.voice_id, kind, *about, content, NOW) for kind in RowKind]


@pytest.fixture
def sites(database):
    """Two sites with record MAC keys of their own. They share one database here, one after the other: see `moved`."""
    return PolicyStore(RecordMac(FakeHsm())), PolicyStore(RecordMac(FakeHsm()))


def written(database, store: PolicyStore, consent: Consent, voice: Voice, content: bytes = b"sealed") -> bytes:
    with database.begin() as transaction:
        store.insert(transaction, consent)
        store.insert(transaction, voice)
        VoiceprintStore().add(transaction, sealed(voice, content))
        return VoiceRows(store, Details(FakeHsm())).rows_of(transaction, voice.voice_id)


def emptied(database) -> None:
    with database.begin() as transaction:
        transaction.exec_driver_sql("TRUNCATE voiceprint, voice, consent")


def taken(database, store: PolicyStore, voice: UUID, rows: bytes) -> None:
    with database.begin() as transaction:
        VoiceRows(store, Details(FakeHsm())).take(transaction, voice, rows)


def read(database, store: PolicyStore, voice: Voice) -> tuple[Voice | None, Consent | None, list[bytes]]:
    with database.begin() as transaction:
        rows = [row.sealed for row in VoiceprintStore().rows(transaction, voice.voice_id)]
        return store.voice_anywhere(transaction, voice.voice_id), store.consent(transaction, voice.consent_id), rows


def test_a_voice_arrives_whole_and_under_the_takers_own_mac(database, sites):
    a, b = sites
    consent = a_consent()
    voice = a_voice(consent)
    rows = written(database, a, consent, voice)
    emptied(database)
    taken(database, b, voice.voice_id, rows)
    taken(database, b, voice.voice_id, rows)
    assert read(database, b, voice) == (voice, consent, [b"sealed", b"sealed"])
    with pytest.raises(AuthorityRowTampered):
        read(database, a, voice)


def test_what_is_stricter_here_stays_and_what_is_newer_there_comes(database, sites):
    a, b = sites
    consent = a_consent()
    voice = a_voice(consent)
    old = written(database, a, consent, voice)
    emptied(database)
    withdrawn = replace(consent, state=ConsentState.WITHDRAWN, row_version=2)
    suspended = replace(voice, state=VoiceState.SUSPENDED, row_version=2)
    strict = written(database, b, withdrawn, suspended)
    taken(database, b, voice.voice_id, old)
    assert read(database, b, voice)[:2] == (suspended, withdrawn)

    emptied(database)
    written(database, b, replace(consent, row_version=2), replace(voice, row_version=2))
    taken(database, b, voice.voice_id, strict)
    assert read(database, b, voice)[:2] == (suspended, withdrawn)


def test_a_new_key_for_a_voice_brings_its_new_rows(database, sites):
    a, b = sites
    consent = a_consent()
    voice = a_voice(consent)
    resealed = replace(voice, dek_id=uuid4(), key_version=2, row_version=2)
    new = written(database, a, consent, resealed, b"newly sealed")
    emptied(database)
    written(database, b, consent, voice)
    taken(database, b, voice.voice_id, new)
    assert read(database, b, voice) == (resealed, consent, [b"newly sealed", b"newly sealed"])


def test_rows_that_do_not_belong_together_are_refused_and_nothing_is_kept(database, sites):
    a, b = sites
    consent = a_consent()
    voice = a_voice(consent)
    rows = written(database, a, consent, voice)
    emptied(database)
    with pytest.raises(SyncRefused, match="another voice"):
        taken(database, b, uuid4(), rows)
    with pytest.raises(StatementMalformed):
        taken(database, b, voice.voice_id, rows[:-1])
    written(database, b, replace(consent, tenant="other"), replace(voice, tenant="other", consent_id=consent.consent_id))
    with pytest.raises(SyncRefused, match="another tenant"):
        taken(database, b, voice.voice_id, rows)
    assert read(database, b, voice)[0].tenant == "other"


def test_a_row_of_a_foreign_key_is_malformed(database, sites):
    a, _ = sites
    consent = a_consent()
    voice = a_voice(consent)
    with database.begin() as transaction:
        a.insert(transaction, consent)
        a.insert(transaction, voice)
        VoiceprintStore().add(transaction, sealed(replace(voice, dek_id=uuid4())))
        with pytest.raises(ValueError, match="under its key"):
            VoiceRows(a, Details(FakeHsm())).rows_of(transaction, voice.voice_id)


def test_an_erased_voice_leaves_no_rows_but_the_consent(database, sites):
    _, b = sites
    consent = a_consent()
    voice = a_voice(consent)
    written(database, b, consent, voice)
    for _ in range(2):
        with database.begin() as transaction:
            VoiceRows(b, Details(FakeHsm())).drop(transaction, voice.voice_id)
    assert read(database, b, voice) == (None, consent, [])
    with database.begin() as transaction:
        assert VoiceRows(b, Details(FakeHsm())).rows_of(transaction, voice.voice_id) == b""
