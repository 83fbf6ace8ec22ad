"""Quirk profiles: chosen by name or by what the module says of itself, and refused where the token shows otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hsm_fixtures import USER_PIN, ServingToken, in_own_process

from keyvault.errors import KeyVaultError, ModuleRefused
from keyvault.hsm import RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_masters import SplitMasters
from keyvault.pkcs11_start import TokenConfig
from keyvault.quirks import PROFILES, Templates, chosen, measured

MASTER = RingMaster("main", 1)


def start(config: TokenConfig) -> str:
    try:
        Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,)).close()
    except KeyVaultError as error:
        return f"{error.code}: {error}"
    return "started"


def test_a_module_is_known_by_its_description_or_is_generic() -> None:
    assert chosen(None, "SoftHSM                         ", "Implementation of PKCS11        ").name == "softhsm"
    assert chosen(None, "Cavium, Inc").name == "cloudhsm"
    assert chosen(None, "Somebody", "Something").name == "generic"
    assert chosen("generic", "SoftHSM").name == "generic"


def test_a_module_that_lets_shut_keys_out_is_refused() -> None:
    for attempt in (("nss",), (None, PROFILES["nss"].recognised_by[0])):
        with pytest.raises(ModuleRefused, match="'nss' are never served from"):
            chosen(*attempt)


def test_only_modules_without_trusted_masters_have_a_rotation_token() -> None:
    assert chosen("luna").masters(rotation=True) == SplitMasters(rotation=True)
    assert chosen("softhsm-split").masters() == SplitMasters()
    with pytest.raises(ModuleRefused, match="has no rotation token"):
        chosen("softhsm").masters(rotation=True)


def test_a_weaker_profile_is_used_where_it_is_named_and_never_found() -> None:
    with pytest.raises(ModuleRefused, match="name that"):
        chosen(None, PROFILES["luna"].recognised_by[0])


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModuleRefused, match="softhsm, softhsm-split, nss, cloudhsm, luna, generic, generic-split"):
        chosen("softhsm2")


def test_what_softhsm_does_is_measured(serving_token: ServingToken) -> None:
    with serving_token.hsm._token.new_session() as session:
        assert measured(session, MASTER) == (Templates.COMPARED, True)


def test_a_profile_that_the_token_refutes_is_refused(serving_token: ServingToken) -> None:
    assert in_own_process(start, serving_token.config) == "started"
    assert in_own_process(start, replace(serving_token.config, profile="generic")) == "started"
    said = in_own_process(start, replace(serving_token.config, profile="cloudhsm"))
    assert said == ("pkcs11_module_refused: the profile 'cloudhsm' says that UNWRAP_TEMPLATE is added; the token shows: compared")
