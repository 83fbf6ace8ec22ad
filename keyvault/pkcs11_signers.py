"""Versions of a signing key in the token: which there are, one more, and the end of one. Sessions are the user's."""

from __future__ import annotations

import sys

from keyvault.errors import CeremonyRefused, HsmUnavailable, KeyNotFound, PromiseBroken
from keyvault.hsm import KeyName, signer_label
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession
from keyvault.templates import KEYS, signer_plan, versioned_signer

# SubjectPublicKeyInfo up to the key itself: RFC 5480 (P-256, uncompressed point) and RFC 8410 (Ed25519).
_SPKI_P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")
_SPKI_ED25519 = bytes.fromhex("302a300506032b6570032100")
_HALVES = (ObjectClass.PRIVATE_KEY, ObjectClass.PUBLIC_KEY)


def public_key(session: TokenSession, name: KeyName, version: int = 1) -> bytes:
    """SubjectPublicKeyInfo (DER) of a signing key's public half, looked for anew. Raises KeyNotFound, PromiseBroken."""
    label = signer_label(name, version)
    (key,) = _one(session, label, ObjectClass.PUBLIC_KEY)
    point = session.calls.read(session.handle, key, Attribute.EC_POINT)[2:]  # an OCTET STRING of under 128 bytes
    return (_SPKI_ED25519 if KEYS[name].mechanism is Mechanism.EDDSA else _SPKI_P256) + point


def versions(session: TokenSession, name: KeyName) -> tuple[int, ...]:
    """Versions with any object in the token, in order; a pair whose making was cut off counts too."""
    found = set()
    for kind in _HALVES:
        for key in session.find({Attribute.CLASS: kind, Attribute.TOKEN: True}):
            label = session.calls.read(session.handle, key, Attribute.LABEL).decode(errors="replace")
            later = versioned_signer(label)
            if label == name.value:
                found.add(1)
            elif later is not None and later[0] is name:
                found.add(later[1])
    return tuple(sorted(found))


def make(session: TokenSession, name: KeyName, version: int) -> bytes:
    """Generate the pair; its public half. Raises CeremonyRefused where the label is taken."""
    plan = signer_plan(name, version)
    label = signer_label(name, version)
    if session.find({Attribute.LABEL: label}) or session.find({Attribute.ID: label.encode()}):
        raise CeremonyRefused(f"the token already holds a key {label!r}")
    assert plan.public is not None
    session.calls.generate_pair(session.handle, plan.generate, plan.public, plan.template)
    return public_key(session, name, version)


def destroy(session: TokenSession, name: KeyName, version: int) -> None:
    """Destroy every object under the version's label or id, the private half first."""
    for key in sorted(_objects(session, name, version), key=lambda key: _class(session, key), reverse=True):
        session.calls.destroy(session.handle, key)


def require_gone(session: TokenSession, name: KeyName, version: int) -> None:
    """Raise HsmUnavailable where `session`, a new one, still finds an object of this version."""
    left = _objects(session, name, version)
    if left:
        raise HsmUnavailable(f"{len(left)} objects of {signer_label(name, version)} are still in the token: destroy it again")


def audit_later_version(session: TokenSession, label: str, kind: ObjectClass, key: int) -> None:
    """Raise PromiseBroken unless this half was generated in the token and has every flag of its template.

    COPYABLE is left out: not every module lets it be read.
    """
    found = versioned_signer(label)
    assert found is not None
    plan = signer_plan(*found)
    made: Template = plan.template if kind is ObjectClass.PRIVATE_KEY else plan.public or {}
    flags = {name: value for name, value in made.items() if isinstance(value, bool) and name is not Attribute.COPYABLE}
    for attribute, wanted in {**flags, Attribute.LOCAL: True}.items():
        if session.calls.read(session.handle, key, attribute) != bytes([wanted]):
            raise PromiseBroken(f"{label} does not have {attribute.name} as a key that was generated here has it")


def _one(session: TokenSession, label: str, kind: ObjectClass) -> list[int]:
    found = session.find({Attribute.CLASS: kind, Attribute.LABEL: label})
    if not found:
        raise KeyNotFound(f"the token holds no key {label!r}")
    if len(found) > 1:
        raise PromiseBroken(f"{len(found)} keys stand under the one name {label!r}")
    return found


def _objects(session: TokenSession, name: KeyName, version: int) -> set[int]:
    label = signer_label(name, version)
    return {*session.find({Attribute.LABEL: label}), *session.find({Attribute.ID: label.encode()})}


def _class(session: TokenSession, key: int) -> int:
    return int.from_bytes(session.calls.read(session.handle, key, Attribute.CLASS), sys.byteorder)
