"""Object templates as data: what each key is, beside what it may do. MODIFIABLE stands last: nothing can follow it.

The ring master is made by the security officer as a session object, TRUSTED, and copied into the token by the user: TRUSTED
is a mark that a holder of the user PIN cannot forge, and a DEK is wrapped under nothing else (CKA_WRAP_WITH_TRUSTED). Its
UNWRAP_TEMPLATE fixes every attribute of a DEK but its use, and every unwrap repeats it: SoftHSM compares, others add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyvault.hsm import VERSIONED, KeyName, RingMaster, signer_label
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template

AES_BYTES = 32
P256 = bytes.fromhex("06082a8648ce3d030107")  # OBJECT IDENTIFIER prime256v1, RFC 5480 section 2.1.1.1
ED25519 = b"\x13\x0cedwards25519"  # PrintableString, PKCS#11 v3.0 section 2.3.7

_NO_USE: dict[Attribute, Any] = dict.fromkeys(
    (
        Attribute.ENCRYPT,
        Attribute.DECRYPT,
        Attribute.SIGN,
        Attribute.VERIFY,
        Attribute.WRAP,
        Attribute.UNWRAP,
        Attribute.DERIVE,
    ),
    False,
)

DEK: Template = {
    Attribute.CLASS: ObjectClass.SECRET_KEY,
    Attribute.KEY_TYPE: KeyType.AES,
    Attribute.TOKEN: False,
    Attribute.PRIVATE: True,
    Attribute.SENSITIVE: True,
    Attribute.EXTRACTABLE: True,
    Attribute.WRAP_WITH_TRUSTED: True,
    Attribute.WRAP: False,
    Attribute.UNWRAP: False,
    Attribute.DERIVE: False,
    Attribute.COPYABLE: False,
    Attribute.MODIFIABLE: False,
}
"""A voice's key: this is also the master's UNWRAP_TEMPLATE.

Free are ENCRYPT (at birth), DECRYPT (on opening) and SIGN (to compare two sites); re-wrapping needs none of them.
"""


def _dek(*uses: Attribute) -> Template:
    free = dict.fromkeys((Attribute.ENCRYPT, Attribute.DECRYPT, Attribute.SIGN, Attribute.VERIFY), False)
    return {**free, **dict.fromkeys(uses, True), **DEK}


DEK_SEALING: Template = {Attribute.VALUE_LEN: AES_BYTES, **_dek(Attribute.ENCRYPT)}
DEK_OPENING: Template = _dek(Attribute.DECRYPT)
DEK_REWRAPPING: Template = _dek()
DEK_SIGNING: Template = _dek(Attribute.SIGN)
CANARY: Template = {Attribute.VALUE_LEN: AES_BYTES, **DEK_SIGNING}

ANCHOR_LABEL = "sync-anchor"


def anchor_object(anchor: bytes) -> Template:
    """A private data object in the token: what a site agreed to last, out of reach of whoever restores its database."""
    return {
        Attribute.CLASS: ObjectClass.DATA,
        Attribute.TOKEN: True,
        Attribute.PRIVATE: True,
        Attribute.LABEL: ANCHOR_LABEL,
        Attribute.VALUE: anchor,
        Attribute.MODIFIABLE: False,
    }


MASTER_BY_USER: Template = {
    Attribute.TOKEN: True,
    Attribute.PRIVATE: True,
    Attribute.EXTRACTABLE: False,
    Attribute.MODIFIABLE: False,
}
"""What the user's C_CopyObject changes in the officer's session object; the rest is inherited."""


def master_by_officer(master: RingMaster) -> Template:
    """The ring master as the security officer makes it: a public session object, gone when the ceremony's session closes."""
    return {
        Attribute.CLASS: ObjectClass.SECRET_KEY,
        Attribute.KEY_TYPE: KeyType.AES,
        Attribute.VALUE_LEN: AES_BYTES,
        Attribute.TOKEN: False,
        Attribute.PRIVATE: False,
        Attribute.LABEL: master.label,
        Attribute.ID: master.label.encode(),
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: True,
        Attribute.WRAP_WITH_TRUSTED: True,
        Attribute.TRUSTED: True,
        **_NO_USE,
        Attribute.WRAP: True,
        Attribute.UNWRAP: True,
        Attribute.ALLOWED_MECHANISMS: (Mechanism.AES_KEY_WRAP,),
        Attribute.UNWRAP_TEMPLATE: DEK,
        Attribute.WRAP_TEMPLATE: {
            Attribute.CLASS: ObjectClass.SECRET_KEY,
            Attribute.KEY_TYPE: KeyType.AES,
            Attribute.SENSITIVE: True,
            Attribute.EXTRACTABLE: True,
            Attribute.WRAP_WITH_TRUSTED: True,
        },
    }


