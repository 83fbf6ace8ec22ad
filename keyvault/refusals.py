"""Start-up checks of a token: the audit of what it holds, and probes of what it must refuse.

A template is a promise only where the module enforces it, so each is tried: a weaker request must be refused, beside the
right one that must succeed. A module that allows one is refused with the promise named; nothing is opened with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from keyvault.errors import CallFailed, MasterMissing, PromiseBroken
from keyvault.hsm import RingMaster
from keyvault.pkcs11_masters import OWN_WRAPPING_KEY, TRUSTED_MASTERS, MasterKind
from keyvault.pkcs11_names import LOST_MODULE, LOST_SESSION, Answer, Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_signers import audit_later_version
from keyvault.pkcs11_start import TokenSession
from keyvault.templates import ANCHOR_LABEL, KEYS, versioned_signer

TRUE, FALSE = b"\x01", b"\x00"
_KEPT_INSIDE = ((Attribute.SENSITIVE, TRUE), (Attribute.EXTRACTABLE, FALSE), (Attribute.MODIFIABLE, FALSE))


_KINDS = frozenset({ObjectClass.SECRET_KEY, ObjectClass.PRIVATE_KEY, ObjectClass.PUBLIC_KEY})


@dataclass(frozen=True)
class Held:
    """What the audit found: the ring masters in order, and the names of every key."""

    masters: tuple[RingMaster, ...]
    names: frozenset[str]


def audit(
    session: TokenSession,
    allowed: Sequence[RingMaster],
    required: Sequence[RingMaster] | None = None,
    kind: MasterKind = TRUSTED_MASTERS,
) -> Held:
    """What the token holds. `required` is `allowed` unless given.

    Raises PromiseBroken where what passes for a master (a TRUSTED object, where those are the masters) is not one of
    `allowed`, was made otherwise, or a name stands twice, and where an object of the token is none of ours; MasterMissing where
    one of `required` is not there.
    """
    by_label = {master.label: master for master in allowed}
    held = _by_label(session, kind.all_in(session))
    _require_single(session, held)
    unknown = {label: found for label, found in held.items() if label not in by_label}
    if unknown:
        what = "TRUSTED objects" if kind.marked else "masters"
        raise PromiseBroken(f"{what} that nobody allowed: {_named(session, unknown)}; one more may export a voice's key")
    for key, *_ in held.values():
        _audit_master(session, key, kind)
    names = _audit_names(session, frozenset(by_label))
    missing = sorted({master.label for master in (allowed if required is None else required)} - set(held))
    if missing:
        raise MasterMissing(f"the token does not hold {', '.join(missing)}")
    _audit_objects(session, names | held.keys())
    return Held(tuple(sorted(by_label[label] for label in held)), names)


def _audit_master(session: TokenSession, key: int, kind: MasterKind) -> None:
    label = text(session, key, Attribute.LABEL)
    only_key_wrap = int(Mechanism.AES_KEY_WRAP).to_bytes(8, sys.byteorder)
    for attribute, wanted in (
        *_KEPT_INSIDE,
        (Attribute.PRIVATE, TRUE),
        (Attribute.ENCRYPT, FALSE),
        (Attribute.DECRYPT, FALSE),
        (Attribute.SIGN, FALSE),
        (Attribute.DERIVE, FALSE),
        (Attribute.ALLOWED_MECHANISMS, only_key_wrap),
        *(() if kind.marked else ((Attribute.COPYABLE, FALSE),)),
    ):
        if session.calls.read(session.handle, key, attribute) != wanted:
            raise PromiseBroken(f"{label} does not have {attribute.name} as its template says")


def _audit_names(session: TokenSession, masters: frozenset[str]) -> frozenset[str]:
    """Every key under one of our names: one only, and none that could leave or be changed."""
    names = {name.value for name in KEYS} | masters
    found: dict[str, list[int]] = {}
    for kind in (ObjectClass.SECRET_KEY, ObjectClass.PRIVATE_KEY):
        for label, keys in _by_label(session, session.find({Attribute.CLASS: kind})).items():
            if label in names or (kind is ObjectClass.PRIVATE_KEY and versioned_signer(label)):
                found.setdefault(label, []).extend(keys)
    _require_single(session, found)
    for label, (key, *_) in found.items():
        weak = [name.name for name, wanted in _KEPT_INSIDE if session.calls.read(session.handle, key, name) != wanted]
        if weak:
            raise PromiseBroken(f"{label} could leave the token or be changed: {', '.join(weak)}")
    _audit_versions(session, found)
    return frozenset(found)


def _audit_versions(session: TokenSession, found: Mapping[str, Sequence[int]]) -> None:
    """Later versions of signing keys: which of them sign is for their rows to say; how each was made is looked at here."""
    private = {label: list(keys) for label, keys in found.items() if versioned_signer(label)}
    public = _by_label(session, session.find({Attribute.CLASS: ObjectClass.PUBLIC_KEY}))
    for label, (key, *_) in private.items():
        audit_later_version(session, label, ObjectClass.PRIVATE_KEY, key)
        for half in public.get(label, []):
            audit_later_version(session, label, ObjectClass.PUBLIC_KEY, half)


def _audit_objects(session: TokenSession, names: AbstractSet[str]) -> None:
    """Every object that stays in the token is a key under one of `names`, or an anchor."""
    for key in session.find({Attribute.TOKEN: True}):
        kind = int.from_bytes(session.calls.read(session.handle, key, Attribute.CLASS), sys.byteorder)
        label = text(session, key, Attribute.LABEL)
        if not ((kind in _KINDS and label in names) or (kind == ObjectClass.DATA and label == ANCHOR_LABEL)):
            raise PromiseBroken(f"the token holds an object that is none of ours: {_named(session, {label: [key]})}")


def _by_label(session: TokenSession, keys: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key in keys:
        found.setdefault(text(session, key, Attribute.LABEL), []).append(key)
    return found


def _require_single(session: TokenSession, found: Mapping[str, Sequence[int]]) -> None:
    twice = {label: keys for label, keys in found.items() if len(keys) > 1}
    if twice:
        raise PromiseBroken(f"more than one key stands under one name: {_named(session, twice)}")


def _named(session: TokenSession, found: Mapping[str, Sequence[int]]) -> str:
    """Labels with the ids of their objects, for the one who must look."""
    ids = {label: [_id(session, key) for key in keys] for label, keys in found.items()}
    return "; ".join(f"{label!r} (ids {', '.join(ids[label])})" for label in sorted(ids))


def _id(session: TokenSession, key: int) -> str:
    try:
        return session.calls.read(session.handle, key, Attribute.ID).hex() or "none"
    except CallFailed as error:  # a data object has none, and says so
        if error.answer != Answer.ATTRIBUTE_TYPE_INVALID.name:
            raise
        return "none"


def text(session: TokenSession, key: int, attribute: Attribute) -> str:
    """An attribute that is text, as text."""
    return session.calls.read(session.handle, key, attribute).decode(errors="replace")


def probe(session: TokenSession, master: RingMaster, kind: MasterKind = TRUSTED_MASTERS) -> None:
    """Raise PromiseBroken if the module allows, for this master, what must be refused. Leaves no key behind."""
    calls, handle = session.calls, session.handle
    key = session.key(master.label, ObjectClass.SECRET_KEY, trusted=kind.marked)
    own = calls.generate_key(handle, Mechanism.AES_KEY_GEN, OWN_WRAPPING_KEY)
    dek, wrapped = kind.new_dek(session, key)
    try:
        calls.destroy(handle, calls.unwrap(handle, key, wrapped, kind.right))  # the right request succeeds
        attempts: dict[str, Callable[[], int | None]] = {
            f"unwrap with {name}": _attempt_unwrap(session, key, wrapped, template) for name, template in _weaker(kind).items()
        }
        attempts |= kind.attempts(session, key, dek, own)
        attempts |= {
            "wrap a voice's key by AES-CBC": lambda: _nothing(calls.wrap(handle, key, dek, Mechanism.AES_CBC)),
            "wrap the master itself": lambda: _nothing(calls.wrap(handle, key, key)),
            "read the master's value": lambda: _nothing(calls.read(handle, key, Attribute.VALUE)),
            "read a voice's key": lambda: _nothing(calls.read(handle, dek, Attribute.VALUE)),
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
        for attribute in kind.dek:
            _must_not_weaken(session, key, wrapped, kind.right, attribute)
    finally:
        calls.destroy(handle, dek)
        calls.destroy(handle, own)


def answers_to_unwraps(session: TokenSession, master: RingMaster, kind: MasterKind = TRUSTED_MASTERS) -> dict[str, str]:
    """What the token answers to C_UnwrapKey of a fresh DEK with the full template, and with weaker ones: `OK` or a CKR name."""
    calls, handle = session.calls, session.handle
    key = session.key(master.label, ObjectClass.SECRET_KEY, trusted=kind.marked)
    dek, wrapped = kind.new_dek(session, key)
    calls.destroy(handle, dek)
    answers = {}
    for name, template in {"the full template": kind.right, **_weaker(kind)}.items():
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
        if error.answer in LOST_SESSION | LOST_MODULE:  # no word about the request
            raise
        return
    if made is not None:
        session.calls.destroy(session.handle, made)
    raise PromiseBroken(f"the module must refuse to {promise}, and does not")


def _must_not_weaken(session: TokenSession, key: int, wrapped: bytes, right: Template, left_out: Attribute) -> None:
    """An unwrap that leaves one attribute out is refused, or gives what the template says: some modules add, others compare."""
    template = {name: value for name, value in right.items() if name != left_out}
    try:
        made = session.calls.unwrap(session.handle, key, wrapped, template)
    except CallFailed as error:
        if error.answer in LOST_SESSION | LOST_MODULE:  # no word about the request
            raise
        return
    value = session.calls.read(session.handle, made, left_out)
    session.calls.destroy(session.handle, made)
    wanted = right[left_out]
    if not isinstance(wanted, int) or int.from_bytes(value, sys.byteorder) != wanted:
        raise PromiseBroken(f"the module weakens {left_out.name} of a voice's key where an unwrap leaves it out")


def _attempt_unwrap(session: TokenSession, key: int, wrapped: bytes, template: Template) -> Callable[[], int]:
    return lambda: session.calls.unwrap(session.handle, key, wrapped, template)


def _nothing(_: bytes) -> None:
    """What came out is not kept: that anything did is the breach."""


def _weaker(kind: MasterKind) -> dict[str, Template]:
    """The right request with one attribute of the fixed part changed: each answer but a refusal is another key than promised."""
    changed: dict[Attribute, int] = {Attribute.KEY_TYPE: KeyType.GENERIC_SECRET}
    changed |= {name: not value for name, value in kind.dek.items() if isinstance(value, bool)}
    return {f"{name.name} {value!r}": {**kind.right, name: value} for name, value in changed.items()}
