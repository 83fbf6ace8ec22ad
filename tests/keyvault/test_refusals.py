"""Audit and probes at start: a good token passes; each breach is seen and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsm_fixtures import USER_PIN, ServingToken, in_own_process, make_serving_token
from weak_masters import LEFT_OUT, Changes, dek_template, in_ceremony, keep_master, make_master

from keyvault import ceremony
from keyvault.errors import CallFailed, MasterMissing, PromiseBroken
from keyvault.hsm import KeyName, RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_raw import RawCalls
from keyvault.pkcs11_start import TokenConfig, TokenSession
from keyvault.refusals import audit, probe
from keyvault.templates import DEK, KEYS, anchor_object

MASTER = RingMaster("main", 1)
WRAP_WEAK = {Attribute.WRAP_TEMPLATE: LEFT_OUT}

# Each attribute of the UNWRAP_TEMPLATE can be missing from it. CLASS alone does no harm: 32 bytes are no private key.
MISSING = tuple(attribute.name for attribute in DEK if attribute is not Attribute.CLASS)


def verdict(check: Any, *arguments: Any) -> str:
    try:
        check(*arguments)
    except (PromiseBroken, MasterMissing) as error:
        return str(error)
    return "passed"


def probe_weak_masters(config: TokenConfig) -> dict[str, str]:
    """Probe masters whose templates miss one attribute each, as session objects that the user copies."""
    changes: dict[str, Changes] = {
        f"without {name}": {Attribute.UNWRAP_TEMPLATE: dek_template(**{name: LEFT_OUT}), **WRAP_WEAK} for name in MISSING
    }
    changes["no UNWRAP_TEMPLATE"] = {Attribute.UNWRAP_TEMPLATE: LEFT_OUT, **WRAP_WEAK}
    changes["as it should be"] = {}
    masters = {name: RingMaster("weak", number) for number, name in enumerate(changes, 1)}

    def by_officer(session: TokenSession) -> list[int]:
        return [make_master(session, masters[name], changes[name]) for name in changes]

    def by_user(session: TokenSession, made: list[int]) -> dict[str, str]:
        found = {}
        for name, handle in zip(changes, made, strict=True):
            key = keep_master(session, handle, {Attribute.TOKEN: False})
            session.calls.destroy(session.handle, handle)
            found[name] = verdict(probe, session, masters[name])
            session.calls.destroy(session.handle, key)
        return found

    return in_ceremony(config, by_officer, by_user)


def audit_weak_masters(config: TokenConfig) -> dict[str, str]:
    master = RingMaster("weak", 1)
    cases: dict[str, tuple[Changes, Changes]] = {
        "as it should be": ({}, {}),
        "MODIFIABLE": ({}, {Attribute.MODIFIABLE: True}),
        "EXTRACTABLE": ({}, {Attribute.EXTRACTABLE: True}),
        "PRIVATE": ({}, {Attribute.PRIVATE: False}),
        "DECRYPT": ({Attribute.DECRYPT: True}, {}),
        "ENCRYPT": ({Attribute.ENCRYPT: True}, {}),
        "DERIVE": ({Attribute.DERIVE: True}, {}),
        "SIGN": ({Attribute.SIGN: True}, {}),
        "ALLOWED_MECHANISMS": ({Attribute.ALLOWED_MECHANISMS: (Mechanism.AES_KEY_WRAP, Mechanism.AES_ECB)}, {}),
        "no ALLOWED_MECHANISMS": ({Attribute.ALLOWED_MECHANISMS: LEFT_OUT}, {}),
    }

    def by_officer(session: TokenSession) -> list[int]:
        return [make_master(session, master, officer) for officer, _ in cases.values()]

    def by_user(session: TokenSession, made: list[int]) -> dict[str, str]:
        # The officer's own objects are TRUSTED too: each case is audited alone.
        kept = {}
        for (name, (_, user)), handle in zip(cases.items(), made, strict=True):
            kept[name] = keep_master(session, handle, {Attribute.TOKEN: False, **user})
            session.calls.destroy(session.handle, handle)
        found = {}
        for name in cases:
            others = {other: key for other, key in kept.items() if other != name}
            found[name] = verdict(audit, _Without(session, set(others.values())), (MASTER, master))
        return found

    return in_ceremony(config, by_officer, by_user)


class _Without:
    """A session that does not see some objects."""

    def __init__(self, session: TokenSession, hidden: set[int]) -> None:
        self.calls, self.handle, self._session, self._hidden = session.calls, session.handle, session, hidden

    def find(self, template: Any) -> list[int]:
        return [key for key in self._session.find(template) if key not in self._hidden]


def plant(config: TokenConfig) -> dict[str, str]:
    """With the user PIN alone: plant what he can, and let the audit look."""
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))
    session = hsm._token.open_session()
    calls, handle = session.calls, session.handle
    found = {"good": verdict(audit, session, (MASTER,))}
    honest = session.key(MASTER.label, 4, trusted=True)

    def look(name: str, *made: int) -> None:
        found[name] = verdict(audit, session, (MASTER,))
        for key in made:
            calls.destroy(handle, key)

    look("clone of the master", calls.copy(handle, honest, {}))
    planted = {
        Attribute.VALUE_LEN: 32,
        Attribute.TOKEN: True,
        Attribute.PRIVATE: True,
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False,
        Attribute.WRAP: True,
        Attribute.UNWRAP: True,
        Attribute.LABEL: MASTER.label,
        Attribute.ID: MASTER.label.encode(),
        Attribute.MODIFIABLE: False,
    }
    look("planted master", calls.generate_key(handle, Mechanism.AES_KEY_GEN, planted))
    plan = KEYS[KeyName.RECORD_MAC]
    look("twin of record-mac", calls.generate_key(handle, plan.generate, plan.template))
    signer = KEYS[KeyName.TOKEN_SIGNER]
    assert signer.public is not None
    look("twin of token-signer", *calls.generate_pair(handle, signer.generate, signer.public, signer.template))
    loose = {**plan.template, Attribute.LABEL: KeyName.CHECKPOINT_SIGNER.value, Attribute.EXTRACTABLE: True}
    look("key that could leave", calls.generate_key(handle, plan.generate, loose))
    look("key of another name", calls.generate_key(handle, plan.generate, {**plan.template, Attribute.LABEL: "backdoor"}))
    data = {Attribute.CLASS: ObjectClass.DATA, Attribute.TOKEN: True, Attribute.LABEL: "note", Attribute.VALUE: b"x"}
    look("data of another name", calls.create(handle, data))
    look("anchor", calls.create(handle, anchor_object(b"epoch 1")))
    found["expected and missing"] = verdict(audit, session, (MASTER, RingMaster("main", 2)))
    found["good again"] = verdict(audit, session, (MASTER,))
    return found


def two_under_one_name_in_use(config: TokenConfig) -> str:
    """A twin that appears while the vault runs: the next session to look for the name refuses it."""
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))
    plan = KEYS[KeyName.RECORD_MAC]
    hsm._token.run(lambda session: session.calls.generate_key(session.handle, plan.generate, plan.template))
    return verdict(hsm.mac, KeyName.RECORD_MAC, b"x")


def open_with_another_trusted_master(folder: Path) -> dict[str, str]:
    config, facts = make_serving_token(folder)
    added = ceremony.add_master(config, "5207-officer", USER_PIN, RingMaster("main", 2))
    found = {"unexpected": verdict(lambda: Pkcs11Hsm.open(config, USER_PIN, expected_masters=facts.masters))}
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(*added.masters, *facts.masters))
    old, new = hsm.masters()
    with hsm.new_dek(old) as dek:
        wrapped = dek.wrapped
    rewrapped = hsm.rewrap(wrapped, old, new)
    found["rewrapped opens"] = str(len(rewrapped))
    with hsm.open_dek(new, rewrapped):
        found["under the new"] = "opened"
    try:
        with hsm.open_dek(old, rewrapped):
            found["under the old"] = "opened"
    except Exception as error:  # noqa: BLE001 — the test names it
        found["under the old"] = type(error).__name__
    hsm.close()
    return found


def test_every_weaker_template_is_named_by_a_probe(serving_token: ServingToken) -> None:
    """B3: an unwrap that leaves an attribute out is refused or read back; a master that allows more stops the start."""
    found = in_own_process(probe_weak_masters, serving_token.config)
    assert found.pop("as it should be") == "passed"
    for name in MISSING:
        assert name in found.pop(f"without {name}")
    assert "must refuse to unwrap" in found.pop("no UNWRAP_TEMPLATE")
    assert found == {}


def test_a_master_made_otherwise_fails_the_audit(serving_token: ServingToken) -> None:
    found = in_own_process(audit_weak_masters, serving_token.config)
    assert found.pop("as it should be") == "passed"
    for name, said in found.items():
        assert name.removeprefix("no ") in said, name


def test_what_the_pin_holder_plants_fails_the_audit(serving_token: ServingToken) -> None:
    """B4: two objects under one identity, or one too many, stop the start, and the message names their ids."""
    found = in_own_process(plant, serving_token.config)
    assert (found["good"], found["good again"], found["anchor"]) == ("passed", "passed", "passed")
    assert "ring/main/1" in found["clone of the master"]
    assert "ring/main/1" in found["planted master"]
    assert found["planted master"].count(MASTER.label.encode().hex()) == 2
    assert "'backdoor'" in found["key of another name"]
    assert "'note'" in found["data of another name"]
    assert "record-mac" in found["twin of record-mac"]
    assert "token-signer" in found["twin of token-signer"]
    assert "checkpoint-signer" in found["key that could leave"]
    assert "ring/main/2" in found["expected and missing"]


def test_a_twin_that_appears_later_stops_its_name(tmp_path: Path) -> None:
    config, _ = in_own_process(make_serving_token, tmp_path / "token")
    assert "2 keys stand under the one name 'record-mac'" in in_own_process(two_under_one_name_in_use, config)


def test_a_trusted_master_that_nobody_expected_stops_the_start(tmp_path: Path) -> None:
    found = in_own_process(open_with_another_trusted_master, tmp_path / "token")
    assert "ring/main/2" in found["unexpected"]
    assert found["rewrapped opens"] == "40"
    assert (found["under the new"], found["under the old"]) == ("opened", "UnwrapRejected")


def test_the_start_itself_probes(serving_token: ServingToken) -> None:
    """`open` runs the probes: where the module is made to allow one, it does not come up."""
    said = in_own_process(open_over_a_lax_module, serving_token.config)
    assert said == "the module must refuse to wrap a voice's key by AES-CBC, and does not"


def open_over_a_lax_module(config: TokenConfig) -> str:
    strict = RawCalls.wrap

    def lax(calls: RawCalls, session: int, wrapping: int, key: int, mechanism: Mechanism = Mechanism.AES_KEY_WRAP) -> bytes:
        try:
            return strict(calls, session, wrapping, key, mechanism)
        except CallFailed:
            if mechanism is Mechanism.AES_CBC:
                return bytes(32)
            raise

    RawCalls.wrap = lax  # type: ignore[method-assign]
    return verdict(lambda: Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,)))
