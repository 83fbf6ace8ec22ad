"""Objects that stay in the token, beyond keys in use: which masters it holds, its anchors, and the end of a master."""

from __future__ import annotations

import sys

from keyvault.errors import HsmUnavailable, PromiseBroken
from keyvault.hsm import RingMaster
from keyvault.pkcs11_masters import TRUSTED_MASTERS, MasterKind
from keyvault.pkcs11_names import Attribute, ObjectClass
from keyvault.pkcs11_start import TokenSession
from keyvault.refusals import text
from keyvault.templates import ANCHOR_LABEL, anchor_object

_AGREED = (
    Attribute.CLASS,
    Attribute.KEY_TYPE,
    Attribute.TOKEN,
    Attribute.PRIVATE,
    Attribute.SENSITIVE,
    Attribute.EXTRACTABLE,
    Attribute.MODIFIABLE,
    Attribute.ENCRYPT,
    Attribute.DECRYPT,
    Attribute.SIGN,
    Attribute.VERIFY,
    Attribute.WRAP,
    Attribute.UNWRAP,
    Attribute.DERIVE,
    Attribute.ALLOWED_MECHANISMS,
)
"""Attributes that every site's object of a master must have equal, beside the marks of its kind. Two differ by birthplace and
are left out: LOCAL and ALWAYS_SENSITIVE are true only where the master was generated. Templates cannot be read back; probes
stand for them."""


def held(session: TokenSession, kind: MasterKind = TRUSTED_MASTERS) -> dict[str, tuple[str, ...]]:
    """Masters in the token now, by label, with their agreed attributes as sorted text. Raises PromiseBroken."""
    found: dict[str, tuple[str, ...]] = {}
    for key in kind.all_in(session):
        label = text(session, key, Attribute.LABEL)
        if label in found:
            raise PromiseBroken(f"two masters stand under the one name {label!r}")
        found[label] = tuple(sorted(f"{name.name}={_number(session, key, name):x}" for name in (*_AGREED, *kind.marks)))
    return found


def _number(session: TokenSession, key: int, attribute: Attribute) -> int:
    return int.from_bytes(session.calls.read(session.handle, key, attribute), sys.byteorder)


def anchors(session: TokenSession) -> dict[int, bytes]:
    """The anchor objects' values by handle."""
    found = session.find({Attribute.CLASS: ObjectClass.DATA, Attribute.LABEL: ANCHOR_LABEL})
    return {key: session.calls.read(session.handle, key, Attribute.VALUE) for key in found}


def replace_anchors(session: TokenSession, anchor: bytes) -> None:
    """Write `anchor`, then destroy the others: at every moment one of them stands in the token."""
    before = anchors(session)
    session.calls.create(session.handle, anchor_object(anchor))
    for key in before:
        session.calls.destroy(session.handle, key)


def destroy_master(session: TokenSession, master: RingMaster) -> None:
    """Destroy every object that carries the master's id or its label: the user can make clones, also with one of them changed."""
    for key in master_objects(session, master):
        session.calls.destroy(session.handle, key)


def require_gone(session: TokenSession, master: RingMaster) -> None:
    """Raise HsmUnavailable where `session`, a new one, still finds an object of this master."""
    left = master_objects(session, master)
    if left:
        raise HsmUnavailable(f"{len(left)} objects of {master.label} are still in the token: destroy it again")


def master_objects(session: TokenSession, master: RingMaster) -> set[int]:
    """Handles of all objects with this master's id, or its label."""
    by_id = session.find({Attribute.ID: master.label.encode()})
    return {*by_id, *session.find({Attribute.LABEL: master.label})}
