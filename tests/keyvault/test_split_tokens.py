"""Masters that are not TRUSTED, on the real soft HSM: the ceremony, sealing and opening at either site, re-wrap, the comparison."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hsm_fixtures import SO_PIN
from split_tokens import MASTERS, ONE, TWO, SplitSites, TokenProcess, carry, opened, pin_of
from weak_masters import LEFT_OUT, changed

from keyvault import ceremony
from keyvault.ceremony import as_role
from keyvault.errors import CeremonyRefused, KeyVaultError, PromiseBroken, RotationPinNeeded, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_masters import SplitMasters
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass, Role
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession
from keyvault.quirks import Templates, measured
from keyvault.refusals import audit, probe
from keyvault.split_templates import MOVED_DEK, SERVED_DEK, rotation_master, serving_master

PLAIN = b"one voice".ljust(32, b".")


def with_token(config: TokenConfig, work: Callable[[Pkcs11Hsm], Any]) -> Any:
    hsm = opened(config)
    try:
        return work(hsm)
    finally:
        hsm.close()


def with_session(config: TokenConfig, work: Callable[[TokenSession], Any]) -> Any:
    """With the token's own PIN, and nothing of the door between."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, pin_of(config)):
            return work(session)
    finally:
        module.stop()


def sealed_under(hsm: Pkcs11Hsm, master: RingMaster) -> tuple[bytes, bytes]:
    with LockedBuffer(64) as plain, hsm.new_dek(master) as dek:
        plain.view(0, len(PLAIN))[:] = bytearray(PLAIN)
        return dek.wrapped, dek.seal(plain, len(PLAIN), b"aad")


def opens(hsm: Pkcs11Hsm, master: RingMaster, wrapped: bytes, sealed: bytes) -> bool:
    with LockedBuffer(64) as target, hsm.open_dek(master, wrapped) as dek:
        return bytes(target.view(0, dek.open_into(sealed, b"aad", target))) == PLAIN


# What runs in a token's own process


def sealed_at(config: TokenConfig) -> dict[RingMaster, tuple[bytes, bytes]]:
    return with_token(config, lambda hsm: {master: sealed_under(hsm, master) for master in MASTERS})


def opened_at(config: TokenConfig, rows: dict[RingMaster, tuple[bytes, bytes]]) -> list[bool]:
    return with_token(config, lambda hsm: [opens(hsm, master, *row) for master, row in rows.items()])


def compared_at(config: TokenConfig, blobs: dict[RingMaster, bytes] | None) -> dict[RingMaster, tuple[bytes, bytes]]:
    """A canary for each master, the other site's where it is given: its blob, and its MAC under both nonces."""

    def compare(hsm: Pkcs11Hsm) -> dict[RingMaster, tuple[bytes, bytes]]:
        found = {}
        for master in MASTERS:
            with hsm.new_canary(master) if blobs is None else hsm.open_canary(master, blobs[master]) as canary:
                found[master] = (canary.blob, canary.mac(b"both nonces"))
        return found

    return with_token(config, compare)


def rewrapped_at(config: TokenConfig, blobs: list[bytes]) -> list[bytes | str]:
    def move(hsm: Pkcs11Hsm) -> list[bytes | str]:
        moved = hsm.rewrap_many(blobs, ONE, TWO)
        return [one.code if isinstance(one, UnwrapRejected) else one for one in moved]

    return with_token(config, move)


def what_the_rotation_token_opens(config: TokenConfig, blob: bytes) -> str:
    def attempt(hsm: Pkcs11Hsm) -> str:
        try:
            with hsm.open_dek(ONE, blob):
                return "opened"
        except UnwrapRejected as error:
            return str(error)

    return with_token(config, attempt)


def objects(config: TokenConfig) -> set[tuple[str, str]]:
    def look(session: TokenSession) -> set[tuple[str, str]]:
        read = session.calls.read
        return {
            (ObjectClass(read(session.handle, key, Attribute.CLASS)[0]).name, read(session.handle, key, Attribute.LABEL).decode())
            for key in session.find({})
        }

    return with_session(config, look)


def measures(config: TokenConfig) -> tuple[Templates, bool | None]:
    kind = SplitMasters(config.rotation)
    return with_token(config, lambda hsm: hsm._token.run(lambda session: measured(session, ONE, kind)))


