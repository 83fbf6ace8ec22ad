"""What the `SiteHsm` protocol promises, asked of a real SoftHSM token and of the fake: one list of tests for both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key
from fakes import FakeHsm

from keyvault.errors import KeyNotFound, PromiseBroken, SealBroken, UnwrapRejected
from keyvault.hsm import Hsm, KeyName, RingMaster, Sealed, SiteHsm
from keyvault.locked import LockedBuffer

MASTER = RingMaster("main", 1)
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
P256_KEYS = (KeyName.TOKEN_SIGNER, KeyName.PROVENANCE_SIGNER, KeyName.SITE_IDENTITY)


@pytest.fixture(params=["fake", "softhsm"])
def hsm(request: pytest.FixtureRequest) -> SiteHsm:
    return FakeHsm() if request.param == "fake" else request.getfixturevalue("serving_token").hsm


@pytest.fixture
def voice() -> Iterator[LockedBuffer]:
    """1 KiB of numbers in locked memory."""
    with LockedBuffer(1024) as buffer:
        buffer.array(256)[:] = np.linspace(-1, 1, 256, dtype=np.float32)
        yield buffer


def sealed_with(hsm: Hsm, voice: LockedBuffer, aad: bytes = b"aad") -> tuple[bytes, bytes]:
    with hsm.new_dek(MASTER) as dek:
        return dek.wrapped, dek.seal(voice, 1024, aad)


def test_what_is_sealed_opens_into_the_buffer_and_nowhere_beside_it(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    assert (len(wrapped), len(sealed)) == (40, 12 + 1024 + 16)
    with LockedBuffer(1024 + 64) as target:
        target.view(0, target.size)[:] = 0xA5
        with hsm.open_dek(MASTER, wrapped) as dek:
            assert dek.open_into(sealed, b"aad", target, 32) == 1024
        assert bytes(target.view(32, 32 + 1024)) == bytes(voice.view(0, 1024))
        assert set(bytes(target.view(0, 32)) + bytes(target.view(32 + 1024, target.size))) == {0xA5}


def test_every_seal_has_a_nonce_of_its_own_and_every_dek_is_another(hsm: Hsm, voice: LockedBuffer) -> None:
    with hsm.new_dek(MASTER) as dek:
        nonces = {dek.seal(voice, 16, b"")[:12] for _ in range(50)}
        first = dek.wrapped
    with hsm.new_dek(MASTER) as dek:
        assert dek.wrapped != first
    assert len(nonces) == 50


@pytest.mark.parametrize("place", [0, 11, 12, 500, 1035, 1036, 1051])
def test_a_changed_byte_breaks_the_seal_and_leaves_zeros(hsm: Hsm, voice: LockedBuffer, place: int) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    broken = bytearray(sealed)
    broken[place] ^= 1
    with LockedBuffer(2048) as target, hsm.open_dek(MASTER, wrapped) as dek:
        target.view(0, 2048)[:] = 0xA5
        with pytest.raises(SealBroken):
            dek.open_into(bytes(broken), b"aad", target, 512)
        assert not target.view(512, 512 + 1024).any()
        assert set(bytes(target.view(0, 512))) == {0xA5}
        assert dek.open_into(sealed, b"aad", target) == 1024  # the session stays good


def test_another_context_or_a_short_row_breaks_the_seal(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    with LockedBuffer(2048) as target, hsm.open_dek(MASTER, wrapped) as dek:
        for data, aad in ((sealed, b"another"), (sealed, b""), (sealed[:-1], b"aad"), (sealed[:28], b"aad"), (b"", b"aad")):
            with pytest.raises(SealBroken):
                dek.open_into(data, aad, target)


def test_a_dek_opens_nothing_of_another_dek(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, _ = sealed_with(hsm, voice)
    _, foreign = sealed_with(hsm, voice)
    with LockedBuffer(1024) as target, hsm.open_dek(MASTER, wrapped) as dek, pytest.raises(SealBroken):
        dek.open_into(foreign, b"aad", target)


@pytest.mark.parametrize(("size", "offset"), [(1023, 0), (1024, 1), (1024, -1), (4096, 4096)])
def test_open_into_checks_the_range_before_it_touches_memory(hsm: Hsm, voice: LockedBuffer, size: int, offset: int) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    with LockedBuffer(size) as target, hsm.open_dek(MASTER, wrapped) as dek, pytest.raises(ValueError, match="do not fit"):
        dek.open_into(sealed, b"aad", target, offset)


@pytest.mark.parametrize("length", [0, -1, 1025])
def test_seal_checks_the_range_before_it_reads_memory(hsm: Hsm, voice: LockedBuffer, length: int) -> None:
    with hsm.new_dek(MASTER) as dek, pytest.raises(ValueError, match="cannot seal"):
        dek.seal(voice, length, b"aad")


@pytest.mark.parametrize("wrapped", [b"", b"short", bytes(40), bytes(39), bytes(48), bytes(4096)])
def test_what_no_master_wrapped_is_not_unwrapped(hsm: Hsm, wrapped: bytes) -> None:
    with pytest.raises(UnwrapRejected), hsm.open_dek(MASTER, wrapped):
        pass
    with pytest.raises(UnwrapRejected):
        hsm.rewrap(wrapped, MASTER, MASTER)


def test_a_tampered_wrapped_key_is_not_unwrapped(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, _ = sealed_with(hsm, voice)
    for place in range(40):
        tampered = bytearray(wrapped)
        tampered[place] ^= 1
        with pytest.raises(UnwrapRejected), hsm.open_dek(MASTER, bytes(tampered)):
            pass


@pytest.mark.parametrize("master", [RingMaster("main", 2), RingMaster("main", 0), RingMaster("other", 1)])
def test_a_missing_master_is_not_found_and_never_replaced(hsm: Hsm, master: RingMaster) -> None:
    with pytest.raises(KeyNotFound), hsm.new_dek(master):
        pass
    with pytest.raises(KeyNotFound), hsm.open_dek(master, bytes(40)):
        pass
    with pytest.raises(KeyNotFound):
        hsm.rewrap(bytes(40), MASTER, master)
    assert hsm.masters() == (MASTER,)


def test_one_visit_opens_what_its_record_permits(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    macs: list[bytes] = []
    with LockedBuffer(4096) as target:
        places = [Sealed(sealed, b"aad", target, 32), Sealed(sealed, b"aad", target, 2048)]
        hsm.open_recorded(MASTER, wrapped, places, b"the row", macs.append)
        for part in places:
            assert bytes(target.view(part.offset, part.offset + 1024)) == bytes(voice.view(0, 1024))
    assert macs == [hsm.mac(KeyName.RECORD_MAC, b"the row")]


class Refused(Exception):
    pass


def refuse(_: bytes) -> None:
    raise Refused


def test_what_is_not_permitted_is_not_unwrapped(hsm: Hsm, voice: LockedBuffer) -> None:
    _, sealed = sealed_with(hsm, voice)
    with LockedBuffer(1024) as target:
        target.array(256)[:] = 1
        # The blob is broken too: had it been unwrapped first, UnwrapRejected would be raised.
        with pytest.raises(Refused):
            hsm.open_recorded(MASTER, bytes(40), [Sealed(sealed, b"aad", target)], b"the row", refuse)
        assert not target.view(0, 1024).any()


@pytest.mark.parametrize("broken", ["the blob", "the second row", "no such master"])
def test_a_visit_that_fails_leaves_zeros_everywhere(hsm: Hsm, voice: LockedBuffer, broken: str) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    blob, second, master = wrapped, sealed, MASTER
    match broken:
        case "the blob":
            blob, refused = wrapped[:-1] + bytes([wrapped[-1] ^ 1]), UnwrapRejected
        case "the second row":
            second, refused = sealed[:-1] + bytes([sealed[-1] ^ 1]), SealBroken
        case _:
            master, refused = RingMaster("main", 99), KeyNotFound
    with LockedBuffer(4096) as target:
        target.array(1024)[:] = 1
        places = [Sealed(sealed, b"aad", target), Sealed(second, b"aad", target, 2048)]
        with pytest.raises(refused):
            hsm.open_recorded(master, blob, places, b"the row", lambda _: None)
        assert not target.view(0, 1024).any()
        assert not target.view(2048, 3072).any()
        hsm.open_recorded(MASTER, wrapped, places[:1], b"the row", lambda _: None)  # the session stays good


def test_rewrapped_it_is_the_same_key(hsm: Hsm, voice: LockedBuffer) -> None:
    wrapped, sealed = sealed_with(hsm, voice)
    with LockedBuffer(1024) as target, hsm.open_dek(MASTER, hsm.rewrap(wrapped, MASTER, MASTER)) as dek:
        assert dek.open_into(sealed, b"aad", target) == 1024


@pytest.mark.parametrize("key", P256_KEYS)
def test_p256_signatures_verify_and_have_a_low_s(hsm: Hsm, key: KeyName) -> None:
    public = load_der_public_key(hsm.public_key(key))
    assert isinstance(public, ec.EllipticCurvePublicKey)
    for message in (b"", b"message", bytes(10_000)):
        for _ in range(8):
            signature = hsm.sign(key, message)
            r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
            assert len(signature) == 64
            assert s <= P256_ORDER // 2
            public.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
    with pytest.raises(InvalidSignature):
        public.verify(encode_dss_signature(r, s), b"another", ec.ECDSA(SHA256()))


def test_macs_are_stable_and_differ_by_key_and_data(hsm: Hsm) -> None:
    macs = [hsm.mac(key, data) for key in (KeyName.RECORD_MAC, KeyName.AUDIT_PSEUDONYM) for data in (b"", b"a", bytes(5000))]
    assert [len(mac) for mac in macs] == [16, 16, 16, 32, 32, 32]
    assert len(set(macs)) == 6
    assert hsm.mac(KeyName.RECORD_MAC, b"a") == macs[1]


def test_a_key_is_for_one_use(hsm: Hsm) -> None:
    for call in (
        lambda: hsm.mac(KeyName.TOKEN_SIGNER, b""),
        lambda: hsm.mac(KeyName.AUDIT_DETAIL, b""),
        lambda: hsm.sign(KeyName.RECORD_MAC, b""),
        lambda: hsm.public_key(KeyName.RECORD_MAC),
        lambda: hsm.seal(KeyName.RECORD_MAC, b"x", b""),
        lambda: hsm.unseal(KeyName.AUDIT_PSEUDONYM, bytes(40), b""),
    ):
        with pytest.raises(KeyNotFound):
            call()


@pytest.mark.parametrize("plaintext", [b"d", b"details" * 1000])
def test_details_are_sealed_and_bound_to_their_context(hsm: Hsm, plaintext: bytes) -> None:
    sealed = hsm.seal(KeyName.AUDIT_DETAIL, plaintext, b"intent")
    assert len(sealed) == 12 + len(plaintext) + 16
    assert plaintext not in sealed[12:] or len(plaintext) == 1
    assert hsm.unseal(KeyName.AUDIT_DETAIL, sealed, b"intent") == plaintext
    for data, aad in ((sealed, b"another"), (sealed[:-1] + bytes([sealed[-1] ^ 1]), b"intent"), (b"", b"intent")):
        with pytest.raises(SealBroken):
            hsm.unseal(KeyName.AUDIT_DETAIL, data, aad)


def test_nothing_is_no_detail(hsm: Hsm) -> None:
    with pytest.raises(ValueError, match="nothing to seal"):
        hsm.seal(KeyName.AUDIT_DETAIL, b"", b"intent")


def test_random_bytes_differ(hsm: Hsm) -> None:
    assert len({hsm.random(12) for _ in range(100)}) == 100
    assert len(hsm.random(1000)) == 1000


# What hsm-sync/1 and the life of a master ask


def test_held_names_every_master_with_what_two_sites_must_agree_on(hsm: SiteHsm) -> None:
    held = hsm.held()
    assert list(held) == [MASTER.label]
    attributes = held[MASTER.label]
    assert list(attributes) == sorted(attributes)
    assert {"EXTRACTABLE=0", "MODIFIABLE=0", "SENSITIVE=1", "TRUSTED=1"} <= set(attributes)
    assert not [text for text in attributes if text.startswith(("LOCAL", "ALWAYS_SENSITIVE"))]


def test_refresh_serves_what_is_there_and_refuses_what_is_not(hsm: SiteHsm) -> None:
    second = RingMaster("main", 2)
    hsm.refresh(allowed=(MASTER, second), required=(MASTER,))
    assert hsm.masters() == (MASTER,)
    with pytest.raises(KeyNotFound, match="ring/main/2"):
        hsm.refresh(allowed=(MASTER, second), required=(MASTER, second))
    with pytest.raises(PromiseBroken, match="ring/main/1"):
        hsm.refresh(allowed=(second,), required=())
    assert hsm.masters() == (MASTER,)


def test_refresh_works_while_keys_are_in_use(hsm: SiteHsm, voice: LockedBuffer) -> None:
    with hsm.new_dek(MASTER) as dek, hsm.new_canary(MASTER) as canary, hsm.open_dek(MASTER, dek.wrapped) as other:
        hsm.refresh(allowed=(MASTER,), required=(MASTER,))
        with LockedBuffer(1024) as target:
            assert other.open_into(dek.seal(voice, 1024, b""), b"", target) == 1024
        assert len(canary.mac(b"")) == 16


def test_a_canary_gives_the_same_mac_where_the_same_master_is(hsm: SiteHsm) -> None:
    with hsm.new_canary(MASTER) as born, hsm.open_canary(MASTER, born.blob) as opened:
        assert len(born.blob) == 40
        assert opened.blob == born.blob
        assert born.mac(b"both nonces") == opened.mac(b"both nonces")
        assert born.mac(b"another") != opened.mac(b"both nonces")
    with hsm.new_canary(MASTER) as another:
        assert another.blob != born.blob


@pytest.mark.parametrize("blob", [b"", bytes(40), bytes(39)])
def test_a_canary_of_another_master_is_not_opened(hsm: SiteHsm, blob: bytes) -> None:
    with pytest.raises(UnwrapRejected), hsm.open_canary(MASTER, blob):
        pass
    with pytest.raises(UnwrapRejected):
        hsm.dek_mac(MASTER, blob, b"")
    for unknown in (lambda: hsm.new_canary(RingMaster("main", 9)), lambda: hsm.open_canary(RingMaster("main", 9), blob)):
        with pytest.raises(KeyNotFound), unknown():
            pass
    with pytest.raises(KeyNotFound):
        hsm.dek_mac(RingMaster("main", 9), blob, b"")


def test_a_deks_mac_tells_whether_two_hold_the_same_key(hsm: SiteHsm) -> None:
    with hsm.new_dek(MASTER) as one, hsm.new_dek(MASTER) as two:
        first, second = one.wrapped, two.wrapped
    mac = hsm.dek_mac(MASTER, first, b"joint nonce")
    assert len(mac) == 16
    assert hsm.dek_mac(MASTER, hsm.rewrap(first, MASTER, MASTER), b"joint nonce") == mac
    assert hsm.dek_mac(MASTER, second, b"joint nonce") != mac
    assert hsm.dek_mac(MASTER, first, b"another nonce") != mac


def test_one_anchor_replaces_all(hsm: SiteHsm) -> None:
    for anchor in (b"epoch 1", b"epoch 2", bytes(4096)):
        hsm.replace_anchors(anchor)
        assert hsm.anchors() == (anchor,)
    hsm.refresh(allowed=(MASTER,), required=(MASTER,))  # an anchor is no unknown object


def test_destroying_a_master_that_was_never_there_is_no_fault(hsm: SiteHsm) -> None:
    hsm.destroy_master(RingMaster("main", 7))
    hsm.destroy_master(RingMaster("main", 7))
    assert hsm.masters() == (MASTER,)