@dataclass(frozen=True)
class KeyPlan:
    """How one long-lived key is made and what it may do: one mechanism, the template, and the public half's if it has one."""

    generate: Mechanism
    mechanism: Mechanism
    template: Template
    public: Template | None = None

    @property
    def kind(self) -> ObjectClass:
        return ObjectClass.SECRET_KEY if self.public is None else ObjectClass.PRIVATE_KEY


def _identity(name: KeyName) -> dict[Attribute, Any]:
    return {Attribute.TOKEN: True, Attribute.LABEL: name.value, Attribute.ID: name.value.encode()}


def _secret(name: KeyName, generate: Mechanism, mechanism: Mechanism, *uses: Attribute) -> KeyPlan:
    template = {
        Attribute.VALUE_LEN: AES_BYTES,
        **_identity(name),
        Attribute.PRIVATE: True,
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False,
        **_NO_USE,
        **dict.fromkeys(uses, True),
        Attribute.ALLOWED_MECHANISMS: (mechanism,),
        Attribute.COPYABLE: False,
        Attribute.MODIFIABLE: False,
    }
    return KeyPlan(generate, mechanism, template)


def _signer(name: KeyName, generate: Mechanism, mechanism: Mechanism, curve: bytes) -> KeyPlan:
    private = {
        **_identity(name),
        Attribute.PRIVATE: True,
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False,
        Attribute.DECRYPT: False,
        Attribute.SIGN: True,
        Attribute.UNWRAP: False,
        Attribute.DERIVE: False,
        Attribute.ALLOWED_MECHANISMS: (mechanism,),
        Attribute.COPYABLE: False,
        Attribute.MODIFIABLE: False,
    }
    public = {
        Attribute.EC_PARAMS: curve,
        **_identity(name),
        Attribute.PRIVATE: False,
        Attribute.ENCRYPT: False,
        Attribute.VERIFY: True,
        Attribute.WRAP: False,
        Attribute.COPYABLE: False,
        Attribute.MODIFIABLE: False,
    }
    return KeyPlan(generate, mechanism, private, public)


def _p256(name: KeyName) -> KeyPlan:
    return _signer(name, Mechanism.EC_KEY_PAIR_GEN, Mechanism.ECDSA, P256)


_PLANS: Mapping[KeyName, Callable[[KeyName], KeyPlan]] = {
    KeyName.RECORD_MAC: lambda name: _secret(name, Mechanism.AES_KEY_GEN, Mechanism.AES_CMAC, Attribute.SIGN),
    KeyName.AUDIT_PSEUDONYM: lambda name: _secret(name, Mechanism.GENERIC_SECRET_KEY_GEN, Mechanism.SHA256_HMAC, Attribute.SIGN),
    KeyName.AUDIT_DETAIL: lambda name: _secret(
        name, Mechanism.AES_KEY_GEN, Mechanism.AES_GCM, Attribute.ENCRYPT, Attribute.DECRYPT
    ),
    KeyName.TOKEN_SIGNER: _p256,
    KeyName.PROVENANCE_SIGNER: _p256,
    KeyName.SITE_IDENTITY: _p256,
    KeyName.CERTIFICATE_AUTHORITY: _p256,
    KeyName.CHECKPOINT_SIGNER: lambda name: _signer(name, Mechanism.EC_EDWARDS_KEY_PAIR_GEN, Mechanism.EDDSA, ED25519),
}

KEYS: Mapping[KeyName, KeyPlan] = {name: plan(name) for name, plan in _PLANS.items()}
"""Every long-lived key but the ring masters: one use each, none of them leaves the token in any form."""


def signer_plan(name: KeyName, version: int) -> KeyPlan:
    """How one version of a signing key is made: as the first, under a label and id of its own. Raises ValueError for other keys."""
    if name not in VERSIONED or version < 2:
        raise ValueError(f"{name} has no version {version} to be made")
    plan, label = KEYS[name], signer_label(name, version)
    own: dict[Attribute, Any] = {Attribute.LABEL: label, Attribute.ID: label.encode()}
    assert plan.public is not None
    return KeyPlan(plan.generate, plan.mechanism, {**plan.template, **own}, {**plan.public, **own})


def versioned_signer(label: str) -> tuple[KeyName, int] | None:
    """Which later version of which signing key has this label; None for every other label."""
    name, _, number = label.partition("/")
    if name not in VERSIONED or not number.isdecimal() or int(number) < 2 or signer_label(KeyName(name), int(number)) != label:
        return None
    return KeyName(name), int(number)