def probed(config: TokenConfig) -> dict[str, str]:
    """Masters whose templates miss one part each, as session objects: what the probes and the audit say of each."""
    kind = SplitMasters(config.rotation)
    template = MOVED_DEK if config.rotation else SERVED_DEK
    weaker: dict[str, dict[Attribute, Any]] = {
        f"without {name.name}": {Attribute.UNWRAP_TEMPLATE: changed(template, {name: LEFT_OUT})}
        for name in template
        if name is not Attribute.CLASS  # 32 bytes are no private key
    }
    weaker["no UNWRAP_TEMPLATE"] = {Attribute.UNWRAP_TEMPLATE: LEFT_OUT}
    weaker["COPYABLE"] = {Attribute.COPYABLE: True}
    weaker["MODIFIABLE"] = {Attribute.COPYABLE: True, Attribute.MODIFIABLE: True}
    weaker["EXTRACTABLE"] = {Attribute.EXTRACTABLE: True}
    weaker["SENSITIVE"] = {Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}
    if not config.rotation:
        weaker["WRAP_TEMPLATE"] = {Attribute.WRAP_TEMPLATE: LEFT_OUT}
    weaker["as it should be"] = {}
    # Last: a decryption that was let begin keeps its session.
    weaker["DECRYPT"] = {Attribute.DECRYPT: True, Attribute.ALLOWED_MECHANISMS: LEFT_OUT}

    def look(session: TokenSession) -> dict[str, str]:
        found = {}
        for number, (name, changes) in enumerate(weaker.items(), 1):
            master = RingMaster("weak", number)
            right = rotation_master(master) if config.rotation else serving_master(master, wrap_template=True)
            made = changed({Attribute.VALUE_LEN: 32, **right}, {Attribute.TOKEN: False, **changes})
            key = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, made)
            try:
                probe(session, master, kind)
                found[name] = "passed"
            except PromiseBroken as error:
                found[name] = str(error)
            session.calls.destroy(session.handle, key)
        return found

    return with_session(config, look)


def planted(config: TokenConfig, master: RingMaster, changes: dict[Attribute, Any]) -> str:
    """In the place of the honest master one of a value that the PIN's holder knows; then a start, and what it serves."""

    def plant(session: TokenSession) -> None:
        session.calls.destroy(session.handle, session.key(master.label, ObjectClass.SECRET_KEY))
        template = {**serving_master(master, wrap_template=True), **changes}
        session.calls.create(session.handle, {Attribute.VALUE: bytes(32), **template})

    with_session(config, plant)
    try:
        with_token(config, lambda hsm: None)
    except KeyVaultError as error:
        return f"{error.code}: {error}"
    return "started"


def audited(config: TokenConfig, extra: dict[Attribute, Any]) -> str:
    def look(session: TokenSession) -> str:
        made = session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, {Attribute.VALUE_LEN: 32, **extra})
        try:
            audit(session, MASTERS, kind=SplitMasters())
        except PromiseBroken as error:
            return str(error)
        finally:
            session.calls.destroy(session.handle, made)
        return "passed"

    return with_session(config, look)


# The tests


@pytest.fixture(scope="module")
def rows(split_sites: SplitSites) -> dict[str, dict[RingMaster, tuple[bytes, bytes]]]:
    return {"a": split_sites.a(sealed_at, split_sites.a.config), "b": split_sites.b(sealed_at, split_sites.b.config)}


def test_every_token_says_the_same_of_its_master_and_keeps_nothing_of_the_ceremony(split_sites: SplitSites) -> None:
    assert len(set(split_sites.attributes)) == 1
    assert {"EXTRACTABLE=0", "MODIFIABLE=0", "COPYABLE=0", "SENSITIVE=1", "DECRYPT=0"} <= set(split_sites.attributes[0])
    masters = {("SECRET_KEY", master.label) for master in MASTERS}
    assert split_sites.rotation(objects, split_sites.rotation.config) == masters
    for site in (split_sites.a, split_sites.b):
        found = site(objects, site.config)
        assert masters <= found
        assert not [label for kind, label in found if kind == "PRIVATE_KEY" and "/" in label]


def test_the_start_measures_what_the_profile_says(split_sites: SplitSites) -> None:
    assert split_sites.a(measures, split_sites.a.config) == (Templates.COMPARED, True)
    assert split_sites.rotation(measures, split_sites.rotation.config) == (Templates.COMPARED, None)


