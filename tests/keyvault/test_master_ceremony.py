"""A master made at one token and carried to another: two real SoftHSM tokens, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hsm_fixtures import SO_PIN, USER_PIN, fresh_processes, in_own_process
from softhsm_files import LABEL, VALUE, attributes, master_bytes

from keyvault import ceremony, master_ceremony, softhsm
from keyvault.ceremony import as_role
from keyvault.errors import CallFailed, CeremonyRefused, KeyVaultError, PinRejected, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.locked import LockedBuffer
from keyvault.master_ceremony import Pins
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_names import Attribute, Mechanism, ObjectClass, Role
from keyvault.pkcs11_start import Module, TokenConfig
from keyvault.templates import master_by_officer

MASTER = RingMaster("main", 2)
PINS = Pins(SO_PIN, USER_PIN)
PLAIN = b"one voice".ljust(32, b".")


def empty_token(folder: Path, label: str) -> TokenConfig:
    module = softhsm.find_module()
    return TokenConfig(module, label, softhsm.make_token(module, folder, label, SO_PIN, USER_PIN), folder)


def receive(pipe: Connection, config: TokenConfig, master: RingMaster, pins: Pins) -> None:
    """The receiving site's process: sends its one-time public key, takes the answer, says what it then holds."""
    try:
        with master_ceremony.receiving(config, pins, master) as receiver:
            pipe.send(receiver.transport)
            while (wrapped := pipe.recv()) is not None:
                pipe.send(receiver.take(wrapped))
    except KeyVaultError as error:
        pipe.send(error)


@contextmanager
def receiving_process(config: TokenConfig, master: RingMaster = MASTER, pins: Pins = PINS) -> Iterator[Connection]:
    fresh = fresh_processes()
    here, there = fresh.Pipe()
    process = fresh.Process(target=receive, args=(there, config, master, pins))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(10)
        process.kill()


def objects(config: TokenConfig, pin: str) -> list[tuple[str, str]]:
    """Class and label of everything that a process with the serving PIN sees in the token."""
    module = Module(config.module, config.folder)
    try:
        session = module.session(module.token(config.label, config.serial))
        with as_role(session, Role.USER, pin):
            read = session.calls.read
            return sorted(
                (
                    ObjectClass(read(session.handle, found, Attribute.CLASS)[0]).name,
                    read(session.handle, found, Attribute.LABEL).decode(),
                )
                for found in session.find({})
            )
    finally:
        module.stop()


def sealed_at(config: TokenConfig) -> tuple[bytes, bytes]:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))
    try:
        with LockedBuffer(64) as plain, hsm.new_dek(MASTER) as dek:
            plain.view(0, len(PLAIN))[:] = bytearray(PLAIN)
            return dek.wrapped, dek.seal(plain, len(PLAIN), b"aad")
    finally:
        hsm.close()


def opened_at(config: TokenConfig, wrapped: bytes, sealed: bytes) -> bytes:
    hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=(MASTER,))
    try:
        with LockedBuffer(64) as opened, hsm.open_dek(MASTER, wrapped) as dek:
            return bytes(opened.view(0, dek.open_into(sealed, b"aad", opened)))
    finally:
        hsm.close()


@pytest.fixture
def sites(tmp_path: Path) -> tuple[TokenConfig, TokenConfig]:
    return in_own_process(empty_token, tmp_path / "a", "a"), in_own_process(empty_token, tmp_path / "b", "b")


def test_a_master_of_both_tokens(sites: tuple[TokenConfig, TokenConfig]) -> None:
    a, b = sites
    with receiving_process(b) as pipe:
        transport = pipe.recv()
        assert in_own_process(objects, b, USER_PIN) == []  # the one-time key is no other process's
        wrapped, held_at_a = in_own_process(master_ceremony.made_and_wrapped, a, PINS, MASTER, transport)
        pipe.send(wrapped)
        assert pipe.recv() == held_at_a
        assert {"TRUSTED=1", "EXTRACTABLE=0", "MODIFIABLE=0", "SENSITIVE=1", "DECRYPT=0"} <= set(held_at_a)
        # The one-time key was destroyed when it had served, not when its process ends.
        pipe.send(wrapped)
        assert isinstance(pipe.recv(), (UnwrapRejected, CallFailed))
    for site in sites:
        assert in_own_process(objects, site, USER_PIN) == [("SECRET_KEY", MASTER.label)]
        assert in_own_process(master_ceremony.versions, site, USER_PIN, "main") == (2,)
    assert in_own_process(opened_at, b, *in_own_process(sealed_at, a)) == PLAIN
    assert in_own_process(opened_at, a, *in_own_process(sealed_at, b)) == PLAIN
    value = master_bytes(a.folder, USER_PIN, MASTER.label)
    assert value == master_bytes(b.folder, USER_PIN, MASTER.label)
    assert not lies_in_clear(value, a.folder)
    assert not lies_in_clear(value, b.folder)


