"""What a ring master is in a token: how one is found, how it gives and moves voices' keys, and what it must refuse.

There are two kinds. `TrustedMasters` (design of this door) are marked TRUSTED by the security officer: a mark that nobody with
the user PIN can make, so that voices' keys may stay extractable under such masters alone, and re-wrap under the serving PIN.
`SplitMasters` are for modules in which no AES key can be TRUSTED: two tokens hold each master, and only the one with the
rotation PIN re-wraps (`split_templates.py`). What is weaker there: whoever has the serving PIN can put a master of his own in
the place of one; the two sites' comparison tells, and nothing in the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from keyvault.errors import RotationPinNeeded, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.pkcs11_deks import OPENING, SIGNING, generate_wrapped, rewrapped, unwrap
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenSession
from keyvault.pkcs11_structures import EncodedTemplate
from keyvault.split_templates import BORN_DEK, MOVED_DEK, SERVED_DEK, rotation_master, served, serving_master
from keyvault.templates import AES_BYTES, CANARY, DEK, DEK_OPENING, DEK_SEALING

Attempts = Mapping[str, Callable[[], int | None]]
"""What a module must refuse, by name: each returns the handle of what was made, None where nothing was."""


class MasterKind(Protocol):
    """One kind of ring master. Its data are templates; its methods work on a borrowed session."""

    @property
    def marked(self) -> bool:
        """Whether TRUSTED tells a master from whatever else has its label."""

    @property
    def marks(self) -> tuple[Attribute, ...]:
        """Attributes of this kind that both sites' objects must have equal, beyond those of every kind."""

    @property
    def dek(self) -> Template:
        """The fixed part of a voice's key: the master's UNWRAP_TEMPLATE."""

    @property
    def right(self) -> Template:
        """A request that must succeed: the probes leave out and change its parts."""

    @property
    def opening(self) -> EncodedTemplate:
        """What an unwrap asks for, to decrypt with the key."""

    @property
    def signing(self) -> EncodedTemplate:
        """The same, to compare two sites."""

    def all_in(self, session: TokenSession) -> list[int]:
        """Handles of every object that passes for a master of this kind."""

    def new_dek(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        """A voice's new key, to seal with, and the same wrapped under `wrapping`."""

    def new_canary(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        """The same, to sign with."""

    def rewrapped(self, session: TokenSession, source: int, target: int, blobs: Sequence[bytes]) -> list[bytes | UnwrapRejected]:
        """Each key under `target` instead of `source`, or why not. Raises RotationPinNeeded where this token never does it."""

    def attempts(self, session: TokenSession, master: int, dek: int, own: int, /) -> Attempts:
        """What must be refused of this kind beyond what every kind refuses. `own` is a wrapping key that the user made."""


class TrustedMasters:
    """Marked by the officer; voices' keys leave the token under no other key (CKA_WRAP_WITH_TRUSTED)."""

    marked = True
    marks: tuple[Attribute, ...] = (Attribute.TRUSTED, Attribute.WRAP_WITH_TRUSTED)
    dek, right = DEK, DEK_OPENING
    opening, signing = OPENING, SIGNING

    def all_in(self, session: TokenSession) -> list[int]:
        return session.find({Attribute.TRUSTED: True})

    def new_dek(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        return generate_wrapped(session, wrapping, DEK_SEALING)

    def new_canary(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        return generate_wrapped(session, wrapping, CANARY)

    def rewrapped(self, session: TokenSession, source: int, target: int, blobs: Sequence[bytes]) -> list[bytes | UnwrapRejected]:
        return rewrapped(session, source, target, blobs)

    def attempts(self, session: TokenSession, _master: int, dek: int, own: int, /) -> Attempts:
        calls, handle = session.calls, session.handle
        return {
            "wrap a voice's key under a key that is not TRUSTED": lambda: _nothing(calls.wrap(handle, own, dek)),
            "let the user make a TRUSTED key": lambda: calls.generate_key(handle, Mechanism.AES_KEY_GEN, _FORGED_TRUSTED),
        }


_RING = "ring/"
_SERVED_SEALING = EncodedTemplate(served(Attribute.ENCRYPT))
_SERVED_OPENING = EncodedTemplate(served(Attribute.DECRYPT))
_SERVED_SIGNING = EncodedTemplate(served(Attribute.SIGN))
_MOVED = EncodedTemplate(MOVED_DEK)


@dataclass(frozen=True)
class SplitMasters:
    """Masters of two tokens. `rotation`: this is the token that re-wraps; `wrap_template`: the module takes one."""

    rotation: bool = False
    wrap_template: bool = True

    marked: ClassVar = False
    marks: ClassVar[tuple[Attribute, ...]] = (Attribute.COPYABLE,)
    opening: ClassVar = _SERVED_OPENING
    signing: ClassVar = _SERVED_SIGNING

    @property
    def dek(self) -> Template:
        return MOVED_DEK if self.rotation else SERVED_DEK

    @property
    def right(self) -> Template:
        return MOVED_DEK if self.rotation else served(Attribute.DECRYPT)

    def template(self, master: RingMaster) -> Template:
        """The object of `master` in this token."""
        return rotation_master(master) if self.rotation else serving_master(master, wrap_template=self.wrap_template)

    def all_in(self, session: TokenSession) -> list[int]:
        found = session.find({Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.TOKEN: True})
        return [key for key in found if session.calls.read(session.handle, key, Attribute.LABEL).startswith(_RING.encode())]

    def new_dek(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        return self._made(session, wrapping, _SERVED_SEALING)

    def new_canary(self, session: TokenSession, wrapping: int) -> tuple[int, bytes]:
        return self._made(session, wrapping, _SERVED_SIGNING)

    def _made(self, session: TokenSession, wrapping: int, template: EncodedTemplate) -> tuple[int, bytes]:
        """Born extractable and without use, wrapped, destroyed; the key that is used came out of its own blob, shut."""
        born, blob = generate_wrapped(session, wrapping, BORN_DEK)
        session.calls.destroy(session.handle, born)
        return unwrap(session, wrapping, blob, _MOVED if self.rotation else template), blob

    def rewrapped(self, session: TokenSession, source: int, target: int, blobs: Sequence[bytes]) -> list[bytes | UnwrapRejected]:
        if not self.rotation:
            raise RotationPinNeeded
        return rewrapped(session, source, target, blobs, _MOVED)

    def attempts(self, session: TokenSession, master: int, dek: int, own: int, /) -> Attempts:
        calls, handle = session.calls, session.handle
        found: dict[str, Callable[[], int | None]] = {"copy the master": lambda: calls.copy(handle, master, {})}
        if not self.rotation:
            found["wrap a voice's key under another key"] = lambda: _nothing(calls.wrap(handle, own, dek))
            found["wrap a voice's key again"] = lambda: _nothing(calls.wrap(handle, master, dek))
        if self.wrap_template and not self.rotation:
            found["wrap a key of known value"] = lambda: _wrap_known(session, master)
        return found


TRUSTED_MASTERS: MasterKind = TrustedMasters()


def _wrap_known(session: TokenSession, master: int) -> None:
    known = session.calls.create(session.handle, _KNOWN)
    try:
        session.calls.wrap(session.handle, master, known)
    finally:
        session.calls.destroy(session.handle, known)


def _nothing(_: bytes) -> None:
    """What came out is not kept: that anything did is the breach."""


OWN_WRAPPING_KEY: Template = {
    Attribute.VALUE_LEN: AES_BYTES,
    Attribute.TOKEN: False,
    Attribute.PRIVATE: True,
    Attribute.WRAP: True,
    Attribute.UNWRAP: True,
}
"""A key as whoever has the user PIN can make one."""
_FORGED_TRUSTED: Template = {**OWN_WRAPPING_KEY, Attribute.TRUSTED: True}
_KNOWN: Template = {
    Attribute.CLASS: ObjectClass.SECRET_KEY,
    Attribute.KEY_TYPE: KeyType.AES,
    Attribute.VALUE: bytes(AES_BYTES),
    Attribute.TOKEN: False,
    Attribute.SENSITIVE: True,
    Attribute.EXTRACTABLE: True,
}
