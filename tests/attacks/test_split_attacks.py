"""Attacks with the serving PIN where masters are not TRUSTED (`keyvault/split_templates.py`), in a process of its own.

Each is refused by the honest master and succeeds, by the same code, on one made with the weakness that it needs. What this
profile cannot refuse is shown at the end, as it is: with the rotation PIN every voice's key comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from key_attacks import (
    Attacker,
    clone_the_master,
    copy_the_born_key,
    copy_the_master_with_decrypt,
    copy_to_the_token,
    decrypt_with_the_master,
    derive,
    derive_by_set,
    derive_from_the_master,
    dress_as,
    dress_as_a_private_key,
    dress_as_hmac_key,
    encrypt_with_the_master,
    keep_in_the_token,
    leave_sensitive_out,
    let_it_unwrap,
    let_it_wrap,
    let_the_born_key_be_read,
    let_the_born_key_derive,
    not_private,
    read_in_clear,
    read_the_born_key,
    read_the_master,
    save_an_operation,
    sensitive_of_no_length,
    set_decrypt_on_the_master,
    sign_with_the_master,
    twice_with_false_first,
    twice_with_false_last,
    unwrap_by,
    wrap_a_known_key_as_a_dek,
    wrap_again,
    wrap_extractable_under_own_key,
    wrap_the_born_key_under_own_key,
    wrap_the_master,
    wrap_the_master_under_its_clone,
    wrap_under_a_planted_master,
    wrap_under_own_aes_by_cbc,
    wrap_under_own_rsa_by_oaep,
    wrap_under_own_rsa_by_v15,
)
from split_tokens import ONE, SplitSites, pin_of
from test_master_templates import REFUSED, attempt, opens
from weak_masters import LEFT_OUT, Changes, changed

from keyvault import one_time_keys
from keyvault.ceremony import as_role
from keyvault.errors import CallFailed
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_masters import SplitMasters
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass, Role
from keyvault.pkcs11_start import Module, Token, TokenConfig, TokenSession
from keyvault.split_templates import BORN_DEK, MOVED_DEK, SERVED_DEK, carried_master, served, serving_master

KIND, RIGHT = SplitMasters(), served(Attribute.DECRYPT)


@dataclass(frozen=True)
class Case:
    """An attack, and the changes to the honest master that let it through."""

    attack: Callable[[Attacker], bytes]
    weakness: Changes
    leaks: bool = False


def lax(*left_out: str) -> Changes:
    return {Attribute.UNWRAP_TEMPLATE: changed(SERVED_DEK, {Attribute[name]: LEFT_OUT for name in left_out})}


NO_TEMPLATE: Changes = {Attribute.UNWRAP_TEMPLATE: LEFT_OUT}
ANY_MECHANISM: Changes = {Attribute.ALLOWED_MECHANISMS: LEFT_OUT}
LOOSE: Changes = {Attribute.COPYABLE: True, Attribute.MODIFIABLE: True, **ANY_MECHANISM}
DES2, DES3, SHA256_HMAC = 0x14, 0x15, 0x2B  # CKK_*

CASES = (
    Case(read_in_clear, NO_TEMPLATE, leaks=True),
    Case(leave_sensitive_out, NO_TEMPLATE, leaks=True),
    Case(twice_with_false_last, NO_TEMPLATE, leaks=True),
    Case(wrap_extractable_under_own_key, lax("EXTRACTABLE"), leaks=True),
    Case(dress_as_hmac_key, lax("KEY_TYPE")),
    Case(dress_as(DES2), lax("KEY_TYPE")),
    Case(dress_as(DES3), lax("KEY_TYPE")),
    Case(dress_as(SHA256_HMAC), lax("KEY_TYPE")),
    Case(keep_in_the_token, lax("TOKEN")),
    Case(copy_to_the_token, lax("COPYABLE", "MODIFIABLE")),
    Case(derive_by_set, lax("MODIFIABLE")),
    Case(derive, lax("DERIVE")),
    Case(let_it_wrap, lax("WRAP")),
    Case(let_it_unwrap, lax("UNWRAP")),
    Case(not_private, lax("PRIVATE")),
    Case(set_decrypt_on_the_master, LOOSE, leaks=True),
    Case(copy_the_master_with_decrypt, LOOSE, leaks=True),
    Case(decrypt_with_the_master, {Attribute.DECRYPT: True, **ANY_MECHANISM}, leaks=True),
    Case(clone_the_master, {Attribute.COPYABLE: True}),
    Case(wrap_the_master, {Attribute.EXTRACTABLE: True}),
    Case(wrap_the_master_under_its_clone, {Attribute.COPYABLE: True, Attribute.EXTRACTABLE: True}),
    Case(read_the_master, {Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}),
    Case(wrap_a_known_key_as_a_dek, {Attribute.WRAP_TEMPLATE: LEFT_OUT}),
    Case(encrypt_with_the_master, {Attribute.ENCRYPT: True, **ANY_MECHANISM}),
    Case(sign_with_the_master, {Attribute.SIGN: True, **ANY_MECHANISM}),
    Case(derive_from_the_master, {Attribute.DERIVE: True, **ANY_MECHANISM}),
)

# Attacks on a key as it is used, which never leaves again: the same code succeeds on one that may.
ON_THE_KEY: dict[Callable[[Attacker], bytes], Changes] = {
    wrap_the_born_key_under_own_key: {Attribute.EXTRACTABLE: True},
    wrap_under_a_planted_master: {Attribute.EXTRACTABLE: True},
    wrap_under_own_rsa_by_oaep: {Attribute.EXTRACTABLE: True},
    wrap_under_own_rsa_by_v15: {Attribute.EXTRACTABLE: True},
    wrap_under_own_aes_by_cbc: {Attribute.EXTRACTABLE: True},
    wrap_again: {Attribute.EXTRACTABLE: True},
    read_the_born_key: {Attribute.SENSITIVE: False},
    let_the_born_key_derive: {Attribute.MODIFIABLE: True},
    copy_the_born_key: {Attribute.COPYABLE: True, Attribute.MODIFIABLE: True},
}
WITHOUT_BYTES = (wrap_again, let_the_born_key_derive, copy_the_born_key)

# What this module refuses to everybody.
NEVER = (
    twice_with_false_first,
    let_the_born_key_be_read,
    unwrap_by("AES_CBC"),
    unwrap_by("AES_CBC_PAD"),
    unwrap_by("AES_ECB"),
    unwrap_by("AES_KEY_WRAP_PAD"),
    dress_as_a_private_key,
    sensitive_of_no_length,
    save_an_operation,
)


def attacker_on(session: TokenSession, master: int) -> tuple[Attacker, bytes]:
    """An attacker's view, and a row sealed by the key he wants."""
    dek, wrapped = KIND.new_dek(session, master)
    return Attacker(session.calls, session.handle, master, dek, wrapped, session._session, RIGHT), row_by(session, dek)


