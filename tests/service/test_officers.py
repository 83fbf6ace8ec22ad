"""Officers' key files: made once, shut to others, P-256 only; fingerprints that people compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from keyvault.approvals import Officer
from keyvault.sync.roster import Roster, SiteKey
from keyvault.sync.signatures import verify_p256
from service.errors import OfficerKeyRefused, RosterUnreadable
from service.officers import OfficerKey, fingerprint, new_key, person_of, read_roster


def never() -> str:
    raise AssertionError("no passphrase was needed")


def test_a_key_signs_what_the_roster_s_public_key_verifies(tmp_path: Path) -> None:
    made = new_key(tmp_path / "ada.pem", None)
    assert (tmp_path / "ada.pem").stat().st_mode & 0o777 == 0o600
    again = OfficerKey.load(tmp_path / "ada.pem", never)
    assert again.public == made.public
    for _ in range(8):  # a high s would come up
        verify_p256(made.public, b"statement", again(b"statement"))


def test_a_passphrase_shuts_the_file(tmp_path: Path) -> None:
    made = new_key(tmp_path / "ada.pem", "correct horse")
    assert b"ENCRYPTED" in (tmp_path / "ada.pem").read_bytes()
    assert OfficerKey.load(tmp_path / "ada.pem", lambda: "correct horse").public == made.public
    with pytest.raises(OfficerKeyRefused, match="wrong passphrase"):
        OfficerKey.load(tmp_path / "ada.pem", lambda: "battery staple")


def test_a_key_is_never_replaced_nor_read_where_others_may(tmp_path: Path) -> None:
    path = tmp_path / "ada.pem"
    new_key(path, None)
    with pytest.raises(OfficerKeyRefused, match="never replaced"):
        new_key(path, None)
    path.chmod(0o640)
    with pytest.raises(OfficerKeyRefused, match="other users"):
        OfficerKey.load(path, never)
    with pytest.raises(OfficerKeyRefused, match="cannot be read"):
        OfficerKey.load(tmp_path / "none.pem", never)


def test_other_keys_are_refused(tmp_path: Path) -> None:
    for number, key in enumerate((rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1()))):
        path = tmp_path / f"{number}.pem"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        path.chmod(0o600)
        with pytest.raises(OfficerKeyRefused, match="another kind"):
            OfficerKey.load(path, never)
    path = tmp_path / "text.pem"
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(OfficerKeyRefused):
        OfficerKey.load(path, never)


def test_the_roster_says_whose_key_it_is(tmp_path: Path) -> None:
    ada, eve = new_key(tmp_path / "ada.pem", None), new_key(tmp_path / "eve.pem", None)
    roster = Roster("cluster", 1, (SiteKey("a", "serial", b"key"),), (Officer("ada", (ada.public,)),), 0)
    assert person_of(ada, roster) == "ada"
    with pytest.raises(OfficerKeyRefused, match="nobody"):
        person_of(eve, roster)
    (tmp_path / "roster").write_bytes(roster.encode())
    assert read_roster(tmp_path / "roster") == roster
    (tmp_path / "roster").write_bytes(roster.encode()[:-1])
    for path in (tmp_path / "roster", tmp_path / "none"):
        with pytest.raises(RosterUnreadable):
            read_roster(path)


def test_a_fingerprint_is_eight_groups_of_the_sha_256() -> None:
    # FIPS 180-2, appendix B.1: SHA-256 of "abc".
    assert fingerprint(b"abc") == "ba78 16bf 8f01 cfea 4141 40de 5dae 2223"
