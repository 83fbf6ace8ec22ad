"""An older row put back, with the MAC that was valid then: a revoked client, a withdrawn consent, a suspended or erased voice."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest
import sqlalchemy as sa
from house import House
from sqlalchemy import text as sql

from keyvault.records import KeyRef
from policies import errors
from policies.authority import Role, VoiceTerm
from policies.errors import PolicyError
from policies.grants import Purpose
from policies.quotas import Quota, Scope


def copied(house: House, table: str) -> list[dict]:
    with house.database.connect() as connection:
        return [dict(row) for row in connection.execute(sql(f"SELECT * FROM {table}")).mappings()]


def put_back(house: House, table: str, rows: list[dict]) -> None:
    """What an attacker does who can write this table, or who restores it from a backup."""
    with house.database.begin() as transaction:
        there = sa.Table(table, sa.MetaData(), autoload_with=transaction)
        for row in rows:
            same = sa.and_(*(column == row[column.name] for column in there.primary_key.columns))
            if not transaction.execute(sa.update(there).where(same).values(**row)).rowcount:
                transaction.execute(sa.insert(there).values(**row))


def revoke(house: House, _) -> None:
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "app")


def withdraw(house: House, voice) -> None:
    with house.database.begin() as transaction:
        found = house.store.voice(transaction, "acme", voice)
        house.registry.withdraw_consent(transaction, found.consent_id)


def suspend(house: House, voice) -> None:
    with house.database.begin() as transaction:
        house.registry.suspend_voice(transaction, "acme", voice)


def forget(house: House, voice) -> None:
    with house.database.begin() as transaction:
        house.store.forget_voice(transaction, voice)


@pytest.mark.parametrize(("table", "change"), [("client", revoke), ("consent", withdraw), ("voice", suspend), ("voice", forget)])
def test_an_older_row_put_back_opens_nothing(house: House, table, change):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    before = copied(house, table)
    change(house, voice)
    with pytest.raises(PolicyError):
        house.gate.admit(house.call(device, call.token, Purpose.SPEAK, voice))
    put_back(house, table, before)
    assert copied(house, table) == before
    for attempt in (lambda: house.gate.admit(call), lambda: house.token(device, Purpose.SPEAK, voice)):
        with pytest.raises(errors.AuthorityRowTampered) as refused:
            attempt()
        assert refused.value.detail == f"{table}: put back"
    assert house.count("used_token") == 0


def other_roles(house: House, _) -> None:
    with house.database.begin() as transaction:
        house.registry.change_roles(transaction, "app", [Role.READER])


def bearer(house: House, voice) -> None:
    with house.database.begin() as transaction:
        house.registry.set_voice_terms(transaction, voice, [VoiceTerm.BEARER])


@pytest.mark.parametrize(
    ("table", "change", "then"), [("client", revoke, other_roles), ("consent", withdraw, withdraw), ("voice", suspend, bearer)]
)
def test_nothing_is_written_upon_an_older_row_put_back(house: House, table, change, then):
    voice = house.voice()
    house.client()
    before = copied(house, table)
    change(house, voice)
    put_back(house, table, before)
    with pytest.raises(errors.AuthorityRowTampered) as refused:
        then(house, voice)
    assert refused.value.detail == f"{table}: put back"
    assert copied(house, table) == before


def read_client(house: House, transaction, voice) -> None:
    house.store.client(transaction, "app")


def read_clients(house: House, transaction, voice) -> None:
    house.store.clients(transaction)


def read_voices(house: House, transaction, voice) -> None:
    house.store.voices(transaction, "acme")


def read_voice_by_its_key(house: House, transaction, voice) -> None:
    house.store.voice_anywhere(transaction, voice)


def enrol_under_the_consent(house: House, transaction, voice) -> None:
    found = house.store.voice(transaction, "acme", voice)
    key = KeyRef(uuid4(), 1, "main", 1)
    house.registry.register_voice(transaction, voice_id=uuid4(), tenant="acme", name="two", consent_id=found.consent_id, key=key)


@pytest.mark.parametrize(
    ("table", "change", "read"),
    [
        ("client", revoke, read_client),
        ("client", revoke, read_clients),
        ("voice", suspend, read_voices),
        ("voice", suspend, read_voice_by_its_key),
        ("consent", withdraw, enrol_under_the_consent),
    ],
)
def test_nobody_is_shown_an_older_row_put_back(house: House, table, change, read):
    """Also after the gate: a consent that is withdrawn meanwhile and put back lets nobody enrol."""
    voice = house.voice()
    house.client()
    before = copied(house, table)
    change(house, voice)
    put_back(house, table, before)
    with pytest.raises(errors.AuthorityRowTampered) as refused, house.database.begin() as transaction:
        read(house, transaction, voice)
    assert refused.value.detail == f"{table}: put back"


def test_the_control_the_same_row_written_again_opens(house: House):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    for table in ("client", "consent", "voice"):
        put_back(house, table, copied(house, table))
    house.gate.admit(call)


def test_a_larger_quota_put_back_opens_nothing(house: House):
    device, voice = house.client(), house.voice()
    large = Quota(Scope.CLIENT, "app", 10**6, 10**6, 10**6, 10**6, row_version=1)
    with house.database.begin() as transaction:
        house.store.insert(transaction, large)
    before = copied(house, "quota")
    with house.database.begin() as transaction:
        house.store.swap(transaction, large, replace(large, characters=0))
    put_back(house, "quota", before)
    with pytest.raises(errors.AuthorityRowTampered):
        house.token(device, Purpose.SPEAK, voice)


def test_a_row_that_was_changed_often_counts_as_it_is_now(house: House):
    device, voice = house.client(), house.voice()
    for _ in range(12):
        with house.database.begin() as transaction:
            found = house.store.voice(transaction, "acme", voice)
            house.store.swap(transaction, found, replace(found, name=found.name + "."))
    house.gate.admit(house.speech(device, voice))


def test_a_change_that_the_list_does_not_keep_is_not_made(house: House):
    voice = house.voice()
    house.edit("CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    house.edit("CREATE TRIGGER lose BEFORE INSERT ON authority_change FOR EACH ROW EXECUTE FUNCTION lose()")
    with pytest.raises(errors.RowChanged):
        suspend(house, voice)
    house.edit("DROP TRIGGER lose ON authority_change")
    suspend(house, voice)
