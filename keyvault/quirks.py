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
from keyvault.pkcs11_masters import TRUSTED_MASTERS, MasterKind, SplitMasters
from keyvault.pkcs11_names import Answer, Attribute, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession

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
    trusted_masters: bool
    """Whether an officer makes the masters TRUSTED. Where no AES key can be, two tokens hold each: `split_templates.py`."""
    wrap_template: bool = True
    """Of masters that are not TRUSTED: whether the module holds them by a WRAP_TEMPLATE to keys that were born in the token."""
    wraps_by: Mechanism = Mechanism.AES_KEY_WRAP
    """RFC 3394: the one mechanism that SoftHSM and NSS both do alike (SoftHSM's 0x210A is KWP of RFC 5649)."""
    templates: Templates | None = None
    room_for_tag: bool | None = None
    """Whether C_Decrypt (AES-GCM) wants room for the tag beside the plaintext. The door gives that room to every module."""

    refused: str = ""
    """Why no kind of master is safe in such a module, where that is known beforehand."""

    def masters(self, *, rotation: bool = False) -> MasterKind:
        """The kind of master that such a module holds, in the token that serves or in the one that re-wraps.

        Raises ModuleRefused for a rotation token where masters are TRUSTED: there the serving token re-wraps.
        """
        if not self.trusted_masters:
            return SplitMasters(rotation, self.wrap_template)
        if rotation:
            raise ModuleRefused(f"the profile {self.name!r} has no rotation token: its masters are TRUSTED")
        return TRUSTED_MASTERS


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        # Measured, 2.6.1.
        Profile("softhsm", ("SoftHSM",), trusted_masters=True, templates=Templates.COMPARED, room_for_tag=True),
        # The same module used as if it had no TRUSTED keys: how the split profile is tested. Chosen by name alone.
        Profile("softhsm-split", (), trusted_masters=False, templates=Templates.COMPARED, room_for_tag=True),
        # Measured, 3.87: no TRUSTED on AES keys; WRAP_WITH_TRUSTED is ignored. For interoperability tests only.
        Profile(
            "nss", ("Mozilla Foundation", "NSS "), trusted_masters=False, refused="an EXTRACTABLE=0 key of theirs can be wrapped"
        ),
        # Documented, not tested: the crypto officer sets TRUSTED on a key that a user made, WRAP_WITH_TRUSTED cannot be unset,
        # and the HSM adds the template's attributes. The ceremony would have to differ: no copy is needed there.
        Profile("cloudhsm", ("CloudHSM", "Cavium"), trusted_masters=True, templates=Templates.ADDED),
        # Documented, not tested: roles are partition officer, crypto officer and crypto user; the crypto user may make public
        # objects only, so a vault would log in as crypto officer. Nothing found on TRUSTED for AES keys: treated as absent.
        Profile("luna", ("SafeNet", "Thales", "Gemalto"), trusted_masters=False),
        # Whatever else: the start's probes alone say whether it can be used.
        Profile("generic", (), trusted_masters=True),
        Profile("generic-split", (), trusted_masters=False),
    )
}


def chosen(name: str | None, *descriptions: str) -> Profile:
    """The named profile, else the one that knows the module's description, else `generic`. Raises ModuleRefused.

    A profile whose masters are not TRUSTED is weaker and holds each master twice: it is used where it is named, never found.
    """
    if name is not None and name not in PROFILES:
        raise ModuleRefused(f"there is no profile {name!r}: GLOTTIS_PKCS11_PROFILE is one of {', '.join(PROFILES)}")
    known = (profile for profile in PROFILES.values() if profile.recognised_by and _knows(profile, descriptions))
    profile = PROFILES[name] if name is not None else next(known, PROFILES["generic"])
    if profile.refused:
        raise ModuleRefused(f"modules of the kind {profile.name!r} are never served from: {profile.refused}")
    if name is None and not profile.trusted_masters:
        raise ModuleRefused(f"no AES key can be TRUSTED in modules of the kind {profile.name!r}: name that, GLOTTIS_PKCS11_PROFILE")
    return profile


def _knows(profile: Profile, descriptions: tuple[str, ...]) -> bool:
    return any(description.strip().startswith(profile.recognised_by) for description in descriptions)


def require(session: TokenSession, master: RingMaster, profile: Profile, kind: MasterKind = TRUSTED_MASTERS) -> None:
    """Raise ModuleRefused where the token refutes a claim of the profile. `session` is one that is closed afterwards."""
    templates, room = measured(session, master, kind)
    for what, claimed, found in (
        ("UNWRAP_TEMPLATE is", profile.templates, templates),
        ("room for the tag is wanted:", profile.room_for_tag, room),
    ):
        if None not in (claimed, found) and claimed != found:
            raise ModuleRefused(f"the profile {profile.name!r} says that {what} {claimed}; the token shows: {found}")


def measured(session: TokenSession, master: RingMaster, kind: MasterKind = TRUSTED_MASTERS) -> tuple[Templates, bool | None]:
    """What the token does with a template that leaves an attribute out, and whether C_Decrypt wants room for the tag.

    The second is None in a token whose keys never decrypt.
    """
    calls, handle = session.calls, session.handle
    wrapping = session.key(master.label, ObjectClass.SECRET_KEY, trusted=kind.marked)
    dek, wrapped = kind.new_dek(session, wrapping)
    try:
        templates = _templates(session, wrapping, wrapped, kind.right)
        if not kind.right[Attribute.DECRYPT]:
            return templates, None
        with LockedBuffer(_SAMPLE) as sample:
            sealed = calls.encrypt(handle, dek, bytes(12), b"", sample.address, _SAMPLE)
            opening = calls.unwrap(handle, wrapping, wrapped, kind.right)
            try:
                return templates, _wants_room(session, opening, sealed, sample)
            finally:
                calls.destroy(handle, opening)
    finally:
        calls.destroy(handle, dek)


def _templates(session: TokenSession, wrapping: int, wrapped: bytes, right: Template) -> Templates:
    short: Template = {name: value for name, value in right.items() if name != Attribute.DERIVE}
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
