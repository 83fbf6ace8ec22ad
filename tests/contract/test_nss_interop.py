"""What a token of one maker writes, a module of another maker reads: SoftHSM beside NSS, where the machine has it.

Keys of known value stand in both, put there by C_CreateObject in test tokens of their own. Never a reference for security.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hsm_fixtures import SO_PIN, USER_PIN, in_own_process
from nss_module import find_module, opened, verifies

from keyvault import softhsm
from keyvault.errors import CallFailed, ModuleRefused
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass, Role
from keyvault.pkcs11_raw import RawCalls
from keyvault.pkcs11_start import Module
from keyvault.pkcs11_structures import CkMechanism
from keyvault.quirks import chosen
from keyvault.templates import P256

NSS = find_module()
pytestmark = pytest.mark.skipif(NSS is None, reason="this machine has no NSS softoken")

KEK, DEK, PLAIN, AAD, JOINT = b"k" * 32, b"d" * 32, b"one voice".ljust(32, b"."), b"aad", b"both nonces"


def known(calls: RawCalls, session: int, value: bytes, *uses: Attribute) -> int:
    template: dict[Attribute, Any] = {
        Attribute.CLASS: ObjectClass.SECRET_KEY,
        Attribute.KEY_TYPE: KeyType.AES,
        Attribute.TOKEN: False,
        Attribute.SENSITIVE: False,
        Attribute.EXTRACTABLE: True,
        Attribute.VALUE: value,
    }
    return calls.create(session, {**template, **dict.fromkeys(uses, True)})


def written(calls: RawCalls, session: int) -> dict[str, bytes]:
    """A key wrapped, a row sealed by it, and a CMAC under it."""
    kek = known(calls, session, KEK, Attribute.WRAP)
    dek = known(calls, session, DEK, Attribute.ENCRYPT, Attribute.SIGN)
    made = {"blob": calls.wrap(session, kek, dek), "mac": calls.sign(session, dek, Mechanism.AES_CMAC, JOINT)}
    with LockedBuffer(64) as plain:
        plain.view(0, len(PLAIN))[:] = bytearray(PLAIN)
        made["row"] = calls.encrypt(session, dek, bytes(12), AAD, plain.address, len(PLAIN))
    return made


def read(calls: RawCalls, session: int, made: dict[str, bytes]) -> dict[str, bytes]:
    """The same from the other side: unwrap, open, and the CMAC again."""
    kek = known(calls, session, KEK, Attribute.UNWRAP)
    template: dict[Attribute, Any] = {
        Attribute.CLASS: ObjectClass.SECRET_KEY,
        Attribute.KEY_TYPE: KeyType.AES,
        Attribute.TOKEN: False,
        Attribute.DECRYPT: True,
        Attribute.SIGN: True,
    }
    dek = calls.unwrap(session, kek, made["blob"], template)
    with LockedBuffer(64) as target:
        length = calls.decrypt(session, dek, bytes(12), AAD, made["row"], target.address, 64)
        return {"row": bytes(target.view(0, length)), "mac": calls.sign(session, dek, Mechanism.AES_CMAC, JOINT)}


def in_softhsm(folder: Path, made: dict[str, bytes] | None) -> dict[str, bytes]:
    path = softhsm.find_module()
    serial = softhsm.make_token(path, folder, "first", SO_PIN, USER_PIN)
    module = Module(path, folder)
    session = module.session(module.token("first", serial))
    session.calls.login(session.handle, Role.USER, USER_PIN)
    try:
        return written(session.calls, session.handle) if made is None else read(session.calls, session.handle, made)
    finally:
        module.stop()


def in_nss(folder: Path, made: dict[str, bytes] | None) -> dict[str, bytes]:
    assert NSS is not None
    with opened(NSS, folder) as (calls, session):
        return written(calls, session) if made is None else read(calls, session, made)


def signed_in_softhsm(folder: Path, data: bytes) -> dict[str, bytes]:
    path = softhsm.find_module()
    serial = softhsm.make_token(path, folder, "signer", SO_PIN, USER_PIN)
    module = Module(path, folder)
    session = module.session(module.token("signer", serial))
    calls, handle = session.calls, session.handle
    calls.login(handle, Role.USER, USER_PIN)
    public = {Attribute.EC_PARAMS: P256, Attribute.TOKEN: False, Attribute.VERIFY: True}
    pair = calls.generate_pair(handle, Mechanism.EC_KEY_PAIR_GEN, public, {Attribute.TOKEN: False, Attribute.SIGN: True})
    signature = calls.sign(handle, pair[1], Mechanism.ECDSA, hashlib.sha256(data).digest())
    point = calls.read(handle, pair[0], Attribute.EC_POINT)
    module.stop()
    return {"signature": signature, "point": point}


def verified_in_nss(folder: Path, data: bytes, made: dict[str, bytes]) -> list[str]:
    """The answer to the true signature, and to one with a changed byte."""
    assert NSS is not None
    template: dict[Attribute, Any] = {
        Attribute.CLASS: ObjectClass.PUBLIC_KEY,
        Attribute.KEY_TYPE: KeyType.EC,
        Attribute.TOKEN: False,
        Attribute.VERIFY: True,
        Attribute.EC_PARAMS: P256,
        Attribute.EC_POINT: made["point"],
    }
    digest, answers = hashlib.sha256(data).digest(), []
    with opened(NSS, folder) as (calls, session):
        key = calls.create(session, template)
        for signature in (made["signature"], bytes([made["signature"][0] ^ 1]) + made["signature"][1:]):
            try:
                verifies(calls, session, key, CkMechanism(Mechanism.ECDSA, None, 0), digest, signature)
                answers.append("OK")
            except CallFailed as error:
                answers.append(error.answer)
    return answers


def test_what_softhsm_wraps_and_seals_nss_opens(tmp_path: Path) -> None:
    made = in_own_process(in_softhsm, tmp_path / "a", None)
    assert in_own_process(in_nss, tmp_path / "b", made) == {"row": PLAIN, "mac": made["mac"]}


def test_what_nss_wraps_and_seals_softhsm_opens(tmp_path: Path) -> None:
    made = in_own_process(in_nss, tmp_path / "b", None)
    assert in_own_process(in_softhsm, tmp_path / "a", made) == {"row": PLAIN, "mac": made["mac"]}


def test_what_softhsm_signs_nss_verifies(tmp_path: Path) -> None:
    made = in_own_process(signed_in_softhsm, tmp_path / "a", b"statement")
    true, changed = in_own_process(verified_in_nss, tmp_path / "b", b"statement", made)
    assert true == "OK"
    assert changed in {"0xc0", "0xc1"}  # CKR_SIGNATURE_INVALID, CKR_SIGNATURE_LEN_RANGE


def test_nss_is_never_served_from() -> None:
    with pytest.raises(ModuleRefused, match="nss"):
        chosen(None, "Mozilla Foundation", "NSS Internal Crypto Services")
