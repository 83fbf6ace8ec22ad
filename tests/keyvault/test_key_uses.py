"""Every use of every key from every place: what the table names works, and for anything else the token sees no call."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import anyio.to_thread
import pytest
from fakes import FakeHsm
from hsm_fixtures import ServingToken
from sqlalchemy import Engine, text

from keyvault.errors import KeyNotFound, KeyUseRefused, SealBroken
from keyvault.events import KeyEvent
from keyvault.guarded_hsm import USE_REFUSED, GuardedHsm
from keyvault.hsm import VERSIONED, KeyName, RingMaster, SiteHsm
from keyvault.key_uses import RING_MASTER, SYNC_ANCHOR, USES, Place, Use, acting, allowed
from keyvault.pkcs11_names import Mechanism
from keyvault.templates import KEYS
from policies.audit.store import AuditStore
from service.key_events import KeyEventRecorder
from service.vault.hsm_events import HsmEvents

MASTER = RingMaster("main", 1)
KEYS_IN_TOKENS = (*KeyName, RING_MASTER, SYNC_ANCHOR)


class Spied(FakeHsm):
    """Counts every call that reaches the token."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_") and name not in ("install", "forget", "twin", "plant_anchor"):
            object.__getattribute__(self, "calls").append(name)
        return found


def wrapped(hsm: FakeHsm) -> bytes:
    with hsm.new_dek(MASTER) as dek:
        return dek.wrapped


def asks(key: str, use: Use, blob: bytes) -> list[Callable[[SiteHsm], object]]:
    """Every method by which this may be asked for; none where no method has such a key."""
    of_masters: dict[Use, list[Callable[[SiteHsm], object]]] = {
        Use.WRAP: [lambda hsm: hsm.new_dek(MASTER).__enter__()],
        Use.OPEN: [lambda hsm: hsm.open_dek(MASTER, blob).__enter__()],
        Use.REWRAP: [lambda hsm: hsm.rewrap(blob, MASTER, MASTER), lambda hsm: hsm.rewrap_many([blob], MASTER, MASTER)],
        Use.PROVE: [
            lambda hsm: hsm.new_canary(MASTER).__enter__(),
            lambda hsm: hsm.open_canary(MASTER, blob).__enter__(),
            lambda hsm: hsm.dek_mac(MASTER, blob, b"x"),
        ],
        Use.DESTROY: [lambda hsm: hsm.destroy_master(MASTER)],
    }
    if key == RING_MASTER:
        return of_masters.get(use, [])
    if key == SYNC_ANCHOR:
        return [lambda hsm: hsm.replace_anchors(b"anchor")] if use is Use.WRITE else []
    name = KeyName(key)
    of_keys: dict[Use, list[Callable[[SiteHsm], object]]] = {
        Use.MAC: [lambda hsm: hsm.mac(name, b"x"), lambda hsm: hsm.mac_many(name, [b"x"])],
        Use.SIGN: [lambda hsm: hsm.sign(name, b"x"), lambda hsm: hsm.sign(name, b"x", 2)],
        Use.SEAL: [lambda hsm: hsm.seal(name, b"x", b"")],
        Use.UNSEAL: [lambda hsm: hsm.unseal(name, bytes(40), b"")],
        Use.MAKE: [lambda hsm: hsm.make_signer(name, 3)],
        Use.DESTROY: [lambda hsm: hsm.destroy_signer(name, 3)],
    }
    return of_keys.get(use, [])


@pytest.mark.parametrize("key", KEYS_IN_TOKENS)
def test_what_the_table_does_not_name_never_reaches_the_token(key: str) -> None:
    for place in Place:
        for use in Use:
            if allowed(key, use, place):
                continue
            hsm, heard = Spied(), list[KeyEvent]()
            blob = wrapped(hsm)
            hsm.calls.clear()
            guarded = GuardedHsm(hsm, place, heard.append)
            for ask in asks(key, use, blob):
                for _ in range(2):
                    with pytest.raises(KeyUseRefused):
                        ask(guarded)
            assert hsm.calls == []
            facts = {"key": str(key), "use": use.value, "place": place.value}
            assert heard == ([KeyEvent(USE_REFUSED, facts)] if asks(key, use, blob) else []), "one event, not one each time"


@pytest.mark.parametrize("key", KEYS_IN_TOKENS)
def test_what_the_table_names_reaches_the_token(key: str) -> None:
    for use, places in USES[key].items():
        assert places, f"{key}: {use} from nowhere is no entry"
        for place in places:
            hsm = Spied()
            blob = wrapped(hsm)
            guarded = GuardedHsm(hsm, place, _never)
            assert asks(key, use, blob), f"no method does {use} with {key}"
            for ask in asks(key, use, blob):
                hsm.calls.clear()
                with suppress(KeyNotFound, SealBroken):  # no such version, or nothing sealed: it was asked
                    ask(guarded)
                assert hsm.calls


@pytest.mark.parametrize("place", Place)
def test_a_stored_key_is_opened_only_where_both_keys_that_it_takes_may_be_used(place: Place) -> None:
    hsm, heard = Spied(), list[KeyEvent]()
    blob, guarded = wrapped(hsm), GuardedHsm(hsm, place, heard.append)
    hsm.calls.clear()
    if allowed(RING_MASTER, Use.OPEN, place) and allowed(KeyName.RECORD_MAC, Use.MAC, place):
        guarded.open_recorded(MASTER, blob, [], b"the row", lambda _: None)
        assert hsm.calls
    else:
        with pytest.raises(KeyUseRefused):
            guarded.open_recorded(MASTER, blob, [], b"the row", lambda _: None)
        assert (hsm.calls, len(heard)) == ([], 1)


