"""How one master is made in a token, carried to others and kept: one way for each kind of master (`pkcs11_masters.py`).

`OfficersWay` makes TRUSTED masters: session objects of the security officer, which the user copies into the token.
`SplitWay` makes the others, with the user's PIN alone. The value is born as an extractable session object without any use, is
wrapped once for each token that is to hold it, the maker's own too, and ends before anything else is done. Each token takes it by
a one-time key that is a session object of the same process: who holds the PIN later has the recorded messages and no key for
them, and the master that was taken fixes by its UNWRAP_TEMPLATE what he can ask of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from keyvault import one_time_keys
from keyvault.ceremony import as_role
from keyvault.errors import CeremonyRefused
from keyvault.hsm import RingMaster
from keyvault.pkcs11_masters import TRUSTED_MASTERS, MasterKind, SplitMasters
from keyvault.pkcs11_names import Attribute, Mechanism, Role
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import TokenConfig, TokenSession
from keyvault.split_templates import carried_master
from keyvault.templates import MASTER_BY_USER, master_by_officer

_TOLD = (
    Attribute.PRIVATE,
    Attribute.SENSITIVE,
    Attribute.EXTRACTABLE,
    Attribute.MODIFIABLE,
    Attribute.WRAP,
    Attribute.UNWRAP,
    Attribute.ENCRYPT,
    Attribute.DECRYPT,
    Attribute.SIGN,
    Attribute.DERIVE,
)


@dataclass(frozen=True)
class Pins:
    """The two PINs of a token, for the length of one step. Masters that are not TRUSTED need no officer's."""

    officer: str = field(repr=False)
    user: str = field(repr=False)


class Way(Protocol):
    """What one kind of master needs of a ceremony. The session is on the token whose PINs it was made with."""

    def made(
        self, session: TokenSession, master: RingMaster, transports: Sequence[Template], digest: Mechanism
    ) -> tuple[Sequence[bytes], tuple[str, ...]]:
        """Make `master` here, wrapped once for each of the one-time keys; and what the token says of what it holds."""

    def pair(self, session: TokenSession) -> AbstractContextManager[tuple[int, int]]:
        """A one-time key pair (public, private): session objects that can be used until the block ends."""

    def unwrapped(self, session: TokenSession, private: int, master: RingMaster, wrapped: bytes, digest: Mechanism) -> int:
        """The master out of its message; `kept` finishes it. Raises CallFailed."""

    def kept(self, session: TokenSession, key: int) -> tuple[str, ...]:
        """Make it the token's for good; and what the token says of it."""


@dataclass(frozen=True)
class OfficersWay:
    """TRUSTED masters."""

    config: TokenConfig
    pins: Pins

    def made(
        self, session: TokenSession, master: RingMaster, transports: Sequence[Template], digest: Mechanism
    ) -> tuple[Sequence[bytes], tuple[str, ...]]:
        if len(transports) != 1:
            raise CeremonyRefused("one one-time key is wanted here: the other site holds masters of another kind")
        with as_role(session, Role.SECURITY_OFFICER, self.pins.officer, self.config):
            key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, master_by_officer(master))
            wrapped = _wrapped_for(session, {Attribute.TRUSTED: True, **transports[0]}, key, digest)
        return [wrapped], self.kept(session, key)

    @contextmanager
    def pair(self, session: TokenSession) -> Iterator[tuple[int, int]]:
        with as_role(session, Role.SECURITY_OFFICER, self.pins.officer, self.config):
            made = one_time_keys.made(session, private=False)  # the officer sees no private objects
        yield made

    def unwrapped(self, session: TokenSession, private: int, master: RingMaster, wrapped: bytes, digest: Mechanism) -> int:
        wanted = master_by_officer(master)
        template: Template = {name: value for name, value in wanted.items() if name is not Attribute.VALUE_LEN}
        with as_role(session, Role.SECURITY_OFFICER, self.pins.officer):
            return session.calls.unwrap_oaep(session.handle, private, wrapped, template, digest)

    def kept(self, session: TokenSession, key: int) -> tuple[str, ...]:
        # The PIN was accepted in this ceremony already: another process's refusals do not end it half done.
        with as_role(session, Role.USER, self.pins.user):
            kept = session.calls.copy(session.handle, key, MASTER_BY_USER)
            session.calls.destroy(session.handle, key)
            return _told(session, kept, TRUSTED_MASTERS)


@dataclass(frozen=True)
class SplitWay:
    """Masters of the serving token or of the rotation token."""

    pins: Pins
    kind: SplitMasters

    def made(
        self, session: TokenSession, master: RingMaster, transports: Sequence[Template], digest: Mechanism
    ) -> tuple[Sequence[bytes], tuple[str, ...]]:
        calls, handle = session.calls, session.handle
        with self.pair(session) as (public, private):
            own = one_time_keys.template(one_time_keys.public_bytes(session, public))
            key = calls.generate_key(handle, Mechanism.AES_KEY_GEN, carried_master())
            *blobs, mine = [_wrapped_for(session, transport, key, digest) for transport in (*transports, own)]
            calls.destroy(handle, key)
            return blobs, self.kept(session, self.unwrapped(session, private, master, mine, digest))

    @contextmanager
    def pair(self, session: TokenSession) -> Iterator[tuple[int, int]]:
        with as_role(session, Role.USER, self.pins.user):
            yield one_time_keys.made(session, private=True)

    def unwrapped(self, session: TokenSession, private: int, master: RingMaster, wrapped: bytes, digest: Mechanism) -> int:
        return session.calls.unwrap_oaep(session.handle, private, wrapped, self.kind.template(master), digest)

    def kept(self, session: TokenSession, key: int) -> tuple[str, ...]:
        return _told(session, key, self.kind)


def way(config: TokenConfig, pins: Pins, kind: MasterKind) -> Way:
    """The way of this kind."""
    return SplitWay(pins, kind) if isinstance(kind, SplitMasters) else OfficersWay(config, pins)


def _wrapped_for(session: TokenSession, transport: Template, key: int, digest: Mechanism) -> bytes:
    wrapping = session.calls.create(session.handle, transport)
    try:
        return session.calls.wrap_oaep(session.handle, wrapping, key, digest)
    finally:
        session.calls.destroy(session.handle, wrapping)


def _told(session: TokenSession, key: int, kind: MasterKind) -> tuple[str, ...]:
    return tuple(sorted(f"{name.name}={session.calls.read(session.handle, key, name)[0]}" for name in (*_TOLD, *kind.marks)))
