"""Who may call, and what was withdrawn, is known at both sites at once: signed, each row once, and no older one brought back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy
from fresh_databases import FreshDatabases
from real_sites import OneSite, Sites

from keyvault.hsm import KeyName
from keyvault.records import KeyRef, RecordMac
from keyvault.sync.errors import PeerUnavailable, SignatureInvalid, SyncRefused
from keyvault.sync.messages import RowChange, RowChanges
from keyvault.sync.rows import Rows
from keyvault.sync.statement import Signed
from policies.authority import Client, ClientState, Role, Voice, VoiceState, VoiceTerm, key_alone
from policies.consent import Consent, ConsentState
from policies.errors import AuthorityRowTampered
from policies.registry import Registry
from policies.store import PolicyStore, durable
from policies.unsent.store import BEGINNING, Unsent, waiting
from service.authority_rows import AuthorityRows
from service.replication import CLIENT, VoiceRows


@pytest.fixture(scope="module")
def founded(databases: FreshDatabases) -> Iterator[Sites]:
    with databases.one(pool_size=4) as one, databases.one(pool_size=4) as other:
        yield Sites({"a": one, "b": other})


@pytest.fixture
def sites(founded: Sites) -> Sites:
    """Two sites that agree, and nobody registered yet: founding them takes longer than most of these tests."""
    for site in founded.all.values():
        site.journal.events.clear()
        with site.database.begin() as transaction:
            transaction.execute(sqlalchemy.text("TRUNCATE client, consent, voice, authority_change, authority_unsent"))
    return founded


class Desk:
    """What one site's operator and enrolments write."""

    def __init__(self, site: OneSite) -> None:
        self.site, self.store = site, PolicyStore(RecordMac(site.hsm))
        self.registry = Registry(self.store, lambda: datetime.now(UTC).timestamp())

    def register(self, name: str = "studio", tenant: str = "acme", x5t: str | None = None) -> Client:
        with self.site.database.begin() as transaction:
            made = {"client_id": name, "tenant": tenant, "cert_sha256": x5t or f"x5t-{name}", "jkt": f"jkt-{name}"}
            return self.registry.register_client(transaction, **made, roles=[Role.SPEAKER])

    def rotate(self, name: str = "studio", key: str = "new") -> Client:
        with self.site.database.begin() as transaction:
            return self.registry.rotate_client(transaction, name, cert_sha256=f"x5t-{key}", jkt=f"jkt-{key}")

    def revoke(self, name: str = "studio") -> Client:
        with self.site.database.begin() as transaction:
            return self.registry.revoke_client(transaction, name)

    def client(self, name: str = "studio") -> Client | None:
        with self.site.database.begin() as transaction:
            return self.store.client(transaction, name)

    def enrol(self) -> Voice:
        with self.site.database.begin() as transaction:
            terms = {"purposes": ["speak"], "territory": ["*"], "expires_at": datetime.now(UTC) + timedelta(days=9)}
            consent = self.registry.record_consent(transaction, tenant="acme", subject="Ann", **terms, evidence="signed")
            key = KeyRef(uuid4(), 1, "main", 1)
            return self.registry.register_voice(
                transaction, voice_id=uuid4(), tenant="acme", name="Ann", consent_id=consent.consent_id, key=key
            )

    def rows(self, voice: Voice) -> tuple[Voice | None, Consent | None]:
        with self.site.database.begin() as transaction:
            return self.store.voice_anywhere(transaction, voice.voice_id), self.store.consent(transaction, voice.consent_id)

    def list(self) -> list[Unsent]:
        with self.site.database.begin() as transaction:
            return waiting(transaction, BEGINNING, 1000)


def desks(sites: Sites) -> tuple[Desk, Desk]:
    return Desk(sites.a), Desk(sites.b)


def shipped(a: Desk, b: Desk, voice: Voice) -> None:
    """The voice's rows arrive with its key."""
    with a.site.database.begin() as transaction:
        rows = VoiceRows(a.store, None).rows_of(transaction, voice.voice_id)  # type: ignore[arg-type]
    with b.site.database.begin() as transaction:
        VoiceRows(b.store, None).take(transaction, voice.voice_id, rows)  # type: ignore[arg-type]


def test_a_client_is_registered_rotated_and_revoked_at_both_sites(sites: Sites) -> None:
    a, b = desks(sites)
    for change in (a.register, a.rotate, a.revoke):
        written = change()
        sent = sites.authority_rows("a").send()
        assert (sent.rows, sent.refused) == (1, {})
        assert a.client() == b.client() == written
        assert not sites.authority_rows("a").send().rows, "once is enough"
        assert not b.list(), "and nothing comes back"
    assert b.client().state is ClientState.REVOKED  # type: ignore[union-attr]
    assert [facts["state"] for facts in sites.b.journal.of("sync.row_taken")] == ["active", "active", "revoked"]


