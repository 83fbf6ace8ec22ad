"""Receipts go once later ones of both sites stand in for them, and never while anything rests on them."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
import sqlalchemy
from real_sites import MAIN, OneSite, Sites
from test_batches import change, enrol, erase, found, keys_of
from test_coordinator import TWO, rotate

from keyvault.records import RecordMac
from keyvault.sync.errors import PeerUnavailable
from keyvault.sync.pruning import FIRST, Pruning
from keyvault.tombstones import Tombstones


def kept(site: OneSite, kind: str = "keys") -> int:
    with site.database.begin() as transaction:
        query = sqlalchemy.text("SELECT count(*) FROM sync_batch WHERE kind LIKE :kind")
        return int(transaction.execute(query, {"kind": f"{kind}%"}).scalar() or 0)


def pruned(site: OneSite) -> int:
    return Pruning(site.alive().parts).prune().removed


def rewrap(site: OneSite, voice: UUID) -> None:
    old = found(site, voice)
    change(site, voice, ref=replace(old.ref, ring_version=2), blob=site.hsm.rewrap(old.blob, MAIN, TWO))


def rekey(site: OneSite, voice: UUID) -> None:
    with site.database.begin() as transaction:
        with keys_of(site).create(transaction, tenant="acme", voice=voice) as made:
            pass
        Tombstones(RecordMac(site.hsm), site.journal).retire_older(transaction, voice, made.ref.version)


def test_a_batch_goes_when_both_signed_for_all_of_its_keys_again(sites: Sites) -> None:
    first, second = enrol(sites.a, 2)
    sites.batches("a").pump()
    rotate(sites, TWO)
    rewrap(sites.a, first)
    assert pruned(sites.a) == 0, "the re-wrapped row is not signed for yet"
    sites.batches("a").pump()
    assert [pruned(site) for site in sites.all.values()] == [0, 0], "the other key of the batch rests on it"
    rewrap(sites.a, second)
    sites.batches("a").pump()
    assert [kept(site) for site in sites.all.values()] == [3, 3]
    assert [pruned(site) for site in sites.all.values()] == [1, 1]
    assert [pruned(site) for site in sites.all.values()] == [0, 0]
    assert [kept(site) for site in sites.all.values()] == [2, 2]
    assert sites.a.journal.of("sync.receipts_pruned") == [{"site": "a", "batches": 1}]
    for site in sites.all.values():
        for voice in (first, second):
            key = found(site, voice)
            assert key.synced == key.row_version == 2
    assert not sites.batches("a").pump()


def test_an_untold_batch_stays(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.links["b"].lose = "close"
    with pytest.raises(PeerUnavailable):
        sites.batches("a").pump()
    rekey(sites.a, voice)
    assert pruned(sites.a) == 0
    sites.batches("a").pump()
    assert [pruned(site) for site in sites.all.values()] == [1, 1]


def test_a_new_key_stands_in_for_the_old_one_once_both_signed_for_it(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.batches("a").pump()
    rekey(sites.a, voice)
    assert pruned(sites.a) == 0
    sites.batches("a").pump()
    assert [pruned(site) for site in sites.all.values()] == [1, 1]
    assert [kept(site) for site in sites.all.values()] == [1, 1]


def test_an_erasure_takes_the_receipts_once_both_sites_erased(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.batches("a").pump()
    erase(sites.a, voice)
    assert pruned(sites.a) == 0
    sites.batches("a").pump()
    assert [pruned(site) for site in sites.all.values()] == [1, 1]
    assert kept(sites.a, "tombstones") == 1, "the other site's word on the erasure stays"


def test_a_key_that_vanished_keeps_its_receipt_and_so_does_one_whose_row_was_written_by_hand(sites: Sites) -> None:
    enrol(sites.a)
    enrol(sites.a)
    sites.batches("a", most=1).pump()
    with sites.a.database.begin() as transaction:
        transaction.execute(
            sqlalchemy.text("DELETE FROM wrapped_key WHERE dek_id = (SELECT min(dek_id::text)::uuid FROM wrapped_key)")
        )
        transaction.execute(sqlalchemy.text("UPDATE wrapped_key SET synced = 9, row_version = 9"))
    assert pruned(sites.a) == 0
    assert kept(sites.a) == 2


def test_pages_go_on_and_a_batch_that_was_edited_is_named_and_stays(sites: Sites) -> None:
    voices = enrol(sites.a, 5)
    sites.batches("a", most=1).pump()
    for voice in voices:
        erase(sites.a, voice)
    sites.batches("a").pump()
    with sites.a.database.begin() as transaction:
        last = "SELECT max(batch::text)::uuid FROM sync_batch WHERE kind = 'keys-told'"
        query = f"UPDATE sync_batch SET created_at = now() WHERE batch = ({last}) RETURNING batch"
        edited = transaction.execute(sqlalchemy.text(query)).scalar()
    pruning, after, removed, tampered = Pruning(sites.a.alive().parts), FIRST, 0, []
    while after is not None:
        done = pruning.prune(after, 2)
        removed, after = removed + done.removed, done.after
        tampered += done.tampered
    assert (removed, tampered, kept(sites.a)) == (4, [edited], 1)
