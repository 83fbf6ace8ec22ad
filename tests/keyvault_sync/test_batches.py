"""Voices' keys on their way to the other site: who vouches for what, and what survives which crash."""

from __future__ import annotations

from uuid import UUID, uuid4

from real_sites import OneSite, Sites

from keyvault.keys import VoiceKeys
from keyvault.records import RecordMac
from keyvault.store import KeyStore


def keys_of(site: OneSite) -> VoiceKeys:
    return VoiceKeys(site.hsm, KeyStore(), site.journal, RecordMac(site.hsm))


def enrol(site: OneSite, count: int = 1) -> list[UUID]:
    voices = [uuid4() for _ in range(count)]
    with site.database.begin() as transaction:
        for voice in voices:
            with keys_of(site).create(transaction, tenant="acme", voice=voice):
                site.rows.kept[voice] = voice.bytes
    return voices


def synced(site: OneSite, voice: UUID) -> tuple[int, int]:
    with site.database.begin() as transaction:
        key = keys_of(site).current(transaction, voice)
    return key.synced, key.row_version


def test_a_voice_is_synced_at_both_sites_once_both_have_signed(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    assert synced(sites.a, voice) == (0, 1)
    assert sites.batches("a").pump().keys == 1
    assert synced(sites.a, voice) == synced(sites.b, voice) == (1, 1)
    assert sites.b.rows.kept[voice] == voice.bytes
    assert not sites.batches("a").pump()
    assert sites.links["b"].calls[-2:] == ["take", "close"]
