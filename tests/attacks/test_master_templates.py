"""Attacks on a voice's key by somebody who has the serving PIN and runs code, in a process of his own.

Each goes against the honest ring master, where it must be refused, and against one made with the very weakness that the
attack needs, where the same code must succeed: a refusal that nothing could break would prove nothing. What no template can
stop (copying a key that is the same key, forging blobs, DECRYPT while he is there) is shown at the end, as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pkcs11
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hsm_fixtures import USER_PIN, ServingToken, in_own_process
from key_attacks import (
    Attacker,
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
    import_a_trusted_key,
    keep_in_the_token,
    leave_sensitive_out,
    let_it_unwrap,
    let_it_wrap,
    let_the_born_key_be_read,
    let_the_born_key_derive,
    let_the_born_key_go_untrusted,
    make_a_trusted_key,
    not_extractable,
    not_private,
    read_in_clear,
    read_the_born_key,
    read_the_master,
    save_an_operation,
    sensitive_of_no_length,
    set_decrypt_on_the_master,
    sign_with_the_master,
    trust_a_key_later,
    trusted_on_copy,
    trusted_on_unwrap,
    twice_with_false_first,
    twice_with_false_last,
    unwrap_by,
    unwrapped,
    wrap_a_known_key_as_a_dek,
    wrap_by_cbc,
    wrap_the_born_key_under_own_key,
    wrap_the_master,
    wrap_the_master_under_its_clone,
    wrap_under_a_planted_master,
    wrap_under_own_aes_by_cbc,
    wrap_under_own_key,
    wrap_under_own_rsa_by_oaep,
    wrap_under_own_rsa_by_v15,
)
from pkcs11 import Attribute as A
from softhsm_files import dek_bytes
from weak_masters import LEFT_OUT, Changes, changed, dek_template, in_ceremony, keep_master, make_master

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
    "FUNCTION_NOT_SUPPORTED",
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


DES2, DES3, SHA256_HMAC = 0x14, 0x15, 0x2B  # CKK_*
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
    Case(twice_with_false_last, {Attribute.UNWRAP_TEMPLATE: LEFT_OUT}, {}, leaks=True),
    Case(dress_as(DES2), lax(KEY_TYPE=LEFT_OUT), {}),
    Case(dress_as(DES3), lax(KEY_TYPE=LEFT_OUT), {}),
    Case(dress_as(SHA256_HMAC), lax(KEY_TYPE=LEFT_OUT), {}),
    Case(unwrap_by("AES_KEY_WRAP_PAD"), ANY_MECHANISM, {}),
    Case(wrap_the_master_under_its_clone, {}, {Attribute.EXTRACTABLE: True}),
    Case(encrypt_with_the_master, {Attribute.ENCRYPT: True, **ANY_MECHANISM}, {}),
    Case(sign_with_the_master, {Attribute.SIGN: True, **ANY_MECHANISM}, {}),
    Case(derive_from_the_master, {Attribute.DERIVE: True, **ANY_MECHANISM}, {}),
)

# Attacks that no master's template decides: WRAP_WITH_TRUSTED of the DEK does, and who may make a key TRUSTED.
ON_TRUST = (
    wrap_the_born_key_under_own_key,
    make_a_trusted_key,
    import_a_trusted_key,
    trust_a_key_later,
    trusted_on_unwrap,
    trusted_on_copy,
    wrap_under_a_planted_master,
    wrap_under_own_rsa_by_oaep,
    wrap_under_own_rsa_by_v15,
    wrap_under_own_aes_by_cbc,
)

WITHOUT_THE_MARK = (
    wrap_the_born_key_under_own_key,
    wrap_under_a_planted_master,
    wrap_under_own_rsa_by_oaep,
    wrap_under_own_rsa_by_v15,
    wrap_under_own_aes_by_cbc,
)
"""The same code takes a key that was born without WRAP_WITH_TRUSTED out in the clear."""

# Attacks on a key as it was born: its own template decides, and the same code succeeds on one born so much weaker.
ON_BIRTH: dict[Callable[[Attacker], bytes], Changes] = {
    read_the_born_key: {Attribute.SENSITIVE: False},
    let_the_born_key_derive: {Attribute.MODIFIABLE: True},
    copy_the_born_key: {Attribute.COPYABLE: True, Attribute.MODIFIABLE: True},
}

# What this module refuses to everybody, so that nothing weak could show the attack at work.
NEVER = (
    twice_with_false_first,
    let_the_born_key_be_read,
    let_the_born_key_go_untrusted,
    unwrap_by("AES_CBC"),
    unwrap_by("AES_CBC_PAD"),
    unwrap_by("AES_ECB"),
    dress_as_a_private_key,
    sensitive_of_no_length,
    save_an_operation,
)


def attempt(attack: Callable[[Attacker], bytes], attacker: Attacker) -> tuple[str, bytes]:
    try:
        return "SUCCEEDED", attack(attacker)
    except CallFailed as error:
        return {"0x54": "FUNCTION_NOT_SUPPORTED"}.get(error.answer, error.answer), b""
    except pkcs11.PKCS11Error as error:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper(), b""


def attacker_on(session: TokenSession, master: int) -> tuple[Attacker, bytes]:
    """An attacker's view, and a row sealed by the key he wants."""
    calls, handle = session.calls, session.handle
    dek = calls.generate_key(handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
    with LockedBuffer(32) as buffer:
        buffer.array(8)[:] = 1.5
        row = bytes(12) + calls.encrypt(handle, dek, bytes(12), b"", buffer.address, 32)
    return Attacker(calls, handle, master, dek, calls.wrap(handle, master, dek), session._session), row


def born(attacker: Attacker, weaker: Changes) -> bytes:
    """Give the attacker a key that was born weaker, and return what it sealed."""
    calls, session = attacker.calls, attacker.session
    attacker.dek = calls.generate_key(session, Mechanism.AES_KEY_GEN, changed(DEK_SEALING, weaker))
    with LockedBuffer(32) as buffer:
        buffer.array(8)[:] = 1.5
        return bytes(12) + calls.encrypt(session, attacker.dek, bytes(12), b"", buffer.address, 32)


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
    for attack in (*(case.attack for case in CASES), *ON_TRUST, *ON_BIRTH, *NEVER):
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
        before, known = set(session.find({Attribute.TOKEN: True})), attacker.value(trusted)
        found = {"trusted": opens(unwrapped(known, attacker.calls.wrap(session.handle, trusted, attacker.dek)), row)}
        for attack in WITHOUT_THE_MARK:
            row = born(attacker, {Attribute.WRAP_WITH_TRUSTED: False})
            found[attack.__name__] = opens(attack(attacker), row)
        for attack, weaker in ON_BIRTH.items():
            row = born(attacker, weaker)
            found[attack.__name__] = opens(attack(attacker), row) or attack is not read_the_born_key
        for loot in set(session.find({Attribute.TOKEN: True})) - before:
            session.calls.destroy(session.handle, loot)
        return found

    return in_ceremony(config, by_officer, by_user)


SHAPE = (Attribute.TOKEN, Attribute.SENSITIVE, Attribute.EXTRACTABLE, Attribute.MODIFIABLE)


def every_shape(config: TokenConfig) -> dict[tuple[bool, ...], str]:
    token = Token(Module(config.module, config.folder), config, USER_PIN)
    session = token.open_session()
    master = session.key(HONEST.label, ObjectClass.SECRET_KEY, trusted=True)
    attacker, _ = attacker_on(session, master)
    found = {}
    for shape in product((False, True), repeat=4):
        wanted = {name.name: value for name, value in zip(SHAPE, shape, strict=True)}

        def unwrap(wanted: dict[str, bool] = wanted) -> bytes:
            key = attacker.unwrap(**wanted)
            return bytes(attacker.calls.read(attacker.session, key, name)[0] for name in SHAPE)

        said, got = attempt(lambda _, unwrap=unwrap: unwrap(), attacker)
        found[shape] = "OK" if (said, got) == ("SUCCEEDED", bytes(shape)) else said
    return found


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
    # An equality oracle on all 256 bits at once: who guesses the whole key learns that he did.
    digest = attacker.python.digest(attacker.object(attacker.dek), mechanism=pkcs11.Mechanism.SHA256)
    found["digest"] = bytes(digest)
    found["found by its whole value, by half of it"] = [
        len(session.find({Attribute.VALUE: value, Attribute.TOKEN: False})) for value in (b"k" * 32, b"k" * 16)
    ]
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
    assert answers[attack.__name__] in REFUSED


def test_the_mark_is_what_stops_them_and_the_template_at_birth(serving_token: ServingToken) -> None:
    names = {"trusted", *(attack.__name__ for attack in (*WITHOUT_THE_MARK, *ON_BIRTH))}
    assert in_own_process(with_an_officers_help, serving_token.config) == dict.fromkeys(names, True)


@pytest.mark.parametrize("attack", [*ON_BIRTH, *NEVER], ids=lambda attack: attack.__name__)
def test_a_born_key_stays_as_it_was_made_and_what_the_module_never_does(
    attack: Callable[[Attacker], bytes], answers: dict[str, str]
) -> None:
    assert answers[attack.__name__] in REFUSED


def test_an_unwrap_of_any_other_shape_is_refused(serving_token: ServingToken) -> None:
    """B2: of all sixteen combinations of the four attributes one unwraps, and reads back as asked."""
    found = in_own_process(every_shape, serving_token.config)
    asked = {(False, True, True, False): "OK"}
    assert found == {shape: asked.get(shape, "TEMPLATE_INCONSISTENT") for shape in product((False, True), repeat=4)}


def test_what_no_template_can_stop(serving_token: ServingToken) -> None:
    found = in_own_process(what_no_template_stops, serving_token.config)
    assert found["open while he is there"] == 32
    assert found["clone"] == [b"\x01", b"\x01"]
    assert found["clone has the same limits"] == [True, True, True]
    assert found["a key of his own as a blob"] == 40
    # SoftHSM only: PIN and files give the key's bytes. Its boundary is the user that owns the folder (0700).
    key = dek_bytes(serving_token.folder, USER_PIN, found["wrapped"], HONEST.label)
    assert opens(key, found["row"])
    assert found["digest"] == hashlib.sha256(key).digest()
    assert found["found by its whole value, by half of it"] == [1, 0]
    assert serving_token.folder.stat().st_mode & 0o777 == 0o700
