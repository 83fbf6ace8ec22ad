"""Attacks on a voice's key by somebody who has the serving PIN and runs code, in a process of his own.

Each goes against the honest ring master, where it must be refused, and against one made with the very weakness that the
attack needs, where the same code must succeed: a refusal that nothing could break would prove nothing. What no template can
stop (copying a key that is the same key, forging blobs, DECRYPT while he is there) is shown at the end, as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pkcs11
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hsm_fixtures import USER_PIN, ServingToken, in_own_process
from key_attacks import (
    Attacker,
    copy_the_master_with_decrypt,
    copy_to_the_token,
    decrypt_with_the_master,
    derive,
    derive_by_set,
    dress_as_hmac_key,
    import_a_trusted_key,
    keep_in_the_token,
    leave_sensitive_out,
    let_it_unwrap,
    let_it_wrap,
    make_a_trusted_key,
    not_extractable,
    not_private,
    read_in_clear,
    read_the_master,
    set_decrypt_on_the_master,
    trust_a_key_later,
    unwrapped,
    wrap_a_known_key_as_a_dek,
    wrap_by_cbc,
    wrap_the_born_key_under_own_key,
    wrap_the_master,
    wrap_under_own_key,
)
from pkcs11 import Attribute as A
from softhsm_files import dek_bytes
from weak_masters import LEFT_OUT, Changes, dek_template, in_ceremony, keep_master, make_master

from keyvault.errors import CallFailed
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_start import Module, Token, TokenConfig, TokenSession
from keyvault.templates import DEK_SEALING

HONEST = RingMaster("main", 1)
REFUSED = {
    "TEMPLATE_INCONSISTENT",
    "ATTRIBUTE_READ_ONLY",
    "ATTRIBUTE_SENSITIVE",
    "ATTRIBUTE_VALUE_INVALID",
    "ACTION_PROHIBITED",
    "KEY_FUNCTION_NOT_PERMITTED",
    "KEY_NOT_WRAPPABLE",
    "KEY_UNEXTRACTABLE",
    "MECHANISM_INVALID",
}


@dataclass(frozen=True)
class Case:
    """An attack, and the changes to the honest master that let it through: the officer's template and the user's copy."""

    attack: Callable[[Attacker], bytes]
    officer: Changes
    user: Changes
    leaks: bool = False


def lax(**left_out: Any) -> Changes:
    return {Attribute.UNWRAP_TEMPLATE: dek_template(**left_out)}


ANY_MECHANISM: Changes = {Attribute.ALLOWED_MECHANISMS: LEFT_OUT}

CASES = (
    Case(read_in_clear, {Attribute.UNWRAP_TEMPLATE: LEFT_OUT}, {}, leaks=True),
    Case(leave_sensitive_out, {Attribute.UNWRAP_TEMPLATE: LEFT_OUT}, {}, leaks=True),
    Case(wrap_under_own_key, lax(WRAP_WITH_TRUSTED=LEFT_OUT), {}, leaks=True),
    Case(dress_as_hmac_key, lax(KEY_TYPE=LEFT_OUT), {}),
    Case(keep_in_the_token, lax(TOKEN=LEFT_OUT), {}),
    Case(copy_to_the_token, lax(COPYABLE=LEFT_OUT, MODIFIABLE=LEFT_OUT), {}),
    Case(derive_by_set, lax(MODIFIABLE=LEFT_OUT), {}),
    Case(derive, lax(DERIVE=LEFT_OUT), {}),
    Case(let_it_wrap, lax(WRAP=LEFT_OUT), {}),
    Case(let_it_unwrap, lax(UNWRAP=LEFT_OUT), {}),
    Case(not_private, lax(PRIVATE=LEFT_OUT), {}),
    Case(not_extractable, lax(EXTRACTABLE=LEFT_OUT), {}),
    Case(set_decrypt_on_the_master, ANY_MECHANISM, {Attribute.MODIFIABLE: True}, leaks=True),
    Case(copy_the_master_with_decrypt, ANY_MECHANISM, {Attribute.MODIFIABLE: True}, leaks=True),
    Case(decrypt_with_the_master, {Attribute.DECRYPT: True, **ANY_MECHANISM}, {}, leaks=True),
    Case(wrap_by_cbc, ANY_MECHANISM, {}),
    Case(wrap_the_master, {Attribute.WRAP_WITH_TRUSTED: False}, {Attribute.EXTRACTABLE: True}),
    Case(read_the_master, {Attribute.SENSITIVE: False}, {Attribute.EXTRACTABLE: True}),
    Case(wrap_a_known_key_as_a_dek, {Attribute.WRAP_TEMPLATE: LEFT_OUT}, {}),
)

# Attacks that no master's template decides: WRAP_WITH_TRUSTED of the DEK does, and who may make a key TRUSTED.
ON_TRUST = (wrap_the_born_key_under_own_key, make_a_trusted_key, import_a_trusted_key, trust_a_key_later)


def attempt(attack: Callable[[Attacker], bytes], attacker: Attacker) -> tuple[str, bytes]:
    try:
        return "SUCCEEDED", attack(attacker)
    except CallFailed as error:
        return error.answer, b""
    except pkcs11.PKCS11Error as error:
        return type(error).__name__, b""


def attacker_on(session: TokenSession, master: int) -> tuple[Attacker, bytes]:
    """An attacker's view, and a row sealed by the key he wants."""
    calls, handle = session.calls, session.handle
    dek = calls.generate_key(handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
    with LockedBuffer(32) as buffer:
        buffer.array(8)[:] = 1.5
        row = bytes(12) + calls.encrypt(handle, dek, bytes(12), b"", buffer.address, 32)
    return Attacker(calls, handle, master, dek, calls.wrap(handle, master, dek), session._session), row


def opens(key: bytes, row: bytes) -> bool:
    try:
        return bool(AESGCM(key).decrypt(row[:12], row[12:], b"") == np.full(8, 1.5, np.float32).tobytes())
    except (InvalidTag, ValueError):
        return False


# What runs in a process of its own


def against_the_honest_master(config: TokenConfig) -> dict[str, str]:
    """The serving PIN, another process, every attack."""
    token = Token(Module(config.module, config.folder), config, USER_PIN)
    answers = {}
    for attack in (*(case.attack for case in CASES), *ON_TRUST):
        session = token.open_session()
        master = session.key(HONEST.label, ObjectClass.SECRET_KEY, trusted=True)
        attacker, row = attacker_on(session, master)
        answer, key = attempt(attack, attacker)
        answers[attack.__name__] = f"{answer}: DEK IN CLEAR" if opens(key, row) else answer
        session.close()
    return answers


def against_weak_masters(config: TokenConfig) -> dict[str, tuple[str, bool]]:
    """The same attacks, each on a master with the one weakness that lets it through."""

    def by_officer(session: TokenSession) -> list[int]:
        return [make_master(session, RingMaster("weak", n), case.officer) for n, case in enumerate(CASES)]

    def by_user(session: TokenSession, made: list[int]) -> dict[str, tuple[str, bool]]:
        answers = {}
        before = set(session.find({Attribute.TOKEN: True}))
        for case, handle in zip(CASES, made, strict=True):
            master = keep_master(session, handle, {Attribute.TOKEN: False, **case.user})
            attacker, row = attacker_on(session, master)
            answer, key = attempt(case.attack, attacker)
            answers[case.attack.__name__] = (answer, opens(key, row))
        for loot in set(session.find({Attribute.TOKEN: True})) - before:  # or no start accepts this token any more
            session.calls.destroy(session.handle, loot)
        return answers

    return in_ceremony(config, by_officer, by_user)


def with_an_officers_help(config: TokenConfig) -> dict[str, bool]:
    """What TRUSTED guards: the same export works under a key that an officer made TRUSTED, and for a DEK without the mark."""

    def by_officer(session: TokenSession) -> int:
        template = {Attribute.VALUE_LEN: 32, Attribute.TOKEN: False, Attribute.PRIVATE: False, Attribute.TRUSTED: True}
        template |= {Attribute.WRAP: True, Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}
        return session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, template)

    def by_user(session: TokenSession, trusted: int) -> dict[str, bool]:
        master = session.key(HONEST.label, ObjectClass.SECRET_KEY, trusted=True)
        attacker, row = attacker_on(session, master)
        known = attacker.value(trusted)
        found = {"trusted": opens(unwrapped(known, attacker.calls.wrap(session.handle, trusted, attacker.dek)), row)}
        unmarked = {**DEK_SEALING, Attribute.WRAP_WITH_TRUSTED: False}
        attacker.dek = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, unmarked)
        found["unmarked"] = len(wrap_the_born_key_under_own_key(attacker)) == 32
        return found

    return in_ceremony(config, by_officer, by_user)