def row_by(session: TokenSession, dek: int) -> bytes:
    with LockedBuffer(32) as buffer:
        buffer.array(8)[:] = 1.5
        return bytes(12) + session.calls.encrypt(session.handle, dek, bytes(12), b"", buffer.address, 32)


def weak_master(session: TokenSession, number: int, weakness: Changes) -> int:
    """As the ceremony's, but for the weakness, and a session object."""
    right = {Attribute.VALUE_LEN: 32, **serving_master(RingMaster("weak", number), wrap_template=True)}
    return session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, changed(right, {Attribute.TOKEN: False, **weakness}))


# What runs in the token's own process


def against_the_honest_master(config: TokenConfig) -> dict[str, str]:
    module = Module(config.module, config.folder)
    try:
        token, answers = Token(module, config, pin_of(config)), {}
        for attack in (*(case.attack for case in CASES), *ON_THE_KEY, *NEVER):
            session = token.open_session()
            attacker, row = attacker_on(session, session.key(ONE.label, ObjectClass.SECRET_KEY))
            answer, key = attempt(attack, attacker)
            answers[attack.__name__] = f"{answer}: DEK IN CLEAR" if opens(key, row) else answer
            session.close()
        return answers
    finally:
        module.stop()


def against_weak_ones(config: TokenConfig) -> dict[str, tuple[str, bool]]:
    """The same attacks on masters, or on keys, with the one weakness that lets each through."""
    module = Module(config.module, config.folder)
    try:
        token, answers = Token(module, config, pin_of(config)), {}
        before = set(token.open_session().find({Attribute.TOKEN: True}))
        for number, case in enumerate(CASES):
            session = token.open_session()
            attacker, row = attacker_on(session, weak_master(session, number, case.weakness))
            answer, key = attempt(case.attack, attacker)
            answers[case.attack.__name__] = (answer, opens(key, row))
            session.close()
        for attack, weaker in ON_THE_KEY.items():
            session = token.open_session()
            attacker, _ = attacker_on(session, session.key(ONE.label, ObjectClass.SECRET_KEY))
            born = changed(BORN_DEK, {Attribute.ENCRYPT: True, **weaker})
            attacker.dek = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, born)
            row = row_by(session, attacker.dek)
            answer, key = attempt(attack, attacker)
            answers[attack.__name__] = (answer, opens(key, row))
            session.close()
        session = token.open_session()
        for loot in set(session.find({Attribute.TOKEN: True})) - before:  # or no start accepts this token any more
            session.calls.destroy(session.handle, loot)
        return answers
    finally:
        module.stop()


