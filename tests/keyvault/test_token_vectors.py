"""Published vectors (Wycheproof) through the token: AES key wrap, AES-CMAC, and ECDSA P-256 as raw r||s."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pkcs11
import pytest
from hsm_fixtures import ServingToken
from pkcs11 import Attribute as A

from keyvault.errors import CallFailed
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass
from keyvault.pkcs11_start import TokenSession
from keyvault.templates import P256

VECTORS = Path(__file__).parent.parent / "vectors" / "wycheproof"


def cases(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for group in json.loads((VECTORS / f"{name}_test.json").read_text())["testGroups"]:
        for case in group["tests"]:
            yield group, case


@pytest.fixture
def session(serving_token: ServingToken) -> Iterator[TokenSession]:
    """A session of its own: what the vectors put into the token ends with it."""
    opened = serving_token.hsm._token.open_session()
    yield opened
    opened.close()


def known_key(session: TokenSession, value: bytes, *uses: A) -> int:
    template = {A.CLASS: pkcs11.ObjectClass.SECRET_KEY, A.KEY_TYPE: pkcs11.KeyType.AES, A.VALUE: value, A.TOKEN: False}
    return int(session._session.create_object(template | dict.fromkeys(uses, True)).handle)


def test_aes_key_wrap(session: TokenSession) -> None:
    """RFC 3394: every valid blob unwraps to its key and is wrapped again the same; no other blob unwraps."""
    seen = {"valid": 0, "invalid": 0}
    for _, case in cases("aes_wrap"):
        wrapping = known_key(session, bytes.fromhex(case["key"]), A.WRAP, A.UNWRAP)
        wrapped, wanted = bytes.fromhex(case["ct"]), bytes.fromhex(case["msg"])
        template = {
            Attribute.CLASS: ObjectClass.SECRET_KEY,
            Attribute.KEY_TYPE: KeyType.GENERIC_SECRET,
            Attribute.TOKEN: False,
            Attribute.SENSITIVE: False,
            Attribute.EXTRACTABLE: True,
        }
        try:
            key = session.calls.unwrap(session.handle, wrapping, wrapped, template)
        except CallFailed:
            assert case["result"] != "valid", case  # "acceptable": keys of 8 bytes, which RFC 3394 leaves out
            seen["invalid"] += 1
        else:
            assert case["result"] in ("valid", "acceptable"), case
            assert session.calls.read(session.handle, key, Attribute.VALUE) == wanted, case
            if len(wrapped) <= 64:
                assert session.calls.wrap(session.handle, wrapping, key) == wrapped, case
            session.calls.destroy(session.handle, key)
            seen["valid"] += 1
        session.calls.destroy(session.handle, wrapping)
    assert min(seen.values()) > 20


def test_aes_cmac(session: TokenSession) -> None:
    """RFC 4493 and SP 800-38B: the token makes the valid tag, and never the invalid one."""
    made = 0
    for group, case in cases("aes_cmac"):
        if len(case["key"]) not in (32, 48, 64):
            continue  # no AES key at all: it cannot be put into a token
        key = known_key(session, bytes.fromhex(case["key"]), A.SIGN)
        tag = session.calls.sign(session.handle, key, Mechanism.AES_CMAC, bytes.fromhex(case["msg"]))
        assert (tag[: group["tagSize"] // 8].hex() == case["tag"]) == (case["result"] == "valid"), case
        session.calls.destroy(session.handle, key)
        made += 1
    assert made > 100


def test_ecdsa_p256_raw(session: TokenSession) -> None:
    """The token's own ECDSA over our SHA-256: accepts what is valid, and no other r||s."""
    accepted = 0
    for group, case in cases("ecdsa_secp256r1_sha256_p1363"):
        point = bytes.fromhex(group["publicKey"]["uncompressed"])
        public = session._session.create_object(
            {
                A.CLASS: pkcs11.ObjectClass.PUBLIC_KEY,
                A.KEY_TYPE: pkcs11.KeyType.EC,
                A.EC_PARAMS: P256,
                A.EC_POINT: b"\x04\x41" + point,
                A.VERIFY: True,
                A.TOKEN: False,
            }
        )
        digest = hashlib.sha256(bytes.fromhex(case["msg"])).digest()
        try:
            holds = public.verify(digest, bytes.fromhex(case["sig"]), mechanism=pkcs11.Mechanism.ECDSA)
        except pkcs11.PKCS11Error:
            holds = False
        assert holds == (case["result"] == "valid"), case
        accepted += holds
        public.destroy()
    assert accepted > 50
