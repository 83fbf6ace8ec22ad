"""Versions of a signing key in a real token: seen by another process without a restart, gone for it too, and audited strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key
from hsm_fixtures import USER_PIN, ServingToken, copied, in_own_process

from keyvault.errors import CeremonyRefused, KeyNotFound, KeyVaultError
from keyvault.hsm import KeyName, RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Attribute, Mechanism
from keyvault.pkcs11_start import TokenConfig
from keyvault.refusals import audit
from keyvault.templates import KEYS, signer_plan, versioned_signer

MASTER = RingMaster("main", 1)
NAME = KeyName.TOKEN_SIGNER


def opened(config: TokenConfig) -> Pkcs11Hsm:
    return Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))


def make(config: TokenConfig) -> bytes:
    hsm = opened(config)
    made = hsm.make_signer(NAME, 2)
    try:
        hsm.make_signer(NAME, 2)
    except CeremonyRefused:
        return made
    finally:
        hsm.close()
    raise AssertionError("made twice")


def destroy(config: TokenConfig) -> tuple[int, ...]:
    hsm = opened(config)  # the start's audit accepts a version that was made here
    hsm.destroy_signer(NAME, 2)
    hsm.destroy_signer(NAME, 2)
    left = hsm.signer_versions(NAME)
    hsm.close()
    return left


def holds(public: bytes, data: bytes, signature: bytes) -> None:
    key = load_der_public_key(public)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    halves = (int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big"))
    key.verify(encode_dss_signature(*halves), data, ec.ECDSA(SHA256()))


def test_another_process_makes_a_version_and_this_one_signs_with_it_at_once(serving_token: ServingToken) -> None:
    hsm = serving_token.hsm
    assert hsm.signer_versions(NAME) == (1,)
    for ask in (lambda: hsm.sign(NAME, b"data", 2), lambda: hsm.public_key(NAME, 2)):
        with pytest.raises(KeyNotFound):
            ask()
    public = in_own_process(make, serving_token.config)
    try:
        assert hsm.public_key(NAME, 2) == public != hsm.public_key(NAME)
        holds(public, b"data", hsm.sign(NAME, b"data", 2))
        holds(hsm.public_key(NAME), b"data", hsm.sign(NAME, b"data"))
        assert hsm.signer_versions(NAME) == (1, 2)
        hsm.refresh((MASTER,), (MASTER,))
    finally:
        assert in_own_process(destroy, serving_token.config) == (1,)
    recoveries = hsm.figures.recoveries
    for ask in (lambda: hsm.sign(NAME, b"data", 2), lambda: hsm.public_key(NAME, 2)):
        with pytest.raises(KeyVaultError):
            ask()
    assert hsm.figures.recoveries == recoveries, "a version that is gone is no reason to start the module anew"
    holds(hsm.public_key(NAME), b"data", hsm.sign(NAME, b"data"))


def audited_versions(config: TokenConfig) -> dict[str, str]:
    hsm = opened(config)
    session = hsm._token.open_session()
    calls, handle = session.calls, session.handle
    plan, mac = signer_plan(NAME, 2), KEYS[KeyName.RECORD_MAC]
    assert plan.public is not None
    label = {"x": "token-signer/x", "02": "token-signer/02", "1": "token-signer/1", "site": "site-identity/2"}
    found: dict[str, str] = {}

    def look(name: str, *made: int) -> None:
        try:
            audit(session, (MASTER,))
            found[name] = "passed"
        except KeyVaultError as error:
            found[name] = str(error)
        for key in made:
            calls.destroy(handle, key)

    def pair(public: dict[Attribute, object], private: dict[Attribute, object]) -> tuple[int, int]:
        return calls.generate_pair(handle, plan.generate, {**plan.public, **public}, {**plan.template, **private})  # type: ignore[dict-item]

    look("as it should be", *pair({}, {}))
    for name, wrong in label.items():
        other: dict[Attribute, object] = {Attribute.LABEL: wrong}
        look(name, *pair(other, other))
    look("mac", calls.generate_key(handle, mac.generate, {**mac.template, Attribute.LABEL: "record-mac/2"}))
    look("extractable", *pair({}, {Attribute.EXTRACTABLE: True}))
    look("unwraps", *pair({}, {Attribute.UNWRAP: True, Attribute.ALLOWED_MECHANISMS: (Mechanism.ECDSA,)}))
    look("wraps", *pair({Attribute.WRAP: True}, {}))
    look("twice", *pair({}, {}), *pair({}, {}))
    look("afterwards")
    hsm.close()
    return found


def test_the_start_accepts_versions_of_signers_made_here_and_nothing_beside(serving_token: ServingToken, tmp_path: Path) -> None:
    found = in_own_process(audited_versions, copied(serving_token, tmp_path / "copy"))
    assert (found.pop("as it should be"), found.pop("afterwards")) == ("passed", "passed")
    said = {"extractable": "EXTRACTABLE", "unwraps": "UNWRAP", "wraps": "WRAP", "twice": "more than one key"}
    assert {name: "passed" for name, why in said.items() if why not in found.pop(name)} == {}
    assert [name for name, verdict in found.items() if "none of ours" not in verdict] == []


def test_only_later_versions_of_rotating_signers_have_such_a_label() -> None:
    assert versioned_signer("token-signer/2") == (NAME, 2)
    for label in (
        "token-signer",
        "token-signer/1",
        "token-signer/0",
        "token-signer/٣",
        "record-mac/2",
        "site-identity/2",
        "x/2",
    ):
        assert versioned_signer(label) is None
    for name, version in ((NAME, 1), (KeyName.RECORD_MAC, 2), (KeyName.SITE_IDENTITY, 2)):
        with pytest.raises(ValueError):
            signer_plan(name, version)