def replay(config: TokenConfig, recorded: bytes) -> tuple[int, set[str]]:
    """The message of the ceremony, under every RSA key that is there or that the PIN's holder can make."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, pin_of(config)):
            there = session.find({Attribute.CLASS: ObjectClass.PRIVATE_KEY, Attribute.KEY_TYPE: KeyType.RSA})
            own = one_time_keys.made(session, private=True)[1]
            answers = {taken(session, key, recorded, weakness)[0] for key in (*there, own) for weakness in ({}, NO_TEMPLATE)}
            return len(there), answers
    finally:
        module.stop()


def taken(session: TokenSession, key: int, recorded: bytes, weakness: Changes) -> tuple[str, int]:
    """The master out of its message with the right attributes, but for the weakness."""
    right = serving_master(RingMaster("taken", 1), wrap_template=True)
    wanted = changed(right, {Attribute.TOKEN: False, **weakness})
    try:
        return "UNWRAPPED", session.calls.unwrap_oaep(session.handle, key, recorded, wanted, Mechanism.SHA_1)
    except CallFailed as error:
        return error.answer, 0


def replay_to_a_key_that_stays(config: TokenConfig) -> bool:
    """Positive control: were the one-time key still there, the replayed master gives out its keys in the clear."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        calls, handle = session.calls, session.handle
        with as_role(session, Role.USER, pin_of(config)):
            public, private = one_time_keys.made(session, private=True)
            carried = calls.generate_key(handle, Mechanism.AES_KEY_GEN, carried_master())
            wrapping = calls.create(handle, one_time_keys.template(one_time_keys.public_bytes(session, public)))
            recorded = calls.wrap_oaep(handle, wrapping, carried, Mechanism.SHA_1)
            honest = taken(session, private, recorded, {})[1]
            attacker, row = attacker_on(session, honest)
            attacker.master = taken(session, private, recorded, NO_TEMPLATE)[1]
            return opens(read_in_clear(attacker), row)
    finally:
        module.stop()


def with_the_rotation_pin(config: TokenConfig, wrapped: bytes, row: bytes) -> bool:
    """What the rotation PIN gives, said in `docs/hsm-door.md`: here a voice's key leaves under a key of his own."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, pin_of(config)):
            master = session.key(ONE.label, ObjectClass.SECRET_KEY)
            dek = session.calls.unwrap(session.handle, master, wrapped, MOVED_DEK)
            attacker = Attacker(session.calls, session.handle, master, dek, wrapped, session._session, MOVED_DEK)
            return opens(wrap_the_born_key_under_own_key(attacker), row)
    finally:
        module.stop()


def one_row(config: TokenConfig) -> tuple[bytes, bytes]:
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, pin_of(config)):
            attacker, row = attacker_on(session, session.key(ONE.label, ObjectClass.SECRET_KEY))
            return attacker.wrapped, row
    finally:
        module.stop()


# The tests


@pytest.fixture(scope="module")
def answers(split_sites: SplitSites) -> dict[str, str]:
    return split_sites.a(against_the_honest_master, split_sites.a.config)


@pytest.fixture(scope="module")
def controls(split_sites: SplitSites) -> dict[str, tuple[str, bool]]:
    return split_sites.a(against_weak_ones, split_sites.a.config)


def test_the_honest_master_refuses_and_a_weak_one_does_not(answers: dict[str, str], controls: dict[str, tuple[str, bool]]) -> None:
    for case in CASES:
        name = case.attack.__name__
        assert (name, answers[name] in REFUSED, answers[name]) == (name, True, answers[name])
        assert (name, controls[name]) == (name, ("SUCCEEDED", case.leaks))


def test_a_key_that_is_used_never_leaves_and_one_that_may_does(
    answers: dict[str, str], controls: dict[str, tuple[str, bool]]
) -> None:
    for attack in ON_THE_KEY:
        name = attack.__name__
        assert (name, answers[name] in REFUSED, answers[name]) == (name, True, answers[name])
        assert (name, controls[name]) == (name, ("SUCCEEDED", attack not in WITHOUT_BYTES))


def test_what_the_module_never_does(answers: dict[str, str]) -> None:
    assert {name.__name__: answers[name.__name__] for name in NEVER if answers[name.__name__] not in REFUSED} == {}


def test_the_recorded_message_opens_under_no_key(split_sites: SplitSites) -> None:
    assert split_sites.b(replay, split_sites.b.config, split_sites.recorded) == (0, {"GENERAL_ERROR"})


def test_a_transport_key_that_stayed_would_give_every_key_away(split_sites: SplitSites) -> None:
    assert split_sites.b(replay_to_a_key_that_stays, split_sites.b.config)


def test_with_the_rotation_pin_every_key_comes_out(split_sites: SplitSites) -> None:
    row: tuple[Any, ...] = split_sites.a(one_row, split_sites.a.config)
    assert split_sites.rotation(with_the_rotation_pin, split_sites.rotation.config, *row)
