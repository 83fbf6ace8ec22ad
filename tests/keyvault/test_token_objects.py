"""Anchors, refresh and the end of a master, on tokens of their own: what another process did, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsm_fixtures import SO_PIN, USER_PIN, ServingToken, copied, in_own_process, make_serving_token

from keyvault import ceremony
from keyvault.errors import HsmUnavailable, KeyNotFound, KeyVaultError
from keyvault.hsm import RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Attribute, ObjectClass
from keyvault.pkcs11_start import Module, TokenConfig
from keyvault.templates import ANCHOR_LABEL, anchor_object

ONE, TWO = RingMaster("main", 1), RingMaster("main", 2)


def code_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except KeyVaultError as error:
        return error.code
    return "worked"


# What runs in a process of its own


def add_second(config: TokenConfig) -> None:
    ceremony.add_master(config, SO_PIN, USER_PIN, TWO)


def see_a_new_master(config: TokenConfig) -> dict[str, Any]:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE, TWO), required_masters=(ONE,))
    report: dict[str, Any] = {"before": hsm.masters()}
    in_own_process(add_second, config)
    report["not served unasked"] = code_of(lambda: hsm.new_dek(TWO).__enter__())
    report["not allowed"] = code_of(lambda: hsm.refresh((ONE,), (ONE,)))
    report["still"] = hsm.masters()
    hsm.refresh((ONE, TWO), (ONE, TWO))
    report["after"] = hsm.masters()
    with hsm.new_dek(ONE) as dek:
        old = dek.wrapped
    with hsm.open_dek(TWO, hsm.rewrap(old, ONE, TWO)):
        report["moved"] = True
    report["agreed"] = len(set(hsm.held().values()))
    return report


def start_with(config: TokenConfig, allowed: tuple[RingMaster, ...], required: tuple[RingMaster, ...] | None) -> Any:
    try:
        hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=allowed, required_masters=required)
    except KeyVaultError as error:
        return error.code, str(error)
    masters = hsm.masters()
    hsm.close()
    return masters


def end_a_master(config: TokenConfig) -> dict[str, Any]:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE, TWO))
    report: dict[str, Any] = {"before": sorted(hsm.held())}
    with hsm.new_dek(TWO) as dek:
        wrapped = dek.wrapped
    with hsm._token.new_session() as session:
        calls, handle = session.calls, session.handle
        key = session.key(TWO.label, ObjectClass.SECRET_KEY, trusted=True)
        calls.copy(handle, key, {})
        calls.copy(handle, key, {})
        report["objects"] = len(session.find({Attribute.LABEL: TWO.label}))
    hsm.destroy_master(TWO)
    hsm.destroy_master(TWO)
    report["after"] = sorted(hsm.held())
    report["opening"] = code_of(lambda: hsm.open_dek(TWO, wrapped).__enter__())
    report["served"] = hsm.masters()
    with hsm._token.new_session() as session:
        report["left"] = len(session.find({Attribute.ID: TWO.label.encode()}))
    with hsm.new_dek(ONE) as dek:
        report["the other serves"] = len(dek.wrapped)
    hsm.close()
    return report


def destroyed_by_another(config: TokenConfig) -> list[str]:
    """A worker that still holds the handle of a master that another process destroyed."""
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE, TWO))
    with hsm.new_dek(TWO) as dek:
        wrapped = dek.wrapped
    in_own_process(destroy_second, config)
    answers = [code_of(lambda: hsm.open_dek(TWO, wrapped).__enter__()) for _ in range(3)]
    hsm.refresh((ONE, TWO), (ONE,))
    return [*answers, code_of(lambda: hsm.open_dek(TWO, wrapped).__enter__()), code_of(lambda: hsm.new_dek(ONE).__enter__())]


def destroy_second(config: TokenConfig) -> None:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE, TWO))
    hsm.destroy_master(TWO)
    hsm.close()


def anchors_after_a_crash(config: TokenConfig) -> dict[str, Any]:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE,))
    hsm.replace_anchors(b"epoch 1")
    with hsm._token.new_session() as session:  # the crash: written, and the old one not destroyed
        session.calls.create(session.handle, anchor_object(b"epoch 2"))
    report: dict[str, Any] = {"both": sorted(hsm.anchors())}
    hsm.replace_anchors(b"epoch 3")
    hsm.close()
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE,))
    report["after a start"] = hsm.anchors()
    hsm.close()
    module = Module(config.module, config.folder)
    session = module.session(module.token(config.label, config.serial))
    report["without the PIN"] = session.find({Attribute.LABEL: ANCHOR_LABEL})
    module.stop()
    return report


# The tests


def test_a_master_that_a_ceremony_adds_is_served_after_refresh(tmp_path: Path) -> None:
    config, _ = in_own_process(make_serving_token, tmp_path / "token")
    report = in_own_process(see_a_new_master, config)
    assert report["before"] == report["still"] == (ONE,)
    assert report["not served unasked"] == "key_version_not_found"
    assert report["not allowed"] == "hsm_promise_broken"
    assert report["after"] == (ONE, TWO)
    assert report["moved"]
    assert report["agreed"] == 1, "two masters made alike read alike"


def test_a_start_serves_what_is_allowed_and_refuses_what_is_missing(serving_token: ServingToken) -> None:
    """A15: a token without the master that rows need is refused by name; nothing is made in its place."""
    assert in_own_process(start_with, serving_token.config, (ONE, TWO), (ONE,)) == (ONE,)
    assert in_own_process(start_with, serving_token.config, (ONE,), ()) == (ONE,)
    code, said = in_own_process(start_with, serving_token.config, (ONE, TWO), None)
    assert (code, "ring/main/2" in said) == ("master_missing", True)


def test_a_destroyed_master_is_gone_with_its_clones(tmp_path: Path) -> None:
    config, _ = in_own_process(make_serving_token, tmp_path / "token")
    in_own_process(add_second, config)
    report = in_own_process(end_a_master, config)
    assert report["before"] == [ONE.label, TWO.label]
    assert report["objects"] == 3
    assert (report["after"], report["served"], report["left"]) == ([ONE.label], (ONE,), 0)
    assert report["opening"] == KeyNotFound.code
    assert report["the other serves"] == 40
    assert in_own_process(start_with, config, (ONE, TWO), ()) == (ONE,), "nor is it back after a start"


def test_a_worker_that_another_process_destroyed_a_master_for_fails_closed(tmp_path: Path) -> None:
    config, _ = in_own_process(make_serving_token, tmp_path / "token")
    in_own_process(add_second, config)
    answers = in_own_process(destroyed_by_another, config)
    assert answers == [HsmUnavailable.code] * 3 + [KeyNotFound.code, "worked"]


def test_anchors_outlive_a_crash_and_a_start_and_need_the_pin(serving_token: ServingToken, tmp_path: Path) -> None:
    report = in_own_process(anchors_after_a_crash, copied(serving_token, tmp_path / "copy"))
    assert report["both"] == [b"epoch 1", b"epoch 2"]
    assert report["after a start"] == (b"epoch 3",)
    assert report["without the PIN"] == []