def test_each_site_keeps_them_under_a_mac_of_its_own(sites: Sites) -> None:
    a, b = desks(sites)
    a.register()
    sites.authority_rows("a").send()
    macs = []
    for desk in (a, b):
        with desk.site.database.begin() as transaction:
            macs.append(transaction.execute(sqlalchemy.text("SELECT mac FROM client")).scalar())
    assert macs[0] != macs[1]


def test_a_client_that_was_revoked_stays_so_though_the_other_site_gave_it_new_keys_and_the_first_is_dead(sites: Sites) -> None:
    a, b = desks(sites)
    a.register()
    sites.authority_rows("a").send()
    a.revoke()
    b.rotate(key="one")
    b.rotate(key="two")
    sites.authority_rows("a").send()
    sites.a.die()
    assert (b.client().state, b.client().jkt) == (ClientState.REVOKED, "jkt-two")  # type: ignore[union-attr]
    sites.a.start()
    sites.authority_rows("b").send()
    sites.authority_rows("a").send()
    assert a.client() == b.client()
    assert not a.list()
    assert not b.list()


def test_consent_withdrawn_and_voice_suspended_reach_the_other_site_without_the_key(sites: Sites) -> None:
    a, b = desks(sites)
    voice = a.enrol()
    shipped(a, b, voice)
    sites.authority_rows("a").send()
    with a.site.database.begin() as transaction:
        suspended = a.registry.suspend_voice(transaction, "acme", voice.voice_id)
        withdrawn = a.registry.withdraw_consent(transaction, voice.consent_id)
    assert sites.authority_rows("a").send().rows == 2
    assert b.rows(voice) == (suspended, withdrawn)
    assert (suspended.state, withdrawn.state) == (VoiceState.SUSPENDED, ConsentState.WITHDRAWN)


def test_a_voices_terms_travel_but_not_ahead_of_its_new_key(sites: Sites) -> None:
    a, b = desks(sites)
    voice = a.enrol()
    shipped(a, b, voice)
    with a.site.database.begin() as transaction:
        termed = a.registry.set_voice_terms(transaction, voice.voice_id, [VoiceTerm.LIVENESS])
    sites.authority_rows("a").send()
    assert b.rows(voice)[0] == termed
    with a.site.database.begin() as transaction:
        resealed = a.store.swap(transaction, termed, replace(termed, dek_id=uuid4(), key_version=2))
    sites.authority_rows("a").send()
    assert b.rows(voice)[0] == termed, "the row with the new key comes with the key"
    with a.site.database.begin() as transaction:
        a.registry.suspend_voice(transaction, "acme", voice.voice_id)
    sites.authority_rows("a").send()
    assert b.rows(voice)[0] == replace(termed, state=VoiceState.SUSPENDED, row_version=termed.row_version + 1)
    shipped(a, b, voice)
    assert b.rows(voice)[0].dek_id == resealed.dek_id  # type: ignore[union-attr]
    assert b.rows(voice)[0].state is VoiceState.SUSPENDED  # type: ignore[union-attr]


def test_a_voice_whose_key_is_not_there_yet_waits_and_holds_nothing_up(sites: Sites) -> None:
    a, b = desks(sites)
    voice = a.enrol()
    with a.site.database.begin() as transaction:
        a.registry.suspend_voice(transaction, "acme", voice.voice_id)
    a.register()
    sent = sites.authority_rows("a", most=1).send()
    assert sent.refused == {f"voice {voice.voice_id}": "sync_refused"}
    assert b.client() is not None
    shipped(a, b, voice)
    assert not sites.authority_rows("a").send().refused
    assert not a.list()


def test_an_erased_voice_leaves_the_list(sites: Sites) -> None:
    a, _ = desks(sites)
    voice = a.enrol()
    with a.site.database.begin() as transaction:
        a.registry.suspend_voice(transaction, "acme", voice.voice_id)
        a.store.forget_voice(transaction, voice.voice_id)
    sites.authority_rows("a").send()
    assert not a.list()


def test_another_tenants_client_of_that_name_and_a_certificate_that_is_taken_are_refused(sites: Sites) -> None:
    a, b = desks(sites)
    b.register("studio", "other")
    b.register("other", x5t="x5t-same")
    a.register("studio", "acme", x5t="x5t-acme")
    a.register("mine", x5t="x5t-same")
    a.register("well")
    sent = sites.authority_rows("a").send()
    assert sent.refused == dict.fromkeys(("client mine", "client studio"), "sync_refused")
    assert b.client("studio").tenant == "other"  # type: ignore[union-attr]
    assert (b.client("mine"), b.client("well")) == (None, a.client("well"))


