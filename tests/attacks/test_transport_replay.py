"""A master's transport, recorded and tried again by somebody who holds the receiving site's serving PIN.

The one-time RSA key is gone with the ceremony, so the recorded message opens under no key that is there or can be made. The
control: whoever puts a key of his own in place of the one-time key reads the master, which is why officers compare and sign it.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hsm_fixtures import SO_PIN, USER_PIN, in_own_process
from softhsm_files import master_bytes
from weak_masters import LEFT_OUT, Changes, changed

from keyvault import master_ceremony, softhsm
from keyvault.ceremony import as_role
from keyvault.errors import CallFailed
from keyvault.hsm import RingMaster
from keyvault.master_ceremony import Pins
from keyvault.pkcs11_names import Attribute, KeyType, Mechanism, ObjectClass, Role
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession
from keyvault.templates import master_by_officer

MASTER, PINS = RingMaster("main", 2), Pins(SO_PIN, USER_PIN)
READABLE: Changes = {Attribute.SENSITIVE: False, Attribute.TRUSTED: LEFT_OUT, Attribute.WRAP_WITH_TRUSTED: False}
# The request as the ceremony makes it but for what only an officer may say, one that can be read, and one without limits.
REQUESTS: tuple[Changes, ...] = (
    {Attribute.TRUSTED: LEFT_OUT},
    READABLE,
    {**READABLE, Attribute.UNWRAP_TEMPLATE: LEFT_OUT, Attribute.WRAP_TEMPLATE: LEFT_OUT, Attribute.ALLOWED_MECHANISMS: LEFT_OUT},
)


def empty_token(folder: Path, label: str) -> TokenConfig:
    module = softhsm.find_module()
    return TokenConfig(module, label, softhsm.make_token(module, folder, label, SO_PIN, USER_PIN), folder)


def whole_ceremony(a: TokenConfig, b: TokenConfig) -> bytes:
    """Both halves; the sender's in a process of its own. Returns the message that carried the master."""
    with master_ceremony.receiving(b, PINS, MASTER) as receiver:
        wrapped: bytes
        wrapped, _ = in_own_process(master_ceremony.made_and_wrapped, a, PINS, MASTER, receiver.transport)
        receiver.take(wrapped)
        return wrapped


def replay(b: TokenConfig, wrapped: bytes) -> tuple[int, set[str]]:
    """With the serving PIN: how many RSA keys are there, and what every request under every key that he can make is answered."""
    module = Module(b.module, b.folder)
    try:
        session = module.session(module.token(b.label, b.serial))
        with as_role(session, Role.USER, USER_PIN):
            found = session.find({Attribute.CLASS: ObjectClass.PRIVATE_KEY, Attribute.KEY_TYPE: KeyType.RSA})
            _, own = own_pair(session)
            return len(found), {unwrapped(session, own, wrapped, request)[0] for request in REQUESTS}
    finally:
        module.stop()


def own_pair(session: TokenSession) -> tuple[bytes, int]:
    public = {Attribute.TOKEN: False, Attribute.WRAP: True, Attribute.MODULUS_BITS: 3072, Attribute.PUBLIC_EXPONENT: b"\1\0\1"}
    private = {Attribute.TOKEN: False, Attribute.UNWRAP: True}
    pair = session.calls.generate_pair(session.handle, Mechanism.RSA_PKCS_KEY_PAIR_GEN, public, private)
    n = int.from_bytes(session.calls.read(session.handle, pair[0], Attribute.MODULUS), "big")
    return RSAPublicNumbers(65537, n).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), pair[1]


def unwrapped(session: TokenSession, key: int, wrapped: bytes, changes: Changes) -> tuple[str, bytes]:
    asked = changed(master_by_officer(MASTER), {Attribute.VALUE_LEN: LEFT_OUT, **changes})
    try:
        made = session.calls.unwrap_oaep(session.handle, key, wrapped, asked, Mechanism.SHA_1)
        return "UNWRAPPED", session.calls.read(session.handle, made, Attribute.VALUE)
    except CallFailed as error:
        return error.answer, b""


def with_a_key_of_his_own(a: TokenConfig, b: TokenConfig) -> bytes:
    """His own public key in place of the one-time key: the master in the clear."""
    module = Module(b.module, b.folder)
    try:
        session = module.session(module.token(b.label, b.serial))
        with as_role(session, Role.USER, USER_PIN):
            transport, own = own_pair(session)
            wrapped, _ = in_own_process(master_ceremony.made_and_wrapped, a, PINS, MASTER, transport)
            return unwrapped(session, own, wrapped, REQUESTS[-1])[1]
    finally:
        module.stop()


def test_the_recorded_message_opens_under_no_key(tmp_path: Path) -> None:
    a, b = in_own_process(empty_token, tmp_path / "a", "a"), in_own_process(empty_token, tmp_path / "b", "b")
    wrapped = in_own_process(whole_ceremony, a, b)
    keys, answers = in_own_process(replay, b, wrapped)
    assert keys == 0
    assert answers == {"GENERAL_ERROR"}


def test_a_key_put_in_place_of_the_one_time_key_reads_the_master(tmp_path: Path) -> None:
    a, b = in_own_process(empty_token, tmp_path / "a", "a"), in_own_process(empty_token, tmp_path / "b", "b")
    assert in_own_process(with_a_key_of_his_own, a, b) == master_bytes(a.folder, USER_PIN, MASTER.label)
