"""The numbers of PKCS#11 (OASIS v2.40 and v3.0) that Glottis names: attributes, mechanisms, classes, answers."""

from __future__ import annotations

from enum import IntEnum


class Attribute(IntEnum):
    """CKA_*: what an object says about itself."""

    CLASS = 0x000
    TOKEN = 0x001
    PRIVATE = 0x002
    LABEL = 0x003
    VALUE = 0x011
    TRUSTED = 0x086
    KEY_TYPE = 0x100
    ID = 0x102
    SENSITIVE = 0x103
    ENCRYPT = 0x104
    DECRYPT = 0x105
    WRAP = 0x106
    UNWRAP = 0x107
    SIGN = 0x108
    VERIFY = 0x10A
    DERIVE = 0x10C
    MODULUS = 0x120
    MODULUS_BITS = 0x121
    PUBLIC_EXPONENT = 0x122
    VALUE_LEN = 0x161
    EXTRACTABLE = 0x162
    LOCAL = 0x163
    ALWAYS_SENSITIVE = 0x165
    MODIFIABLE = 0x170
    COPYABLE = 0x171
    EC_PARAMS = 0x180
    EC_POINT = 0x181
    WRAP_WITH_TRUSTED = 0x210
    WRAP_TEMPLATE = 0x40000211
    UNWRAP_TEMPLATE = 0x40000212
    ALLOWED_MECHANISMS = 0x40000600


class Mechanism(IntEnum):
    """CKM_*: what a key may be used for."""

    RSA_PKCS_KEY_PAIR_GEN = 0x000
    RSA_PKCS_OAEP = 0x009
    SHA_1 = 0x220
    SHA256 = 0x250
    SHA256_HMAC = 0x251
    GENERIC_SECRET_KEY_GEN = 0x350
    EC_KEY_PAIR_GEN = 0x1040
    ECDSA = 0x1041
    EC_EDWARDS_KEY_PAIR_GEN = 0x1055
    EDDSA = 0x1057
    AES_KEY_GEN = 0x1080
    AES_ECB = 0x1081
    AES_CBC = 0x1082
    AES_GCM = 0x1087
    AES_CMAC = 0x108A
    AES_KEY_WRAP = 0x2109


class ObjectClass(IntEnum):
    """CKO_*."""

    DATA = 0
    PUBLIC_KEY = 2
    PRIVATE_KEY = 3
    SECRET_KEY = 4


class KeyType(IntEnum):
    """CKK_*."""

    RSA = 0x00
    EC = 0x03
    GENERIC_SECRET = 0x10
    AES = 0x1F
    EC_EDWARDS = 0x40


class Role(IntEnum):
    """CKU_*: who logs in."""

    SECURITY_OFFICER = 0
    USER = 1


class Answer(IntEnum):
    """CKR_*: the answers that Glottis tells apart. Any other answer is shown as its number."""

    OK = 0x000
    GENERAL_ERROR = 0x005
    FUNCTION_FAILED = 0x006
    ATTRIBUTE_READ_ONLY = 0x010
    ATTRIBUTE_SENSITIVE = 0x011
    ATTRIBUTE_TYPE_INVALID = 0x012
    ATTRIBUTE_VALUE_INVALID = 0x013
    ACTION_PROHIBITED = 0x01B
    DEVICE_ERROR = 0x030
    DEVICE_MEMORY = 0x031
    DEVICE_REMOVED = 0x032
    ENCRYPTED_DATA_INVALID = 0x040
    ENCRYPTED_DATA_LEN_RANGE = 0x041
    KEY_HANDLE_INVALID = 0x060
    KEY_FUNCTION_NOT_PERMITTED = 0x068
    KEY_NOT_WRAPPABLE = 0x069
    KEY_UNEXTRACTABLE = 0x06A
    MECHANISM_INVALID = 0x070
    OBJECT_HANDLE_INVALID = 0x082
    OPERATION_ACTIVE = 0x090
    PIN_INCORRECT = 0x0A0
    PIN_INVALID = 0x0A1
    PIN_LEN_RANGE = 0x0A2
    PIN_EXPIRED = 0x0A3
    PIN_LOCKED = 0x0A4
    SESSION_CLOSED = 0x0B0
    SESSION_HANDLE_INVALID = 0x0B3
    TEMPLATE_INCOMPLETE = 0x0D0
    TEMPLATE_INCONSISTENT = 0x0D1
    TOKEN_NOT_PRESENT = 0x0E0
    TOKEN_NOT_RECOGNIZED = 0x0E1
    UNWRAPPING_KEY_HANDLE_INVALID = 0x0F0
    USER_ALREADY_LOGGED_IN = 0x100
    USER_NOT_LOGGED_IN = 0x101
    WRAPPED_KEY_INVALID = 0x110
    WRAPPED_KEY_LEN_RANGE = 0x112
    WRAPPING_KEY_HANDLE_INVALID = 0x113
    BUFFER_TOO_SMALL = 0x150
    CRYPTOKI_NOT_INITIALIZED = 0x190
    CRYPTOKI_ALREADY_INITIALIZED = 0x191


LOST_SESSION = frozenset(answer.name for answer in (Answer.SESSION_CLOSED, Answer.SESSION_HANDLE_INVALID, Answer.OPERATION_ACTIVE))
"""This session is no longer good; a fresh one may be."""

LOST_KEY = frozenset(
    answer.name
    for answer in (
        Answer.KEY_HANDLE_INVALID,
        Answer.OBJECT_HANDLE_INVALID,
        Answer.WRAPPING_KEY_HANDLE_INVALID,
        Answer.UNWRAPPING_KEY_HANDLE_INVALID,
    )
)
"""A handle is no longer good; the session is, and other keys that live in it must not be thrown away with it."""

LOST_MODULE = frozenset(
    answer.name
    for answer in (
        Answer.CRYPTOKI_NOT_INITIALIZED,
        Answer.USER_NOT_LOGGED_IN,
        Answer.DEVICE_ERROR,
        Answer.DEVICE_MEMORY,
        Answer.DEVICE_REMOVED,
        Answer.TOKEN_NOT_PRESENT,
        Answer.TOKEN_NOT_RECOGNIZED,
    )
)
"""The login, the token or the module itself is gone: only starting the module again and a new login can help."""

LOST = LOST_SESSION | LOST_KEY | LOST_MODULE
"""No verdict on what was asked, only on the way there."""