def test_a_key_that_is_a_browsers_here_comes_with_no_client_from_there(sites: Sites) -> None:
    a, b = desks(sites)
    with durable(b.site.database) as transaction:
        browser = Client("page", "acme", key_alone("jkt-studio"), "jkt-studio", (Role.READER,), ClientState.ACTIVE, 1)
        b.store.insert(transaction, browser)
    a.register()
    assert sites.authority_rows("a").send().refused == {"client studio": "sync_refused"}
    assert b.client() is None
    sent = sites.authority_rows("b").send()
    assert sent.refused == {"client page": "sync_refused"}
    a.revoke()
    assert not sites.authority_rows("a").send().refused, "revoked, it lets nobody in"


def test_what_was_lost_on_the_way_is_told_again(sites: Sites) -> None:
    a, b = desks(sites)
    a.register()
    sites.links["b"].lose = "take_rows"
    with pytest.raises(PeerUnavailable):
        sites.authority_rows("a").send()
    assert b.client() == a.client()
    assert sites.authority_rows("a").send().rows == 1
    assert not a.list()


def test_a_message_played_again_brings_no_old_row_back(sites: Sites) -> None:
    a, b = desks(sites)
    a.register()
    heard: list[bytes] = []
    link = sites.links["b"]
    call = link.call
    link.call = lambda method, message: heard.append(message) or call(method, message)  # type: ignore[method-assign,func-returns-value]
    sites.authority_rows("a").send()
    a.revoke()
    sites.authority_rows("a").send()
    link.call = call  # type: ignore[method-assign]
    for message in heard:
        call("take_rows", message)
    assert b.client().state is ClientState.REVOKED  # type: ignore[union-attr]


def test_only_the_other_sites_hsm_can_say_so(sites: Sites) -> None:
    a, b = desks(sites)
    row = RowChange("client", "mallory", 1, CLIENT.encode(replace(a.register(), client_id="mallory")))
    rows = sites.authority_rows("b")

    def said(site: str, signer: OneSite, cluster: str = "cluster-1") -> bytes:
        statement = RowChanges(cluster, site, uuid4(), (row,))
        return Signed.make(site, statement, lambda data: signer.hsm.sign(KeyName.SITE_IDENTITY, data)).encode()

    with pytest.raises(SignatureInvalid):
        rows.take_rows(said("a", sites.b))
    for foreign in (said("b", sites.b), said("a", sites.a, "cluster-2")):
        with pytest.raises(SyncRefused):
            rows.take_rows(foreign)
    assert b.client("mallory") is None
    rows.take_rows(said("a", sites.a))
    assert b.client("mallory") is not None, "the control: from the other site it is taken"


def test_a_row_that_somebody_wrote_into_the_database_or_put_back_does_not_travel(sites: Sites) -> None:
    a, b = desks(sites)
    a.register()
    with a.site.database.begin() as transaction:
        [before] = transaction.execute(sqlalchemy.text("SELECT * FROM client")).mappings().all()
    a.revoke()
    sites.authority_rows("a").send()
    put = "UPDATE client SET state = :state, row_version = :row_version, mac = :mac"
    for fields in (before, {**before, "row_version": 7}):
        with a.site.database.begin() as transaction:
            transaction.execute(sqlalchemy.text(put), dict(fields))
            transaction.execute(
                sqlalchemy.text("INSERT INTO authority_unsent VALUES ('client', 'studio', 9) ON CONFLICT DO NOTHING")
            )
        assert sites.authority_rows("a").send().refused == {"client studio": "sync_refused"}
    assert b.client().state is ClientState.REVOKED  # type: ignore[union-attr]
    with pytest.raises(AuthorityRowTampered):
        a.client()


def test_a_site_that_lost_its_rows_or_its_list_is_told_everything(sites: Sites) -> None:
    a, b = desks(sites)
    a.register("one")
    a.register("two")
    b.register("three")
    for name in "ab":
        sites.authority_rows(name).send()
    with b.site.database.begin() as transaction:
        transaction.execute(sqlalchemy.text("DELETE FROM client WHERE client_id IN ('one', 'two')"))
    with a.site.database.begin() as transaction:
        a.registry.revoke_client(transaction, "two")
        transaction.execute(sqlalchemy.text("DELETE FROM authority_unsent"))
    sites.authority_rows("b").reconcile()
    assert [row.key for row in a.list()] == ["one", "three", "two"]
    sites.authority_rows("a").send()
    assert [b.client(name) for name in ("one", "two")] == [a.client(name) for name in ("one", "two")]
    sites.authority_rows("b").reconcile()
    assert not a.list(), "where both hold the same, nothing is sent"


def test_with_one_site_nothing_is_sent_and_the_list_waits_for_the_second(sites: Sites) -> None:
    a, _ = desks(sites)
    a.register()
    alone = Rows(sites.a.alive(), None, AuthorityRows(a.store))
    alone.reconcile()
    assert not alone.send().rows
    assert [row.key for row in a.list()] == ["studio"]
