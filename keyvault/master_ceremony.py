"""Token operations of the two-host ceremony: one new ring master version, made at one site and carried to the other.

The value travels once, under a one-time RSA key (RSAES-OAEP, RFC 8017) whose private half is a session object at the
receiving site and is destroyed as soon as it was used: no key is left that could import the recorded message again. Both
sites end with the same object: made in a security officer's session, so TRUSTED, and copied into the token by the user.
OAEP does not say who sent it: the one-time public key and the wrapped master are messages that officers sign and compare.

Each function is for a process of its own, whose session objects no other process sees. `made_and_wrapped` is the sender's
whole step; `receiving` keeps the one-time key alive until the answer comes. The master of a one-site cluster needs neither
(`ceremony.add_master`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from keyvault.ceremony import as_role
from keyvault.errors import CallFailed, CeremonyRefused, HsmUnavailable, PinRejected, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass, Role
from keyvault.pkcs11_raw import Template
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession, starting_alone
from keyvault.templates import MASTER_BY_USER, master_by_officer

RSA_BITS = 3072  # SP 800-57 Part 1, table 2: 128 bits of strength, as P-256
_EXPONENT = (65537).to_bytes(3, "big")
_LAST_TRY = 0x060000 | 0x600000  # CKF_USER_PIN_FINAL_TRY and _LOCKED, CKF_SO_PIN_FINAL_TRY and _LOCKED
_COMPARED = (
    Attribute.PRIVATE,
    Attribute.SENSITIVE,
    Attribute.EXTRACTABLE,
    Attribute.MODIFIABLE,
    Attribute.TRUSTED,
    Attribute.WRAP_WITH_TRUSTED,
    Attribute.WRAP,
    Attribute.UNWRAP,
    Attribute.ENCRYPT,
    Attribute.DECRYPT,
    Attribute.SIGN,
    Attribute.DERIVE,
)

_PRIVATE_HALF: Template = {
    Attribute.TOKEN: False,
    Attribute.PRIVATE: False,
    Attribute.SENSITIVE: True,
    Attribute.EXTRACTABLE: False,
    Attribute.DECRYPT: False,
    Attribute.SIGN: False,
    Attribute.UNWRAP: True,
    Attribute.COPYABLE: False,
    Attribute.ALLOWED_MECHANISMS: (Mechanism.RSA_PKCS_OAEP,),
    Attribute.MODIFIABLE: False,
}
_PUBLIC_HALF: Template = {
    Attribute.TOKEN: False,
    Attribute.PRIVATE: False,
    Attribute.ENCRYPT: False,
    Attribute.VERIFY: False,
    Attribute.WRAP: False,
    Attribute.MODULUS_BITS: RSA_BITS,
    Attribute.PUBLIC_EXPONENT: _EXPONENT,
    Attribute.MODIFIABLE: False,
}


@dataclass(frozen=True)
class Pins:
    """The two PINs of a token, for the length of one step."""

    officer: str = field(repr=False)
    user: str = field(repr=False)


def made_and_wrapped(
    config: TokenConfig, pins: Pins, master: RingMaster, transport: bytes, digest: Mechanism = Mechanism.SHA_1
) -> tuple[bytes, tuple[str, ...]]:
    """Make `master` in this token and wrap it once under the receiver's one-time key (SubjectPublicKeyInfo, DER).

    Returns the wrapped master and the attributes of what the token now holds. `digest` is OAEP's hash; SHA-1 is what every
    module has (SoftHSM 2.6.1 has no other), and OAEP does not rest on its resistance to collisions. Raises CeremonyRefused
    where the token knows this version or the key is no RSA key of at least 3072 bits, and PinRejected; nothing is made then.
    """
    public = _transport_template(transport)
    with _ceremony(config, pins, master) as session:
        with as_role(session, Role.SECURITY_OFFICER, pins.officer, config):
            wrapping = session.calls.create(session.handle, public)
            key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, master_by_officer(master))
            wrapped = session.calls.wrap_oaep(session.handle, wrapping, key, digest)
            session.calls.destroy(session.handle, wrapping)
        return wrapped, _kept(session, pins, key)


class Receiver:
    """The receiving site's half, while its one-time key lives."""

    def __init__(self, session: TokenSession, pins: Pins, master: RingMaster, pair: tuple[int, int]) -> None:
        self._session, self._pins, self._master, self._pair = session, pins, master, pair

    @property
    def transport(self) -> bytes:
        """The one-time public key: SubjectPublicKeyInfo, DER."""
        read = self._session.calls.read
        n = int.from_bytes(read(self._session.handle, self._pair[0], Attribute.MODULUS), "big")
        e = int.from_bytes(read(self._session.handle, self._pair[0], Attribute.PUBLIC_EXPONENT), "big")
        return RSAPublicNumbers(e, n).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def take(self, wrapped: bytes, digest: Mechanism = Mechanism.SHA_1) -> tuple[str, ...]:
        """Put the wrapped master into this token, destroy the one-time key, and return the attributes of what is held.

        Works once. Raises UnwrapRejected where the message was not made for this one-time key; nothing is kept then.
        """
        template: Template = {
            name: value for name, value in master_by_officer(self._master).items() if name is not Attribute.VALUE_LEN
        }
        session = self._session
        try:
            with as_role(session, Role.SECURITY_OFFICER, self._pins.officer):
                key = session.calls.unwrap_oaep(session.handle, self._pair[1], wrapped, template, digest)
        except CallFailed as error:
            if error.function != "C_UnwrapKey":
                raise
            raise UnwrapRejected(f"this was not wrapped for the one-time key of this ceremony: {error.answer}") from error
        finally:
            self.forget()
        return _kept(session, self._pins, key)

    def forget(self) -> None:
        """Destroy the one-time key. Idempotent."""
        for half in self._pair:
            with suppress(CallFailed):  # gone already, with its session at the latest
                self._session.calls.destroy(self._session.handle, half)


