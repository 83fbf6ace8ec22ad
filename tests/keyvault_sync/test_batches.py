"""Voices' keys on their way to the other site: who vouches for what, what survives which crash, and what never comes back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
import sqlalchemy
from real_sites import MAIN, Crashed, OneSite, Sites
from sync_world import NOW

from keyvault.errors import KeyNotFound
from keyvault.hsm import KeyName, RingMaster
from keyvault.keys import VoiceKeys
from keyvault.records import RecordMac, Tombstone, WrappedKey
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.batches import Batches
from keyvault.sync.errors import AwaitingSync, PeerUnavailable, SignatureInvalid, StatementMalformed, SyncRefused
from keyvault.sync.messages import Batch, Closing, KeyRow, Taken
from keyvault.sync.statement import Receipt, Signed
from keyvault.tombstones import Tombstones

TWO = RingMaster("main", 2)


def keys_of(site: OneSite, *, receipts: bool = False) -> VoiceKeys:
    return VoiceKeys(site.hsm, KeyStore(), site.journal, RecordMac(site.hsm), receipts=receipts, site=site.name)


def enrol(site: OneSite, count: int = 1) -> list[UUID]:
    voices = [uuid4() for _ in range(count)]
    with site.database.begin() as transaction:
        for voice in voices:
            with keys_of(site).create(transaction, tenant="acme", voice=voice):
                site.rows.kept[voice] = voice.bytes
    return voices


def found(site: OneSite, voice: UUID) -> WrappedKey:
    with site.database.begin() as transaction:
        return keys_of(site).current(transaction, voice)


def synced(site: OneSite, voice: UUID) -> tuple[int, int]:
    key = found(site, voice)
    return key.synced, key.row_version


def change(site: OneSite, voice: UUID, **fields: object) -> WrappedKey:
    """Somebody of this site writes the row anew, as a re-wrap does."""
    with site.database.begin() as transaction:
        keys, old = keys_of(site), KeyStore().key(transaction, found(site, voice).ref.id)
        assert old is not None
        new = replace(old, row_version=old.row_version + 1, **fields)
        new = replace(new, mac=RecordMac(site.hsm).make(new.DOMAIN, *new.fields))
        keys._store.replace_key(transaction, old, new)
    return new


def erase(site: OneSite, voice: UUID) -> Tombstone:
    with site.database.begin() as transaction:
        site.rows.kept.pop(voice, None)
        tombstones = Tombstones(RecordMac(site.hsm), site.journal)
        return tombstones.bury(transaction, voice, "acme", now=site.now, peer_erased_at=None)[0]


def tombstone(site: OneSite, voice: UUID) -> Tombstone | None:
    with site.database.begin() as transaction:
        return Tombstones(RecordMac(site.hsm), site.journal).of(transaction, voice)


def gone(site: OneSite, voice: UUID) -> bool:
    with site.database.begin() as transaction:
        keys = transaction.execute(sqlalchemy.text("SELECT count(*) FROM wrapped_key WHERE voice_id = :v"), {"v": voice}).scalar()
    return keys == 0 and voice not in site.rows.kept


def test_a_voice_is_synced_at_both_sites_once_both_have_signed(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    assert synced(sites.a, voice) == (0, 1)
    assert sites.batches("a").pump().keys == 1
    assert synced(sites.a, voice) == synced(sites.b, voice) == (1, 1)
    assert sites.b.rows.kept[voice] == voice.bytes
    assert not sites.batches("a").pump()
    assert sites.links["b"].calls[-2:] == ["take", "close"]
    mine, theirs = found(sites.a, voice), found(sites.b, voice)
    assert replace(mine, mac=b"") == replace(theirs, mac=b"")
    assert mine.mac != theirs.mac, "each site has a MAC key of its own"


def test_until_then_it_opens_at_neither(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.links["b"].lose = "take"
    with pytest.raises(PeerUnavailable):
        sites.batches("a").pump()
    for site in sites.all.values():
        keys = keys_of(site, receipts=True)
        with site.database.begin() as transaction:
            key = keys.current(transaction, voice)
        with pytest.raises(AwaitingSync):
            keys.open(key, [], lambda: None)
    sites.batches("a").pump()
    for site in sites.all.values():
        keys = keys_of(site, receipts=True)
        with site.database.begin() as transaction:
            key = keys.current(transaction, voice)
        keys.open(key, [], lambda: None)


def test_both_sites_enrol_and_both_send(sites: Sites) -> None:
    voices = [*enrol(sites.a, 3), *enrol(sites.b, 2)]
    assert sites.batches("a", most=2).pump().keys == 3
    assert sites.batches("b").pump().keys == 2
    assert {synced(site, voice) for site in sites.all.values() for voice in voices} == {(1, 1)}
    assert not sites.batches("a").reconcile()


@pytest.mark.parametrize(("side", "most"), [("a", 9), ("b", 9)])
def test_a_batch_cut_off_at_any_durable_write_is_sent_again_and_never_marked_alone(sites: Sites, side: str, most: int) -> None:
    for fuse in itertools.count():
        voices = enrol(sites.a, 2)
        site = sites.all[side]
        site.fuse.left = fuse
        try:
            sites.batches("a").pump()
        except Crashed:
            site.die()
        except PeerUnavailable:
            assert site.node is None
        died, site.fuse.left = site.fuse.left is None, None
        for voice in voices:
            marked = found(sites.a, voice).synced
            with sites.b.database.begin() as transaction:
                there = KeyStore().newest_key(transaction, voice)
            assert there is not None or not marked, "A says so only when B holds it"
        if died:
            site.start()
        sites.batches("b").pump()
        sites.batches("a").pump()
        assert {synced(one, voice) for one in sites.all.values() for voice in voices} == {(1, 1)}
        if not died:
            break
    assert fuse >= 4
    with sites.a.database.begin() as transaction:
        assert sites.a.alive().durable.store.untold_batches(transaction) == {}


def test_a_row_that_changed_meanwhile_is_sent_again(sites: Sites) -> None:
    first, second = enrol(sites.a, 2)
    sent = sites.batches("a")
    take = sent._peer.take

    def slow(batch: bytes) -> bytes:
        reply = take(batch)
        change(sites.a, first)
        return reply

    sent._peer.take = slow
    assert not sent.pump()
    assert synced(sites.a, first) == (0, 2)
    assert synced(sites.a, second) == (0, 1), "one receipt covers all of a batch or nothing of it"
    assert sites.batches("a").pump().keys == 2
    assert synced(sites.a, first) == synced(sites.b, first) == (2, 2)


def test_a_rewrapped_key_goes_on_serving_while_it_is_sent_again(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.batches("a").pump()
    sites.ceremony(TWO)
    sites.coordinator("a").install([TWO])
    old = found(sites.a, voice)
    blob = sites.a.hsm.rewrap(old.blob, MAIN, TWO)
    change(sites.a, voice, ref=replace(old.ref, ring_version=2), blob=blob)
    assert synced(sites.a, voice) == (1, 2)
    assert synced(sites.b, voice) == (1, 1)
    sites.batches("a").pump()
    assert synced(sites.b, voice) == (2, 2)
    assert found(sites.b, voice).ref.ring_version == 2


def test_of_two_different_rows_of_one_version_the_first_sites_stands(sites: Sites) -> None:
    (voice,) = enrol(sites.a)
    sites.batches("a").pump()
    created = NOW - timedelta(days=1)
    change(sites.a, voice, created_at=created)
    change(sites.b, voice, created_at=created - timedelta(days=1))
    refused = sites.batches("b").pump().refused
    assert list(refused.values()) == ["row_changed"]
    assert sites.batches("a").pump().keys == 1
    assert found(sites.b, voice).created_at == created
    assert synced(sites.b, voice) == (2, 2)


class TestRefusedRows:
    def test_a_bad_row_is_named_and_holds_up_no_other(self, sites: Sites) -> None:
        good, forged, refused, foreign = enrol(sites.a, 4)
        with sites.a.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("UPDATE wrapped_key SET tenant = 'evil' WHERE voice_id = :v"), {"v": forged})
        sites.b.rows.refuse.add(refused)
        change(sites.a, foreign, blob=bytes(40))
        with sites.a.database.begin() as transaction:
            ids = {key.voice: key.ref.id for key in KeyStore().key_page(transaction, 9, after=UUID(int=0))}
        pumped = sites.batches("a").pump()
        assert pumped.keys == 1
        expected = {ids[forged]: "record_tampered", ids[refused]: "sync_refused", ids[foreign]: "unwrap_rejected"}
        assert pumped.refused == expected
        assert synced(sites.b, good) == (1, 1)
        for voice in (forged, refused, foreign):
            with sites.b.database.begin() as transaction:
                assert KeyStore().newest_key(transaction, voice) is None

    def test_a_key_that_the_receiving_hsm_opens_as_another_is_refused(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        other = sites.batches("a")
        other._row = lambda transaction, batch, key: KeyRow.of(key, bytes(16), b"")  # type: ignore[method-assign]
        assert list(other.pump().refused.values()) == ["same_key_unproved"]
        assert sites.batches("a").pump().keys == 1
        assert synced(sites.b, voice) == (1, 1)

    def test_a_key_under_a_master_that_only_one_site_holds_is_not_vouched_for(self, sites: Sites) -> None:
        enrol(sites.a)
        sites.b.hsm.forget(MAIN)
        sites.coordinator("a").exchange()
        sites.coordinator("a").repair([MAIN.label])
        assert list(sites.batches("a").pump().refused.values()) == ["key_version_not_found"]

    def test_another_voices_key_id_is_refused(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        sites.batches("a").pump()
        moved = change(sites.a, voice, tenant="evil")
        assert sites.batches("a").pump().refused == {moved.ref.id: "sync_refused"}
        assert found(sites.b, voice).tenant == "acme"


class TestForgery:
    def batch_of(self, sites: Sites, voice: UUID, signer: str = "a", **fields: object) -> bytes:
        key = found(sites.a, voice)
        batches = sites.batches("a")
        with sites.a.database.begin() as transaction:
            sent = batches._batch()
            row = batches._row(transaction, sent.batch, key)
        sent = replace(sent, keys=(row,), **fields)
        hsm = sites.all[signer].hsm
        return Signed.make("a", sent, lambda data: hsm.sign(KeyName.SITE_IDENTITY, data)).encode()

    def test_what_the_other_site_did_not_sign_is_refused(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        with pytest.raises(SignatureInvalid):
            sites.batches("b").take(self.batch_of(sites, voice, signer="b"))
        for field in ({"cluster": "cluster-2"}, {"site": "b"}):
            with pytest.raises(SyncRefused):
                sites.batches("b").take(self.batch_of(sites, voice, **field))
        signed = bytearray(self.batch_of(sites, voice))
        at = bytes(signed).index(voice.bytes)
        signed[at] ^= 1
        with pytest.raises((SignatureInvalid, StatementMalformed)):
            sites.batches("b").take(bytes(signed))
        sites.batches("b").take(self.batch_of(sites, voice))

    def test_rows_that_travel_with_a_voice_are_under_the_writers_signature(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        sites.a.rows.kept[voice] = b"consent: speak"
        sent = self.batch_of(sites, voice)
        with pytest.raises(SignatureInvalid):
            sites.batches("b").take(sent.replace(b"consent: speak", b"consent: shout"))

    def test_a_closing_needs_both_sites_receipts_for_exactly_these_rows(self, sites: Sites) -> None:
        one, other = enrol(sites.a, 2)
        sites.links["b"].lose = "close"
        with pytest.raises(PeerUnavailable):
            sites.batches("a").pump()
        with sites.a.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("SELECT 1"))
            (stored,) = sites.a.alive().durable.store.untold_batches(transaction).values()
        closing = Closing.decode(stored.records)
        change(sites.b, one)
        for bad, error in (
            (replace(closing, receipts=closing.receipts[:1]), AwaitingSync),
            (replace(closing, rows=closing.rows[:1]), StatementMalformed),
            (replace(closing, batch=uuid4()), StatementMalformed),
            (replace(closing, receipts=(closing.receipts[0], self.forged(sites, closing))), SignatureInvalid),
        ):
            with pytest.raises(error):
                sites.batches("b").close(sites.batches("a")._envelopes.sealed(bad))
        sites.batches("b").close(sites.batches("a")._envelopes.sealed(closing))
        assert synced(sites.b, one)[0] == 1, "marked before, and changed since"
        assert synced(sites.b, other) == (1, 1)

    def forged(self, sites: Sites, closing: Closing) -> bytes:
        said = Receipt.decode(Signed.decode(closing.receipts[1]).statement)
        return Signed.make("b", said, lambda data: sites.a.hsm.sign(KeyName.SITE_IDENTITY, data)).encode()

    def test_a_stored_batch_that_was_edited_is_not_told(self, sites: Sites) -> None:
        enrol(sites.a)
        sites.links["b"].lose = "close"
        with pytest.raises(PeerUnavailable):
            sites.batches("a").pump()
        with sites.a.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("UPDATE sync_batch SET created_at = now() WHERE kind = 'keys'"))
            (edited,) = sites.a.alive().durable.store.untold_batches(transaction)
        (other,) = enrol(sites.a)
        done = sites.batches("a").pump()
        assert done.refused[edited] == "record_tampered"
        assert synced(sites.a, other) == (1, 1), "the others are sent all the same"


class TestErasure:
    def test_a_tombstone_erases_at_the_other_site_whose_word_makes_it_whole(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        sites.batches("a").pump()
        assert not gone(sites.b, voice)
        erase(sites.a, voice)
        assert tombstone(sites.a, voice).peer_erased_at is None
        assert sites.batches("a").pump().stones == 1
        for site in sites.all.values():
            assert gone(site, voice)
            assert tombstone(site, voice).peer_erased_at is not None
        assert not sites.batches("a").pump()
        assert not sites.batches("b").pump()

    @pytest.mark.parametrize("side", ["a", "b"])
    def test_an_erasure_cut_off_is_finished(self, sites: Sites, side: str) -> None:
        for fuse in itertools.count():
            (voice,) = enrol(sites.a)
            sites.batches("a").pump()
            erase(sites.a, voice)
            site = sites.all[side]
            site.fuse.left = fuse
            try:
                sites.batches("a").pump()
            except Crashed:
                site.die()
            except PeerUnavailable:
                assert site.node is None
            died, site.fuse.left = site.fuse.left is None, None
            if tombstone(sites.a, voice).peer_erased_at:
                assert gone(sites.b, voice)
            if died:
                site.start()
            sites.batches("a").pump()
            assert gone(sites.b, voice)
            assert tombstone(sites.a, voice).peer_erased_at is not None
            if not died:
                break
        assert fuse == 2

    def test_an_erased_voice_is_never_taken_again(self, sites: Sites) -> None:
        """A key on its way when the other site erased the voice."""
        (voice,) = enrol(sites.a)
        sites.batches("a").pump()
        change(sites.a, voice)
        erase(sites.b, voice)
        assert list(sites.batches("a").pump().refused.values()) == ["voice_erased"]
        assert gone(sites.b, voice)
        sites.batches("b").pump()
        assert gone(sites.a, voice)

    def test_what_both_erased_at_once_is_erased_once(self, sites: Sites) -> None:
        (voice,) = enrol(sites.a)
        sites.batches("a").pump()
        erase(sites.a, voice)
        erase(sites.b, voice)
        sites.batches("a").pump()
        sites.batches("b").pump()
        stones = [tombstone(site, voice) for site in sites.all.values()]
        assert all(stone.peer_erased_at for stone in stones)
        assert not sites.batches("a").pump()

    def test_a_restored_site_learns_of_every_erasure_and_brings_no_voice_back(self, sites: Sites) -> None:
        """The dump is older than the erasure and no transaction came between: the anchor can't tell, the other site can."""
        voice, kept = enrol(sites.a, 2)
        sites.batches("a").pump()
        dump, rows = sites.a.dump(), dict(sites.a.rows.kept)
        erase(sites.a, voice)
        (late,) = enrol(sites.a)
        sites.batches("a").pump()
        sites.a.restore(dump)
        sites.a.rows.kept = rows
        sites.a.start()
        assert not gone(sites.a, voice), "it is back"
        taken = sites.batches("a").reconcile()
        assert gone(sites.a, voice)
        assert taken.stones == 1
        assert synced(sites.a, late)[1] == 1
        assert sites.batches("a").pump().keys == 1
        for site in sites.all.values():
            assert synced(site, late) == synced(site, kept) == (1, 1)
        assert not sites.batches("b").pump()
        assert not sites.batches("a").reconcile()


