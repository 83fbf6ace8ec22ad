"""The verifier's own Ed25519 against RFC 8032, Wycheproof, and a library, with strict refusal of odd encodings."""

import json
import secrets
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policies.audit.verify import check_ed25519

WYCHEPROOF = json.loads((Path(__file__).parents[1] / "vectors" / "audit" / "ed25519_wycheproof.json").read_text())
L = 2**252 + 27742317777372353535851937790883648493
P = 2**255 - 19

# RFC 8032, section 7.1: secret key and message; public key and signature must come out as printed there.
RFC_8032 = {
    "TEST 1": (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    "TEST 2": (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    "TEST 3": (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    "TEST SHA(abc)": (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
}


@pytest.mark.parametrize("name", RFC_8032)
def test_rfc_8032_vectors(name: str) -> None:
    secret, public, message, signature = (bytes.fromhex(part) for part in RFC_8032[name])
    assert Ed25519PrivateKey.from_private_bytes(secret).sign(message) == signature
    check_ed25519(public, message, signature)
    for position in range(0, 64, 7):
        broken = bytearray(signature)
        broken[position] ^= 1
        with pytest.raises(ValueError):
            check_ed25519(public, message, bytes(broken))


def test_wycheproof() -> None:
    counted = {"valid": 0, "invalid": 0}
    for group in WYCHEPROOF:
        public = bytes.fromhex(group["public"])
        for number, comment, message, signature, result in group["tests"]:
            counted[result] += 1
            try:
                check_ed25519(public, bytes.fromhex(message), bytes.fromhex(signature))
            except ValueError:
                assert result == "invalid", (number, comment)
            else:
                assert result == "valid", (number, comment)
    assert counted == {"valid": 88, "invalid": 63}


def test_agrees_with_a_library_on_random_input() -> None:
    for round_ in range(60):
        key = Ed25519PrivateKey.generate()
        public, message = key.public_key().public_bytes_raw(), secrets.token_bytes(round_ * 3)
        signature = bytearray(key.sign(message))
        if round_ % 2:
            bit = secrets.randbelow(512)
            signature[bit // 8] ^= 1 << bit % 8
        assert accepts(public, message, bytes(signature)) is library_accepts(public, message, bytes(signature)) is not round_ % 2


def accepts(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        check_ed25519(public, message, signature)
    except ValueError:
        return False
    return True


def library_accepts(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def test_s_beyond_the_group_order_is_refused() -> None:
    _, public, message, signature = (bytes.fromhex(part) for part in RFC_8032["TEST 3"])
    s = int.from_bytes(signature[32:], "little") + L
    with pytest.raises(ValueError, match="reduced"):
        check_ed25519(public, message, signature[:32] + s.to_bytes(32, "little"))


SMALL_ORDER = {
    "neutral": 1,
    "neutral, sign of zero set": 1 | 1 << 255,
    "order 2": P - 1,
    "order 4": 0,
    "order 8": int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"), "little"),
    "y = p": P,
    "y = p + 1": P + 1,
    "off the curve": 2,
}


@pytest.mark.parametrize("name", SMALL_ORDER)
def test_keys_of_small_order_and_odd_encodings_are_refused(name: str) -> None:
    public = SMALL_ORDER[name].to_bytes(32, "little")
    for first in (public, (1).to_bytes(32, "little")):
        # With s = 0 and R a multiple of such a key, one signature would hold for many messages.
        with pytest.raises(ValueError):
            check_ed25519(public, b"any message", first + bytes(32))


@pytest.mark.parametrize("lengths", [(31, 64), (33, 64), (0, 64), (32, 63), (32, 65), (32, 0)])
def test_wrong_lengths_are_refused(lengths: tuple[int, int]) -> None:
    _, public, message, signature = (bytes.fromhex(part) for part in RFC_8032["TEST 1"])
    with pytest.raises(ValueError):
        check_ed25519((public + b"\0")[: lengths[0]], message, (signature + b"\0")[: lengths[1]])
