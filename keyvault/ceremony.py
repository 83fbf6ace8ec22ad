"""The small ceremony of a one-site development installation: what each token must hold, made once.

Run each function in a process of its own: a process has one PKCS#11 module, and the officer's PIN has no place where a
service runs. A token that already holds a key of a name is refused; a key is never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from keyvault import quirks
from keyvault.errors import CallFailed, CeremonyRefused, PinRejected
from keyvault.hsm import KeyName, RingMaster
from keyvault.pin_throttle import OFFICER_FILE, USER_FILE, PinThrottle
from keyvault.pkcs11_names import Attribute, Mechanism, Role
from keyvault.pkcs11_signers import public_key
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession
from keyvault.templates import KEYS, MASTER_BY_USER, master_by_officer

SERVING_KEYS = (
    KeyName.RECORD_MAC,
    KeyName.TOKEN_SIGNER,
    KeyName.PROVENANCE_SIGNER,
    KeyName.SITE_IDENTITY,
    KeyName.AUDIT_PSEUDONYM,
    KeyName.AUDIT_DETAIL,
)


@dataclass(frozen=True)
class TokenFacts:
    """What may be known about a token: nothing in it is secret. `public_keys` are SubjectPublicKeyInfo, DER."""

    label: str
    serial: str
    masters: tuple[RingMaster, ...] = ()
    public_keys: dict[KeyName, bytes] = field(default_factory=dict)


def serving_token(config: TokenConfig, so_pin: str, user_pin: str, *, ring: str | None = "main") -> TokenFacts:
    """Make version 1 of `ring` and every key that a vault serves with. Raises CeremonyRefused; nothing is replaced.

    `ring` None makes no master: where there are two sites, `master_ceremony` makes it for both.
    """
    return _ceremony(config, so_pin, user_pin, SERVING_KEYS, None if ring is None else RingMaster(ring, 1))


def log_token(config: TokenConfig, user_pin: str) -> TokenFacts:
    """Make the Ed25519 key that signs audit checkpoints."""
    return _ceremony(config, None, user_pin, (KeyName.CHECKPOINT_SIGNER,), None)


def officer_token(config: TokenConfig, user_pin: str) -> TokenFacts:
    """Make the P-256 key of the certificate authority."""
    return _ceremony(config, None, user_pin, (KeyName.CERTIFICATE_AUTHORITY,), None)


def add_master(config: TokenConfig, so_pin: str, user_pin: str, master: RingMaster) -> TokenFacts:
    """Make one more ring master version, the officer's step of a rotation. A running vault finds it when it is first asked for."""
    return _ceremony(config, so_pin, user_pin, (), master)


def _ceremony(
    config: TokenConfig, so_pin: str | None, user_pin: str, names: tuple[KeyName, ...], master: RingMaster | None
) -> TokenFacts:
    module = Module(config.module, config.folder)
    try:
        if master and not quirks.chosen(config.profile, *module.description).trusted_masters:
            raise CeremonyRefused("two tokens hold each master in this profile: a ceremony carries it to both")
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, user_pin, config):
            _require_absent(session, [name.value for name in names] + ([master.label] if master else []))
        officers = 0
        if master and so_pin is not None:
            with as_role(session, Role.SECURITY_OFFICER, so_pin, config):
                officers = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, master_by_officer(master))
        with as_role(session, Role.USER, user_pin, config):
            if officers:
                session.calls.copy(session.handle, officers, MASTER_BY_USER)
                session.calls.destroy(session.handle, officers)
            for name in names:
                _make(session, name)
            signers = [name for name in names if KEYS[name].public is not None]
            public = {name: public_key(session, name) for name in signers}
        return TokenFacts(config.label, config.serial, (master,) if master else (), public)
    finally:
        module.stop()


def _require_absent(session: TokenSession, labels: list[str]) -> None:
    for label in labels:
        if session.find({Attribute.LABEL: label}):
            raise CeremonyRefused(f"the token already holds a key {label!r}")


def _make(session: TokenSession, name: KeyName) -> None:
    plan = KEYS[name]
    if plan.public is None:
        session.calls.generate_key(session.handle, plan.generate, plan.template)
    else:
        session.calls.generate_pair(session.handle, plan.generate, plan.public, plan.template)


@contextmanager
def as_role(session: TokenSession, role: Role, pin: str, config: TokenConfig | None = None) -> Iterator[None]:
    """One login for one role: the officer and the user are never logged in together.

    Raises PinRejected; no second attempt is made, and with `config` none within the pause after a refusal (PinThrottled).
    """
    is_officer = role is Role.SECURITY_OFFICER
    folder, serial = (config.folder, config.serial) if config else (None, "")
    throttle = PinThrottle(folder, serial, file=OFFICER_FILE if is_officer else USER_FILE)
    throttle.require_rested()
    try:
        session.calls.login(session.handle, role, pin)
    except CallFailed as error:
        if error.answer.startswith("PIN_"):
            throttle.refused()
            whose = "security officer" if is_officer else "user"
            raise PinRejected(f"the token refused the {whose}'s PIN; no second attempt was made") from error
        raise
    throttle.accepted()
    try:
        yield
    finally:
        session.calls.logout(session.handle)
