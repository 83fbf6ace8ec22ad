"""Token operations of the two-host ceremony: one new ring master version, made at one site and carried to the other.

The value travels once, under a one-time RSA key (RSAES-OAEP, RFC 8017) whose private half is a session object at the
receiving site and is destroyed as soon as it was used: no key is left that could import the recorded message again. Both
sites end with the same object; how it is made is `ceremony_ways.py`'s. OAEP does not say who sent it: the one-time public key
and the wrapped master are messages that officers sign and compare.

Each function is for a process of its own, whose session objects no other process sees. `made_and_wrapped` is the sender's
whole step; `receiving` keeps the one-time key alive until the answer comes. The TRUSTED master of a one-site cluster needs
neither (`ceremony.add_master`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from keyvault import one_time_keys, quirks
from keyvault.ceremony import as_role
from keyvault.ceremony_ways import Pins as Pins
from keyvault.ceremony_ways import Way, way
from keyvault.errors import CallFailed, CeremonyRefused, HsmUnavailable, PinRejected, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass, Role
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession, starting_alone

_LAST_TRY = 0x060000 | 0x600000  # CKF_USER_PIN_FINAL_TRY and _LOCKED, CKF_SO_PIN_FINAL_TRY and _LOCKED


def made_and_wrapped(
    config: TokenConfig, pins: Pins, master: RingMaster, transport: bytes, digest: Mechanism = Mechanism.SHA_1
) -> tuple[bytes, tuple[str, ...]]:
    """Make `master` in this token and wrap it once for the receiver's one-time key (SubjectPublicKeyInfo, DER).

    Returns the wrapped master and the attributes of what the token now holds. Where masters are not TRUSTED, `transport` is the
    keys of all other tokens that are to hold it, one after the other, and the wrapped masters stand in the same order.
    `digest` is OAEP's hash; SHA-1 is what every module has (SoftHSM 2.6.1 has no other), and OAEP does not rest on its
    resistance to collisions. Raises CeremonyRefused where the token knows this version or a key is no RSA key of at least 3072
    bits, and PinRejected; nothing is made then.
    """
    keys = one_time_keys.apart(transport)
    transports = [one_time_keys.template(key) for key in keys]
    if len({len(key) for key in keys}) != 1:  # so that each answer ends where the next begins
        raise CeremonyRefused("one-time keys of one length are wanted")
    with _ceremony(config, pins, master) as (session, how):
        wrapped, attributes = how.made(session, master, transports, digest)
        return b"".join(wrapped), attributes


class Receiver:
    """The receiving site's half, while its one-time key lives."""

    def __init__(self, session: TokenSession, how: Way, master: RingMaster, pair: tuple[int, int]) -> None:
        self._session, self._how, self._master, self._pair = session, how, master, pair

    @property
    def transport(self) -> bytes:
        """The one-time public key: SubjectPublicKeyInfo, DER."""
        return one_time_keys.public_bytes(self._session, self._pair[0])

    def take(self, wrapped: bytes, digest: Mechanism = Mechanism.SHA_1) -> tuple[str, ...]:
        """Put the wrapped master into this token, destroy the one-time key, and return the attributes of what is held.

        Works once. Raises UnwrapRejected where the message was not made for this one-time key; nothing is kept then.
        """
        try:
            key = self._how.unwrapped(self._session, self._pair[1], self._master, wrapped, digest)
        except CallFailed as error:
            if error.function != "C_UnwrapKey":
                raise
            raise UnwrapRejected(f"this was not wrapped for the one-time key of this ceremony: {error.answer}") from error
        finally:
            self.forget()
        return self._how.kept(self._session, key)

    def forget(self) -> None:
        """Destroy the one-time key. Idempotent."""
        for half in self._pair:
            with suppress(CallFailed):  # gone already, with its session at the latest
                self._session.calls.destroy(self._session.handle, half)


@contextmanager
def receiving(config: TokenConfig, pins: Pins, master: RingMaster) -> Iterator[Receiver]:
    """Make the one-time key pair as session objects; they end with the block, whatever happens in it.

    Every PIN is tried once, now, so that a wrong one is not found only after the other site has acted. Raises
    CeremonyRefused where the token knows this version, and PinRejected.
    """
    with _ceremony(config, pins, master) as (session, how), how.pair(session) as pair:
        receiver = Receiver(session, how, master, pair)
        try:
            yield receiver
        finally:
            receiver.forget()


def versions(config: TokenConfig, user_pin: str, ring: str) -> tuple[int, ...]:
    """Every version of `ring` that the token holds in any form, half made ones too."""
    prefix = f"ring/{ring}/"
    with _opened(config) as session, as_role(session, Role.USER, user_pin, config):
        labels = [
            session.calls.read(session.handle, key, Attribute.LABEL).decode(errors="replace")
            for key in session.find({Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.TOKEN: True})
        ]
    numbers = {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def removed(config: TokenConfig, user_pin: str, master: RingMaster) -> int:
    """Destroy what an abandoned ceremony left of `master` in this token; returns how many objects went.

    The caller knows that no site agreed to this version: a master that protects something is destroyed by approval only.
    """
    wanted: Template = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.LABEL: master.label}
    with _opened(config) as session, as_role(session, Role.USER, user_pin, config):
        found = session.find(wanted)
        for key in found:
            session.calls.destroy(session.handle, key)
    with (
        _opened(config) as session,
        as_role(session, Role.USER, user_pin, config),
    ):  # a failed deletion shows after a new start only
        if session.find(wanted):
            raise HsmUnavailable(f"the token still holds {master.label} after its destruction")
    return len(found)


@contextmanager
def _opened(config: TokenConfig) -> Iterator[TokenSession]:
    with _started(config) as (_, session):
        yield session


@contextmanager
def _started(config: TokenConfig) -> Iterator[tuple[Module, TokenSession]]:
    with starting_alone(config.folder):
        module = Module(config.module, config.folder)
    try:
        token = module.token(config.label, config.serial)
        if int(token.flags) & _LAST_TRY:
            raise PinRejected("the token allows one last try of a PIN or none; it was not used")
        yield module, module.session(token)
    finally:
        module.stop()  # every session object of this process ends here at the latest


@contextmanager
def _ceremony(config: TokenConfig, pins: Pins, master: RingMaster) -> Iterator[tuple[TokenSession, Way]]:
    with _started(config) as (module, session):
        kind = quirks.chosen(config.profile, *module.description).masters(rotation=config.rotation)
        with as_role(session, Role.USER, pins.user, config):
            if session.find({Attribute.LABEL: master.label}):
                raise CeremonyRefused(f"the token already holds a key {master.label!r}")
        yield session, way(config, pins, kind)