def test_every_key_has_an_entry_that_fits_its_mechanism() -> None:
    """A new key without an entry fails here; so does one that is to do what its template does not let it."""
    assert set(USES) == {*KeyName, RING_MASTER, SYNC_ANCHOR}
    could: dict[Mechanism, set[Use]] = {
        Mechanism.AES_CMAC: {Use.MAC},
        Mechanism.SHA256_HMAC: {Use.MAC},
        Mechanism.AES_GCM: {Use.SEAL, Use.UNSEAL},
        Mechanism.ECDSA: {Use.SIGN},
        Mechanism.EDDSA: {Use.SIGN},
    }
    for name in KeyName:
        versions = {Use.MAKE, Use.DESTROY} if name in VERSIONED else set()
        assert set(USES[name]) <= could[KEYS[name].mechanism] | versions, name


def test_only_the_token_endpoint_signs_tokens_and_only_speech_and_comparison_open_voices_for_requests() -> None:
    assert USES[KeyName.TOKEN_SIGNER][Use.SIGN] == {Place.TOKEN}
    in_the_vault = {place for place in USES[RING_MASTER][Use.OPEN] if place.startswith("vault")}
    assert in_the_vault == {Place.SPEAK, Place.COMPARE, Place.READYZ}


def test_the_place_holds_for_the_block_its_thread_and_its_task_alone() -> None:
    hsm = GuardedHsm(FakeHsm(), Place.VAULT, lambda _: None)

    def sign() -> int:
        return len(hsm.sign(KeyName.TOKEN_SIGNER, b"x"))

    async def at(place: Place) -> object:
        with acting(place):
            await asyncio.sleep(0)
            try:
                return await anyio.to_thread.run_sync(sign)
            except KeyUseRefused as error:
                return error.code

    async def both() -> list[object]:
        return list(await asyncio.gather(at(Place.COMPARE), at(Place.TOKEN), at(Place.COMPARE)))

    assert asyncio.run(both()) == ["key_use_refused", 64, "key_use_refused"]
    with pytest.raises(KeyUseRefused):
        sign()
    with acting(Place.TOKEN):
        assert sign() == 64
        with acting(Place.SPEAK), pytest.raises(KeyUseRefused):
            sign()
        assert sign() == 64
    with pytest.raises(KeyUseRefused):
        sign()


def test_a_real_token_is_not_asked_either(serving_token: ServingToken, monkeypatch: pytest.MonkeyPatch) -> None:
    token = serving_token.hsm
    heard: list[KeyEvent] = []
    guarded = GuardedHsm(token, Place.COMPARE, heard.append)
    used: list[object] = []
    real = token._token.run
    monkeypatch.setattr(token._token, "run", lambda operation: (used.append(operation), real(operation))[1])
    refused: list[Callable[[], object]] = [
        lambda: guarded.sign(KeyName.TOKEN_SIGNER, b"x"),
        lambda: guarded.sign(KeyName.SITE_IDENTITY, b"x"),
        lambda: guarded.new_dek(MASTER).__enter__(),
        lambda: guarded.unseal(KeyName.AUDIT_DETAIL, os.urandom(40), b""),
        lambda: guarded.make_signer(KeyName.TOKEN_SIGNER, 2),
        lambda: guarded.destroy_master(MASTER),
    ]
    for ask in refused:
        with pytest.raises(KeyUseRefused):
            ask()
    assert (used, len(heard)) == ([], len(refused))
    assert len(guarded.mac(KeyName.RECORD_MAC, b"x")) == 16
    with acting(Place.TOKEN):
        assert len(guarded.sign(KeyName.TOKEN_SIGNER, b"x")) == 64
    assert len(used) == 2


def test_a_refused_use_stands_in_the_audit_log_once(database: Engine) -> None:
    token, events = FakeHsm(), HsmEvents()
    guarded = GuardedHsm(token, Place.VAULT, events.hear)
    store = AuditStore(database, guarded)  # the entry is written under the same rules
    with events.writing(database, KeyEventRecorder(store)):
        for place in (Place.COMPARE, Place.COMPARE, Place.SPEAK, Place.COMPARE):
            with acting(place), pytest.raises(KeyUseRefused):
                guarded.sign(KeyName.TOKEN_SIGNER, b"x")
        for _ in range(100):
            with database.connect() as connection:
                found = [json.loads(body) for body in connection.scalars(text("SELECT body FROM intent"))]
            if len(found) == 2:
                break
            time.sleep(0.05)
    assert [entry["action"] for entry in found] == [USE_REFUSED] * 2
    shown = [AuditStore(database, token).disclose(UUID(entry["id"])) for entry in found]
    assert {one["place"]["value"] for one in shown} == {"vault.compare", "vault.speak"}
    assert {one["key"]["value"] for one in shown} == {"token-signer"}


def test_every_endpoint_of_the_vault_and_every_command_of_the_site_has_a_place() -> None:
    from service.vault.http import _Calls

    endpoints = [found for name, found in vars(_Calls).items() if asyncio.iscoroutinefunction(found)]
    assert len(endpoints) >= 10
    assert [found.__name__ for found in endpoints if not hasattr(found, "__wrapped__")] == []


def _never(event: KeyEvent) -> None:
    raise AssertionError(event)