def lies_in_clear(value: bytes, folder: Path | None) -> bool:
    assert folder is not None
    return any(value in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def officers_token_object(config: TokenConfig) -> None:
    module = Module(config.module, config.folder)
    session = module.session(module.token(config.label, config.serial))
    with as_role(session, Role.SECURITY_OFFICER, SO_PIN):
        template = {**master_by_officer(MASTER), Attribute.TOKEN: True}
        session.calls.generate_key(session.handle, Mechanism.AES_KEY_GEN, template)
    module.stop()


def test_the_search_finds_a_value_that_lies_in_clear(tmp_path: Path) -> None:
    """Positive control: what an officer makes as a token object is not encrypted on disk."""
    config = in_own_process(empty_token, tmp_path / "a", "a")
    in_own_process(officers_token_object, config)
    stored = [dict(attributes(path.read_bytes())) for path in tmp_path.rglob("*.object") if path.name != "token.object"]
    values = [found[VALUE] for found in stored if found.get(LABEL) == MASTER.label.encode()]
    assert len(values[0]) == 32
    assert lies_in_clear(values[0], config.folder)


def test_an_answer_for_another_key_is_refused_and_leaves_nothing(sites: tuple[TokenConfig, TokenConfig]) -> None:
    a, b = sites
    swapped = rsa.generate_private_key(65537, 3072).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    wrapped, _ = in_own_process(master_ceremony.made_and_wrapped, a, PINS, MASTER, swapped)
    with receiving_process(b) as pipe:
        pipe.recv()
        pipe.send(wrapped)
        assert isinstance(pipe.recv(), UnwrapRejected)
    assert in_own_process(objects, b, USER_PIN) == []
    assert in_own_process(master_ceremony.removed, a, USER_PIN, MASTER) == 1
    assert in_own_process(master_ceremony.removed, a, USER_PIN, MASTER) == 0
    assert in_own_process(objects, a, USER_PIN) == []


def test_a_receiver_that_dies_leaves_nothing(tmp_path: Path) -> None:
    config = in_own_process(empty_token, tmp_path / "b", "b")
    with receiving_process(config) as pipe:
        pipe.recv()
    assert in_own_process(objects, config, USER_PIN) == []


def weak_keys() -> list[bytes]:
    short = rsa.generate_private_key(65537, 2048).public_key()
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    return [*(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in (short, other)), b"no key"]


def refusals(config: TokenConfig) -> list[str]:
    """What a token that holds version 2 already says to each attempt, and to each wrong PIN: one C_Login each."""
    tries: list[Callable[[], Any]] = [
        *(lambda key=key: master_ceremony.made_and_wrapped(config, PINS, RingMaster("main", 3), key) for key in weak_keys()),
        lambda: master_ceremony.receiving(config, PINS, MASTER).__enter__(),
        lambda: master_ceremony.receiving(config, Pins("wrong", USER_PIN), RingMaster("main", 3)).__enter__(),
        lambda: master_ceremony.receiving(config, Pins(SO_PIN, "wrong"), RingMaster("main", 3)).__enter__(),
    ]
    said = []
    for attempt in tries:
        try:
            attempt()
        except (CeremonyRefused, PinRejected) as error:
            said.append(error.code)
    return said


def test_wrong_pins_known_versions_and_weak_keys_are_refused(tmp_path: Path) -> None:
    """A16: a wrong PIN is tried once, and nothing is made."""
    config = in_own_process(empty_token, tmp_path / "a", "a")
    in_own_process(ceremony.add_master, config, SO_PIN, USER_PIN, MASTER)
    assert in_own_process(refusals, config) == [*["ceremony_refused"] * 4, "pin_rejected", "pin_rejected"]
    assert in_own_process(objects, config, USER_PIN) == [("SECRET_KEY", MASTER.label)]


def refused_twice(config: TokenConfig) -> list[str]:
    """Wrong PINs of either role: the token is asked once, and the next ceremony does not ask it again at once."""
    said = []
    wrong_user, wrong_officer = Pins(SO_PIN, "wrong-pin"), Pins("wrong-so-pin", USER_PIN)
    for pins in (wrong_officer, Pins(SO_PIN, USER_PIN), wrong_user, wrong_user):
        try:
            with master_ceremony.receiving(config, pins, RingMaster("throttled", 1)):
                said.append("open")
        except PinRejected as error:
            said.append(error.code)
    return said


def test_a_refused_pin_is_not_tried_again_at_once_in_a_ceremony(tmp_path: Path) -> None:
    config = in_own_process(empty_token, tmp_path, "pins")
    assert in_own_process(refused_twice, config) == ["pin_rejected", "pin_throttled", "pin_rejected", "pin_throttled"]