def what_no_template_stops(config: TokenConfig) -> dict[str, Any]:
    """Limits, shown as they are: the threat model names each."""
    token = Token(Module(config.module, config.folder), config, USER_PIN)
    session = token.open_session()
    master = session.key(HONEST.label, ObjectClass.SECRET_KEY, trusted=True)
    attacker, row = attacker_on(session, master)
    found: dict[str, Any] = {}
    with LockedBuffer(64) as target:
        found["open while he is there"] = attacker.calls.decrypt(
            session.handle, attacker.unwrap(), row[:12], b"", row[12:], target.address, 64
        )
    attacker.master = clone = attacker.calls.copy(session.handle, master, {})
    found["clone"] = [attacker.calls.read(session.handle, key, Attribute.TRUSTED) for key in (master, clone)]
    found["clone has the same limits"] = [
        attempt(attack, attacker)[0] in REFUSED for attack in (set_decrypt_on_the_master, read_in_clear, read_the_master)
    ]
    attacker.calls.destroy(session.handle, clone)
    known = attacker.python.create_object(
        {
            A.CLASS: pkcs11.ObjectClass.SECRET_KEY,
            A.KEY_TYPE: pkcs11.KeyType.AES,
            A.VALUE: b"k" * 32,
            A.SENSITIVE: True,
            A.EXTRACTABLE: True,
            A.WRAP_WITH_TRUSTED: True,
        }
    )
    found["a key of his own as a blob"] = len(attacker.calls.wrap(session.handle, master, known.handle))
    found["wrapped"], found["row"] = attacker.wrapped, row
    return found


