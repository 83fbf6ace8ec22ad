"""Masters that break a promise, made as the ceremony makes good ones: what probes, audit and attacks must be able to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hsm_fixtures import SO_PIN, USER_PIN

from keyvault.hsm import RingMaster
from keyvault.pkcs11_names import Attribute, Mechanism, Role
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession
from keyvault.templates import DEK, MASTER_BY_USER, master_by_officer

Changes = dict[Attribute, Any]
LEFT_OUT = object()


def changed(template: Any, changes: Changes) -> Changes:
    """The template with some attributes changed in place, or left out."""
    merged = {name: changes.get(name, value) for name, value in template.items()} | changes
    return {name: value for name, value in merged.items() if value is not LEFT_OUT}


def dek_template(**left_out_or_changed: Any) -> Changes:
    return changed(DEK, {Attribute[name]: value for name, value in left_out_or_changed.items()})


def in_ceremony(config: TokenConfig, by_officer: Callable[[TokenSession], Any], by_user: Callable[[TokenSession, Any], Any]) -> Any:
    """Run the officer's step and then the user's in one session, as a ceremony does. For a process of its own."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        session.calls.login(session.handle, Role.SECURITY_OFFICER, SO_PIN)
        made = by_officer(session)
        session.calls.logout(session.handle)
        session.calls.login(session.handle, Role.USER, USER_PIN)
        result = by_user(session, made)
        session.calls.logout(session.handle)
        return result
    finally:
        module.stop()


def make_master(session: TokenSession, master: RingMaster, changes: Changes) -> int:
    """The officer's session object, changed."""
    return session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, changed(master_by_officer(master), changes))


def keep_master(session: TokenSession, made: int, changes: Changes) -> int:
    """The user's copy in the token, changed. MODIFIABLE stays last."""
    template = changed(MASTER_BY_USER, changes)
    last = template.pop(Attribute.MODIFIABLE)
    return session.calls.copy(session.handle, made, {**template, Attribute.MODIFIABLE: last})