@contextmanager
def receiving(config: TokenConfig, pins: Pins, master: RingMaster) -> Iterator[Receiver]:
    """Make the one-time key pair as session objects; they end with the block, whatever happens in it.

    Both PINs are tried once, now, so that a wrong one is not found only after the other site has acted. Raises
    CeremonyRefused where the token knows this version, and PinRejected.
    """
    with _ceremony(config, pins, master) as session:
        with as_role(session, Role.SECURITY_OFFICER, pins.officer, config):
            pair = session.calls.generate_pair(session.handle, Mechanism.RSA_PKCS_KEY_PAIR_GEN, _PUBLIC_HALF, _PRIVATE_HALF)
        receiver = Receiver(session, pins, master, pair)
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


def _transport_template(transport: bytes) -> Template:
    try:
        key = load_der_public_key(transport)
    except ValueError as error:
        raise CeremonyRefused("the one-time key cannot be read") from error
    if not isinstance(key, RSAPublicKey) or key.key_size < RSA_BITS:
        raise CeremonyRefused(f"the one-time key is no RSA key of {RSA_BITS} bits or more")
    numbers = key.public_numbers()
    return {
        Attribute.CLASS: ObjectClass.PUBLIC_KEY,
        Attribute.KEY_TYPE: KeyType.RSA,
        Attribute.MODULUS: numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big"),
        Attribute.PUBLIC_EXPONENT: numbers.e.to_bytes((numbers.e.bit_length() + 7) // 8, "big"),
        Attribute.TOKEN: False,
        Attribute.PRIVATE: False,
        Attribute.ENCRYPT: False,
        Attribute.VERIFY: False,
        Attribute.WRAP: True,
        Attribute.TRUSTED: True,
        Attribute.ALLOWED_MECHANISMS: (Mechanism.RSA_PKCS_OAEP,),
        Attribute.MODIFIABLE: False,
    }


@contextmanager
def _opened(config: TokenConfig) -> Iterator[TokenSession]:
    with starting_alone(config.folder):
        module = Module(config.module, config.folder)
    try:
        token = module.token(config.label, config.serial)
        if int(token.flags) & _LAST_TRY:
            raise PinRejected("the token allows one last try of a PIN or none; it was not used")
        yield module.session(token)
    finally:
        module.stop()  # every session object of this process ends here at the latest


@contextmanager
def _ceremony(config: TokenConfig, pins: Pins, master: RingMaster) -> Iterator[TokenSession]:
    with _opened(config) as session:
        with as_role(session, Role.USER, pins.user, config):
            if session.find({Attribute.LABEL: master.label}):
                raise CeremonyRefused(f"the token already holds a key {master.label!r}")
        yield session


def _kept(session: TokenSession, pins: Pins, key: int) -> tuple[str, ...]:
    """Copy the officer's session object into the token as the user, destroy it, and read back what the token keeps.

    The PIN was accepted in this ceremony already: another process's refusals do not end it half done.
    """
    with as_role(session, Role.USER, pins.user):
        kept = session.calls.copy(session.handle, key, MASTER_BY_USER)
        session.calls.destroy(session.handle, key)
        return tuple(sorted(f"{name.name}={session.calls.read(session.handle, kept, name)[0]}" for name in _COMPARED))