# The tests


@pytest.fixture(scope="module")
def answers(serving_token: ServingToken) -> dict[str, str]:
    return in_own_process(against_the_honest_master, serving_token.config)


@pytest.fixture(scope="module")
def controls(serving_token: ServingToken) -> dict[str, tuple[str, bool]]:
    return in_own_process(against_weak_masters, serving_token.config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.attack.__name__)
def test_the_honest_master_refuses_and_a_weak_one_does_not(
    case: Case, answers: dict[str, str], controls: dict[str, tuple[str, bool]]
) -> None:
    name = case.attack.__name__
    assert answers[name] in REFUSED
    assert controls[name] == ("SUCCEEDED", case.leaks)


@pytest.mark.parametrize("attack", ON_TRUST, ids=lambda attack: attack.__name__)
def test_a_voices_key_leaves_only_under_trusted_keys_and_users_make_none(
    attack: Callable[[Attacker], bytes], answers: dict[str, str]
) -> None:
    assert answers[attack.__name__] in REFUSED | {"AttributeReadOnly"}


def test_the_mark_is_what_stops_them(serving_token: ServingToken) -> None:
    assert in_own_process(with_an_officers_help, serving_token.config) == {"trusted": True, "unmarked": True}


def test_what_no_template_can_stop(serving_token: ServingToken) -> None:
    found = in_own_process(what_no_template_stops, serving_token.config)
    assert found["open while he is there"] == 32
    assert found["clone"] == [b"\x01", b"\x01"]
    assert found["clone has the same limits"] == [True, True, True]
    assert found["a key of his own as a blob"] == 40
    # SoftHSM only: PIN and files give the key's bytes. Its boundary is the user that owns the folder (0700).
    key = dek_bytes(serving_token.folder, USER_PIN, found["wrapped"], HONEST.label)
    assert opens(key, found["row"])
    assert serving_token.folder.stat().st_mode & 0o777 == 0o700