def test_both_sites_hold_the_same_masters_in_both_directions(split_sites: SplitSites) -> None:
    for born, other in ((split_sites.a, split_sites.b), (split_sites.b, split_sites.a)):
        made = born(compared_at, born.config, None)
        assert other(compared_at, other.config, {master: blob for master, (blob, _) in made.items()}) == made


def test_what_one_site_sealed_the_other_opens(
    split_sites: SplitSites, rows: dict[str, dict[RingMaster, tuple[bytes, bytes]]]
) -> None:
    for site in (split_sites.a, split_sites.b):
        for sealed in rows.values():
            assert site(opened_at, site.config, sealed) == [True, True]


def test_the_rotation_token_moves_keys_and_opens_none(
    split_sites: SplitSites, rows: dict[str, dict[RingMaster, tuple[bytes, bytes]]]
) -> None:
    wrapped, sealed = rows["a"][ONE]
    moved, refused = split_sites.rotation(rewrapped_at, split_sites.rotation.config, [wrapped, bytes(40)])
    assert refused == "unwrap_rejected"
    for site in (split_sites.a, split_sites.b):
        assert site(opened_at, site.config, {TWO: (moved, sealed)}) == [True]
        with pytest.raises(UnwrapRejected):
            site(opened_at, site.config, {ONE: (moved, sealed)})
    assert "TEMPLATE_INCONSISTENT" in split_sites.rotation(what_the_rotation_token_opens, split_sites.rotation.config, wrapped)


def test_the_serving_token_moves_none(split_sites: SplitSites, rows: dict[str, dict[RingMaster, tuple[bytes, bytes]]]) -> None:
    with pytest.raises(RotationPinNeeded):
        split_sites.a(rewrapped_at, split_sites.a.config, [rows["a"][ONE][0]])


@pytest.mark.parametrize("name", ["a", "rotation"])
def test_every_weaker_master_is_named_by_a_probe(split_sites: SplitSites, name: str) -> None:
    token: TokenProcess = getattr(split_sites, name)
    found = token(probed, token.config)
    assert found.pop("as it should be") == "passed"
    assert "must refuse to unwrap" in found.pop("no UNWRAP_TEMPLATE")
    for weakness, said in found.items():
        assert said != "passed", weakness
        if weakness.startswith("without "):
            assert weakness.removeprefix("without ") in said


def test_more_than_the_masters_fails_the_audit(split_sites: SplitSites) -> None:
    shut = {Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False, Attribute.MODIFIABLE: False}
    for label, said in (
        ("ring/main/3", "masters that nobody allowed: 'ring/main/3'"),
        (ONE.label, "under one name: 'ring/main/1'"),
    ):
        assert said in split_sites.a(audited, split_sites.a.config, {Attribute.TOKEN: True, Attribute.LABEL: label, **shut})


def test_a_planted_master_is_told_by_the_other_site_alone(
    split_sites: SplitSites, rows: dict[str, dict[RingMaster, tuple[bytes, bytes]]], tmp_path: Path
) -> None:
    """What is weaker here: the token serves with it. It opens nothing from before, and no other site opens what it made."""
    folder = tmp_path / "copy"
    assert split_sites.a.config.folder is not None
    shutil.copytree(split_sites.a.config.folder, folder)
    (folder / "softhsm2.conf").write_text(f"directories.tokendir = {folder / 'objects'}\nobjectstore.backend = file\n")
    copy = replace(split_sites.a.config, folder=folder)
    assert split_sites.a(planted, copy, ONE, {}) == "started"
    with pytest.raises(UnwrapRejected):
        split_sites.a(opened_at, copy, {ONE: rows["b"][ONE]})
    forged = split_sites.a(compared_at, copy, None)
    with pytest.raises(UnwrapRejected):
        split_sites.b(compared_at, split_sites.b.config, {master: blob for master, (blob, _) in forged.items()})
    assert "hsm_promise_broken" in split_sites.a(planted, copy, TWO, {Attribute.COPYABLE: True})


def make_alone(config: TokenConfig) -> None:
    ceremony.add_master(config, SO_PIN, pin_of(config), RingMaster("main", 9))


def test_one_token_alone_gets_no_master(split_sites: SplitSites) -> None:
    with pytest.raises(CeremonyRefused, match="two tokens hold each master"):
        split_sites.a(make_alone, split_sites.a.config)
    with pytest.raises(CeremonyRefused, match="already holds"):
        carry(split_sites.a, (split_sites.b,), ONE)
