"""Checkpoints are C2SP notes that others can read, and a note altered in any byte is refused."""

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from policies.audit.checkpoint import LastCheckpoint, sign_checkpoint, verifier_key
from policies.audit.errors import SigningFailed
from policies.audit.verify import VerifierKey, check_checkpoint, check_ed25519, parse_checkpoint, parse_key

ORIGIN = "voice.example/audit"
ROOT = bytes(range(32))


@pytest.fixture
def private() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def key(private: Ed25519PrivateKey) -> VerifierKey:
    spki = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return verifier_key(ORIGIN, spki)


def test_the_published_signed_note() -> None:
    # The example of C2SP signed-note: a verifier key, and its signature over one line.
    text = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
    signature = base64.b64decode("Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=")
    key = parse_key(text)
    assert key.text == text
    assert signature[:4] == key.id == bytes.fromhex("530d903a")
    check_ed25519(key.public, b"This is an example message.\n", signature[4:])


def test_the_published_checkpoint_parses() -> None:
    note = (
        "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
        "— example.com/behind-the-sofa "
        "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    )
    checkpoint, signed, signatures = parse_checkpoint(note)
    assert (checkpoint.origin, checkpoint.size) == ("example.com/behind-the-sofa", 20852163)
    assert signed == note.split("\n\n")[0].encode() + b"\n"
    assert [name for name, _ in signatures] == ["example.com/behind-the-sofa"]


def test_signed_then_checked(private: Ed25519PrivateKey, key: VerifierKey) -> None:
    note = sign_checkpoint(7, ROOT, key, private.sign)
    assert check_checkpoint(note, key) == (ORIGIN, 7, ROOT)
    assert note == sign_checkpoint(7, ROOT, parse_key(key.text), private.sign)


def test_every_changed_character_is_refused(private: Ed25519PrivateKey, key: VerifierKey) -> None:
    note = sign_checkpoint(7, ROOT, key, private.sign)
    for position, character in enumerate(note):
        other = "8" if character != "8" else "9"
        with pytest.raises(ValueError):
            check_checkpoint(note[:position] + other + note[position + 1 :], key)


def test_signatures_of_others_are_passed_over_and_a_false_one_of_ours_is_not(private: Ed25519PrivateKey, key: VerifierKey) -> None:
    note = sign_checkpoint(7, ROOT, key, private.sign)
    witness = "— site-b.example/witness " + base64.b64encode(bytes(76)).decode() + "\n"
    assert check_checkpoint(note + witness, key).size == 7
    false = f"— {ORIGIN} " + base64.b64encode(key.id + bytes(64)).decode() + "\n"
    with pytest.raises(ValueError):
        check_checkpoint(note + false, key)
    with pytest.raises(ValueError):
        check_checkpoint(note.split("— ")[0] + witness, key)


def test_another_log_with_the_same_key_is_another_log(private: Ed25519PrivateKey, key: VerifierKey) -> None:
    other = VerifierKey("other.example/audit", key.public)
    assert other.fingerprint != key.fingerprint
    with pytest.raises(ValueError):
        check_checkpoint(sign_checkpoint(7, ROOT, other, private.sign), key)


@pytest.mark.parametrize(
    ("old", "new"),
    [("\n7\n", "\n07\n"), ("\n7\n", "\n+7\n"), ("\n7\n", "\n7 \n"), ("\n7\n", "\n\u0667\n"), ("\n\n", "\n"), ("\n\n", "\r\n\n")],
)
def test_other_spellings_are_refused(private: Ed25519PrivateKey, key: VerifierKey, old: str, new: str) -> None:
    note = sign_checkpoint(7, ROOT, key, private.sign)
    with pytest.raises(ValueError):
        parse_checkpoint(note.replace(old, new))


def test_a_token_that_signs_wrongly_is_noticed(key: VerifierKey) -> None:
    with pytest.raises(SigningFailed):
        sign_checkpoint(7, ROOT, key, lambda data: bytes(64))


def test_keys_of_another_kind_and_bad_origins_are_refused(private: Ed25519PrivateKey) -> None:
    p256 = generate_private_key(SECP256R1()).public_key()
    with pytest.raises(ValueError):
        verifier_key(ORIGIN, p256.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    spki = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for origin in ("", "two words", "a+b", "line\nbreak", "no\u00a0break"):
        with pytest.raises(ValueError):
            verifier_key(origin, spki)


def test_the_last_checkpoint_survives_as_a_file(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path / "checkpoint")
    assert last.read() is None
    last.write("first\n")
    last.write("second — ü\n")
    assert LastCheckpoint(tmp_path / "checkpoint").read() == "second — ü\n"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