class TestReconcile:
    def test_a_large_store_is_taken_page_by_page(self, sites: Sites) -> None:
        voices = enrol(sites.a, 5)
        sites.batches("a").pump()
        with sites.b.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("DELETE FROM wrapped_key"))
        sites.b.rows.kept.clear()
        sites.links["a"].calls.clear()
        small = Batches(sites.a.alive(), None, sites.a.rows, most=2)
        real, sites.batches = sites.batches, lambda name, most=100: small if name == "a" else real(name, most)
        assert real("b").reconcile().keys == 5
        assert sites.links["a"].calls.count("page") == 4
        assert {found(sites.b, voice).voice for voice in voices} == set(voices)

    def test_pages_that_do_not_go_on_are_refused(self, sites: Sites) -> None:
        enrol(sites.a, 2)
        sites.batches("a").pump()
        with sites.b.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("DELETE FROM wrapped_key"))
        batches = sites.batches("b")
        page = batches._peer.page("keys", bytes(16))
        batches._peer.page = lambda kind, after: page
        with pytest.raises(StatementMalformed):
            batches.reconcile()

    def test_nothing_is_taken_without_the_other_site(self, sites: Sites) -> None:
        alone = Batches(sites.a.alive(), None, sites.a.rows)
        assert not alone.pump()
        assert not alone.reconcile()


def test_a_batch_has_an_order_and_an_end() -> None:
    row = KeyRow(uuid4(), "t", uuid4(), 1, "main", 1, KeyState.ACTIVE, b"", NOW, 1, 1, bytes(16), b"")
    with pytest.raises(ValueError, match="sorted"):
        Batch("c", "a", uuid4(), (row, row), ())
    rows = tuple(sorted((replace(row, dek_id=uuid4()) for _ in range(101)), key=lambda row: row.dek_id))
    with pytest.raises(ValueError, match="at most 100"):
        Batch("c", "a", uuid4(), rows, ())
    with pytest.raises(ValueError, match="16 bytes"):
        replace(row, tag=b"")
    Taken("c", "a", uuid4(), b"", (), ())


def test_a_missing_voice_is_not_found_at_either_site(sites: Sites) -> None:
    for site in sites.all.values():
        with site.database.begin() as transaction, pytest.raises(KeyNotFound):
            keys_of(site).current(transaction, uuid4())
