"""What PKCS#11 modules do differently, as data; and what a start measures before it believes any of it.

A profile says what is expected of a module. It is chosen by the setting, or by what the module says about itself; then the
start tries the same things on the token. A profile that claims what the token refutes is refused: data never stands in for
behaviour. What no profile may waive are the promises of `refusals.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from keyvault.errors import CallFailed, ModuleRefused
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_names import Answer, Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession
from keyvault.templates import DEK_OPENING, DEK_SEALING

_SAMPLE = 32


class Templates(StrEnum):
    """What a module does with a master's UNWRAP_TEMPLATE where a request leaves an attribute out."""

    COMPARED = "compared"  # refused: the request must repeat every attribute
    ADDED = "added"  # the attribute is put there


@dataclass(frozen=True)
class Profile:
    """One kind of module. None stands for what is not known: then the start's measure alone decides."""

    name: str
    recognised_by: tuple[str, ...]
    """Beginnings of what C_GetInfo names as manufacturer or library."""
    trusted_keys: bool
    """Whether an officer can make an AES key TRUSTED, which the masters of this door are."""
    wraps_by: Mechanism = Mechanism.AES_KEY_WRAP
    """RFC 3394: the one mechanism that SoftHSM and NSS both do alike (SoftHSM's 0x210A is KWP of RFC 5649)."""
    templates: Templates | None = None
    room_for_tag: bool | None = None
    """Whether C_Decrypt (AES-GCM) wants room for the tag beside the plaintext. The door gives that room to every module."""


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        # Measured, 2.6.1.
        Profile("softhsm", ("SoftHSM",), trusted_keys=True, templates=Templates.COMPARED, room_for_tag=True),
        # Measured, 3.87: no TRUSTED on AES keys; WRAP_WITH_TRUSTED is ignored, and an EXTRACTABLE=0 key can be wrapped.
        # For interoperability tests only.
        Profile("nss", ("Mozilla Foundation", "NSS "), trusted_keys=False),
        # Documented, not tested: the crypto officer sets TRUSTED on a key that a user made, WRAP_WITH_TRUSTED cannot be unset,
        # and the HSM adds the template's attributes. The ceremony would have to differ: no copy is needed there.
        Profile("cloudhsm", ("CloudHSM", "Cavium"), trusted_keys=True, templates=Templates.ADDED),
        # Documented, not tested: roles are partition officer, crypto officer and crypto user; the crypto user may make public
        # objects only, so a vault would log in as crypto officer. Nothing found on TRUSTED for AES keys: treated as absent.
        Profile("luna", ("SafeNet", "Thales", "Gemalto"), trusted_keys=False),
        # Whatever else: the start's probes alone say whether it can be used.
        Profile("generic", (), trusted_keys=True),
    )
}


def chosen(name: str | None, *descriptions: str) -> Profile:
    """The named profile, else the one that knows the module's description, else `generic`. Raises ModuleRefused.

    A profile without TRUSTED keys is refused: there, masters would need two partitions, which this door does not do.
    """
    if name is not None and name not in PROFILES:
        raise ModuleRefused(f"there is no profile {name!r}: GLOTTIS_PKCS11_PROFILE is one of {', '.join(PROFILES)}")
    known = (profile for profile in PROFILES.values() if profile.recognised_by and _knows(profile, descriptions))
    profile = PROFILES[name] if name is not None else next(known, PROFILES["generic"])
    if not profile.trusted_keys:
        raise ModuleRefused(f"modules of the kind {profile.name!r} have no TRUSTED AES keys, which the masters here must be")
    return profile


def _knows(profile: Profile, descriptions: tuple[str, ...]) -> bool:
    return any(description.strip().startswith(profile.recognised_by) for description in descriptions)


def require(session: TokenSession, master: RingMaster, profile: Profile) -> None:
    """Raise ModuleRefused where the token refutes a claim of the profile. `session` is one that is closed afterwards."""
    templates, room = measured(session, master)
    for what, claimed, found in (
        ("UNWRAP_TEMPLATE is", profile.templates, templates),
        ("room for the tag is wanted:", profile.room_for_tag, room),
    ):
        if claimed is not None and claimed != found:
            raise ModuleRefused(f"the profile {profile.name!r} says that {what} {claimed}; the token shows: {found}")


def measured(session: TokenSession, master: RingMaster) -> tuple[Templates, bool]:
    """What the token does with a template that leaves an attribute out, and whether C_Decrypt wants room for the tag."""
    calls, handle = session.calls, session.handle
    wrapping = session.key(master.label, ObjectClass.SECRET_KEY, trusted=True)
    dek = calls.generate_key(handle, Mechanism.AES_KEY_GEN, DEK_SEALING)
    try:
        wrapped = calls.wrap(handle, wrapping, dek)
        templates = _templates(session, wrapping, wrapped)
        with LockedBuffer(_SAMPLE) as sample:
            sealed = calls.encrypt(handle, dek, bytes(12), b"", sample.address, _SAMPLE)
            opening = calls.unwrap(handle, wrapping, wrapped, DEK_OPENING)
            try:
                return templates, _wants_room(session, opening, sealed, sample)
            finally:
                calls.destroy(handle, opening)
    finally:
        calls.destroy(handle, dek)


def _templates(session: TokenSession, wrapping: int, wrapped: bytes) -> Templates:
    short: Template = {name: value for name, value in DEK_OPENING.items() if name != Attribute.DERIVE}
    try:
        session.calls.destroy(session.handle, session.calls.unwrap(session.handle, wrapping, wrapped, short))
    except CallFailed as error:
        if error.answer in {Answer.TEMPLATE_INCONSISTENT.name, Answer.TEMPLATE_INCOMPLETE.name}:
            return Templates.COMPARED
        raise
    return Templates.ADDED


def _wants_room(session: TokenSession, key: int, sealed: bytes, room: LockedBuffer) -> bool:
    try:
        session.calls.decrypt(session.handle, key, bytes(12), b"", sealed, room.address, _SAMPLE)
    except CallFailed as error:
        if error.answer == Answer.BUFFER_TOO_SMALL.name:
            return True
        raise
    return False
