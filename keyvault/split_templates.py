"""Templates of the split profile, for modules in which no AES key can be TRUSTED: two tokens hold each master, as two objects.

The serving token's master gives out keys that can never leave again, and wraps only keys that were born in it where the module
takes such a WRAP_TEMPLATE. It can therefore not re-wrap. The rotation token has a PIN of its own; its master gives out keys that
can be wrapped again, and can do nothing else with them. Both objects are of one value, which was extractable only as a session
object of the ceremony. MODIFIABLE stands last: nothing can follow it.
"""

from __future__ import annotations

from typing import Any

from keyvault.hsm import RingMaster
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_raw import Template
from keyvault.templates import AES_BYTES, DEK

_DATA_USES = (Attribute.ENCRYPT, Attribute.DECRYPT, Attribute.SIGN, Attribute.VERIFY)
_NO_DATA_USE: dict[Attribute, Any] = dict.fromkeys(_DATA_USES, False)
_NO_USE: dict[Attribute, Any] = _NO_DATA_USE | dict.fromkeys((Attribute.WRAP, Attribute.UNWRAP, Attribute.DERIVE), False)
_SHUT: dict[Attribute, Any] = {Attribute.COPYABLE: False, Attribute.MODIFIABLE: False}
_MOVABLE: Template = {name: value for name, value in DEK.items() if name is not Attribute.WRAP_WITH_TRUSTED}

SERVED_DEK: Template = {**_MOVABLE, Attribute.EXTRACTABLE: False}
"""A voice's key in the serving token, and its master's UNWRAP_TEMPLATE: what is unwrapped here is never wrapped again."""
MOVED_DEK: Template = {**_NO_DATA_USE, **_MOVABLE}
"""A voice's key in the rotation token, and its master's UNWRAP_TEMPLATE: it can be wrapped again, and does nothing else."""
BORN_DEK: Template = {Attribute.VALUE_LEN: AES_BYTES, **MOVED_DEK}
"""As it is made, for as long as it takes to wrap it: used is only what was unwrapped again."""


def served(*uses: Attribute) -> Template:
    """What an unwrap in the serving token asks for: the fixed part, and these uses of ENCRYPT, DECRYPT, SIGN."""
    return {**_NO_DATA_USE, **dict.fromkeys(uses, True), **SERVED_DEK}


BORN_HERE: Template = {
    Attribute.CLASS: ObjectClass.SECRET_KEY,
    Attribute.KEY_TYPE: KeyType.AES,
    Attribute.LOCAL: True,
    Attribute.ALWAYS_SENSITIVE: True,
}
"""WRAP_TEMPLATE of the serving token's master: a key whose bytes somebody knows came from outside, and is not wrapped."""


def serving_master(master: RingMaster, *, wrap_template: bool) -> Template:
    """The master as the serving token takes it."""
    limits = {Attribute.WRAP_TEMPLATE: BORN_HERE} if wrap_template else {}
    return {**_named(master), Attribute.UNWRAP_TEMPLATE: SERVED_DEK, **limits, **_SHUT}


def rotation_master(master: RingMaster) -> Template:
    """The master as the rotation token takes it."""
    return {**_named(master), Attribute.UNWRAP_TEMPLATE: MOVED_DEK, **_SHUT}


def carried_master() -> Template:
    """The master while the ceremony makes it: a session object without any use, which the process's end takes away."""
    return {
        Attribute.VALUE_LEN: AES_BYTES,
        Attribute.TOKEN: False,
        Attribute.PRIVATE: True,
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: True,
        **_NO_USE,
        **_SHUT,
    }


def _named(master: RingMaster) -> Template:
    return {
        Attribute.CLASS: ObjectClass.SECRET_KEY,
        Attribute.KEY_TYPE: KeyType.AES,
        Attribute.TOKEN: True,
        Attribute.PRIVATE: True,
        Attribute.LABEL: master.label,
        Attribute.ID: master.label.encode(),
        Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False,
        **_NO_USE,
        Attribute.WRAP: True,
        Attribute.UNWRAP: True,
        Attribute.ALLOWED_MECHANISMS: (Mechanism.AES_KEY_WRAP,),
    }
