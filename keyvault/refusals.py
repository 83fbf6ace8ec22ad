"""Start-up checks of a token: the audit of what it holds, and probes of what it must refuse.

A template is a promise only where the module enforces it, so each is tried: a weaker request must be refused, beside the
right one that must succeed. A module that allows one is refused with the promise named; nothing is opened with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from keyvault.errors import CallFailed, PromiseBroken
from keyvault.hsm import RingMaster
from keyvault.pkcs11_names import LOST_SESSION, Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession
from keyvault.templates import AES_BYTES, DEK, DEK_OPENING, DEK_SEALING, KEYS

TRUE, FALSE = b"\x01", b"\x00"
_KEPT_INSIDE = ((Attribute.SENSITIVE, TRUE), (Attribute.EXTRACTABLE, FALSE), (Attribute.MODIFIABLE, FALSE))


def audit(session: TokenSession, masters: Sequence[RingMaster]) -> frozenset[str]:
    """The names of the keys in the token.

    Raises PromiseBroken unless the TRUSTED objects are exactly `masters`, each as made, and no name stands twice.
    """
    trusted = session.find({Attribute.TRUSTED: True})
    found = Counter(_text(session, key, Attribute.LABEL) for key in trusted)
    expected = {master.label for master in masters}
    _require_single(found)
    if set(found) != expected:
        raise PromiseBroken(f"TRUSTED objects are {sorted(found)}, expected {sorted(expected)}: no other may export a voice's key")
    for key in trusted:
        _audit_master(session, key)
    return _audit_names(session, expected)


def _audit_master(session: TokenSession, key: int) -> None:
    label = _text(session, key, Attribute.LABEL)
    only_key_wrap = int(Mechanism.AES_KEY_WRAP).to_bytes(8, sys.byteorder)
    for attribute, wanted in (
        *_KEPT_INSIDE,
        (Attribute.PRIVATE, TRUE),
        (Attribute.ENCRYPT, FALSE),
        (Attribute.DECRYPT, FALSE),
        (Attribute.SIGN, FALSE),
        (Attribute.DERIVE, FALSE),
        (Attribute.ALLOWED_MECHANISMS, only_key_wrap),
    ):
        if session.calls.read(session.handle, key, attribute) != wanted:
            raise PromiseBroken(f"{label} does not have {attribute.name} as its template says")


def _audit_names(session: TokenSession, masters: set[str]) -> frozenset[str]:
    """Every key under one of our names: one only, and none that could leave or be changed."""
    names = {name.value for name in KEYS} | masters
    found: Counter[str] = Counter()
    for kind in (ObjectClass.SECRET_KEY, ObjectClass.PRIVATE_KEY):
        for key in session.find({Attribute.CLASS: kind}):
            label = _text(session, key, Attribute.LABEL)
            if label not in names:
                continue
            found[label] += 1
            weak = [
                attribute.name
                for attribute, wanted in (
                    (Attribute.SENSITIVE, TRUE),
                    (Attribute.EXTRACTABLE, FALSE),
                    (Attribute.MODIFIABLE, FALSE),
                )
                if session.calls.read(session.handle, key, attribute) != wanted
            ]
            if weak:
                raise PromiseBroken(f"{label} could leave the token or be changed: {', '.join(weak)}")
    _require_single(found)
    return frozenset(found)


def _require_single(found: Counter[str]) -> None:
    twice = sorted(label for label, count in found.items() if count > 1)
    if twice:
        raise PromiseBroken(f"two keys stand under one name: {', '.join(twice)}")


def _text(session: TokenSession, key: int, attribute: Attribute) -> str:
    return session.calls.read(session.handle, key, attribute).decode(errors="replace")


def probe(session: TokenSession, master: RingMaster) -> None:
    """Raise PromiseBroken if the module allows, for this master, what must be refused. Leaves no key behind."""
    calls, handle = session.calls, session.handle
    key = session.key(master.label, ObjectClass.SECRET_KEY, trusted=True)
    dek = calls.generate_key(handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
    own = calls.generate_key(handle, Mechanism.AES_KEY_GEN, _OWN_WRAPPING_KEY)
    try:
        wrapped = calls.wrap(handle, key, dek)
        calls.destroy(handle, calls.unwrap(handle, key, wrapped, DEK_OPENING))  # the right request succeeds
        attempts: dict[str, Callable[[], int | None]] = {
            f"unwrap with {name}": _attempt_unwrap(session, key, wrapped, template) for name, template in _WEAKER.items()
        }
        attempts |= {
            "wrap a voice's key under a key that is not TRUSTED": lambda: _nothing(calls.wrap(handle, own, dek)),
            "wrap a voice's key by AES-CBC": lambda: _nothing(calls.wrap(handle, key, dek, Mechanism.AES_CBC)),
            "wrap the master itself": lambda: _nothing(calls.wrap(handle, key, key)),
            "read the master's value": lambda: _nothing(calls.read(handle, key, Attribute.VALUE)),
            "read a voice's key": lambda: _nothing(calls.read(handle, dek, Attribute.VALUE)),
            "let the user make a TRUSTED key": lambda: calls.generate_key(handle, Mechanism.AES_KEY_GEN, _FORGED_TRUSTED),
            "let the master decrypt": lambda: calls.set(handle, key, {Attribute.DECRYPT: True}),
            "copy the master to one that decrypts": lambda: calls.copy(
                handle, key, {Attribute.TOKEN: False, Attribute.DECRYPT: True}
            ),
            "copy a voice's key": lambda: calls.copy(handle, dek, {Attribute.TOKEN: False}),
            "let a voice's key derive": lambda: calls.set(handle, dek, {Attribute.DERIVE: True}),
            "decrypt with the master": lambda: calls.may_decrypt(handle, key, Mechanism.AES_ECB),
        }
        for promise, attempt in attempts.items():
            _must_refuse(session, promise, attempt)
        for attribute in DEK:
            _must_not_weaken(session, key, wrapped, attribute)
    finally:
        calls.destroy(handle, dek)
        calls.destroy(handle, own)


def answers_to_unwraps(session: TokenSession, master: RingMaster) -> dict[str, str]:
    """What the token answers to C_UnwrapKey of a fresh DEK with the full template, and with weaker ones: `OK` or a CKR name."""
    calls, handle = session.calls, session.handle
    key = session.key(master.label, ObjectClass.SECRET_KEY, trusted=True)
    dek = calls.generate_key(handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
    try:
        wrapped = calls.wrap(handle, key, dek)
    finally:
        calls.destroy(handle, dek)
    answers = {}
    for name, template in {"the full template": DEK_OPENING, **_WEAKER}.items():
        try:
            calls.destroy(handle, calls.unwrap(handle, key, wrapped, template))
            answers[name] = "OK"
        except CallFailed as error:
            answers[name] = str(error.answer)
    return answers


def _must_refuse(session: TokenSession, promise: str, attempt: Callable[[], int | None]) -> None:
    try:
        made = attempt()
    except CallFailed as error:
        if error.answer in LOST_SESSION:
            raise
        return
    if made is not None:
        session.calls.destroy(session.handle, made)
    raise PromiseBroken(f"the module must refuse to {promise}, and does not")


def _must_not_weaken(session: TokenSession, key: int, wrapped: bytes, left_out: Attribute) -> None:
    """An unwrap that leaves one attribute out is refused, or gives what the template says: some modules add, others compare."""
    template = {name: value for name, value in DEK_OPENING.items() if name != left_out}
    try:
        made = session.calls.unwrap(session.handle, key, wrapped, template)
    except CallFailed as error:
        if error.answer in LOST_SESSION:
            raise
        return
    value = session.calls.read(session.handle, made, left_out)
    session.calls.destroy(session.handle, made)
    wanted = DEK_OPENING[left_out]
    if not isinstance(wanted, int) or int.from_bytes(value, sys.byteorder) != wanted:
        raise PromiseBroken(f"the module weakens {left_out.name} of a voice's key where an unwrap leaves it out")


def _attempt_unwrap(session: TokenSession, key: int, wrapped: bytes, template: Template) -> Callable[[], int]:
    return lambda: session.calls.unwrap(session.handle, key, wrapped, template)


def _nothing(_: bytes) -> None:
    """What came out is not kept: that anything did is the breach."""


_WEAKER: Mapping[str, Template] = {
    f"{attribute.name} {value!r}": {**DEK_OPENING, attribute: value}
    for attribute, value in (
        (Attribute.KEY_TYPE, KeyType.GENERIC_SECRET),
        (Attribute.SENSITIVE, False),
        (Attribute.EXTRACTABLE, False),
        (Attribute.WRAP_WITH_TRUSTED, False),
        (Attribute.TOKEN, True),
        (Attribute.PRIVATE, False),
        (Attribute.WRAP, True),
        (Attribute.UNWRAP, True),
        (Attribute.DERIVE, True),
        (Attribute.COPYABLE, True),
        (Attribute.MODIFIABLE, True),
    )
}

_OWN_WRAPPING_KEY: Template = {
    Attribute.VALUE_LEN: AES_BYTES,
    Attribute.TOKEN: False,
    Attribute.PRIVATE: True,
    Attribute.WRAP: True,
    Attribute.UNWRAP: True,
}
_FORGED_TRUSTED: Template = {**_OWN_WRAPPING_KEY, Attribute.TRUSTED: True}
