"""Token folders put back from a backup: each with the PIN that opens it, whenever a restore before was cut off."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from keyvault.ceremony import TokenFacts
from keyvault.hsm import KeyName
from service import backups, restoring
from service.errors import BackupRefused, HalfMade
from service.isolation import Account
from service.settings import Settings
from service.site import Site

CLUSTER = UUID(int=1)
ALONE = SimpleNamespace(owner=lambda _: Account.current())


def site_of(cluster: UUID) -> str:
    signer = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return Site(cluster, {"log": TokenFacts("log", "1", (), {KeyName.CHECKPOINT_SIGNER: signer})}).to_json()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A site with a PIN in each of two token folders."""
    found = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path / "state")})
    for name in ("serving", "log"):
        found.token_dir(name).mkdir(parents=True)
        (found.token_dir(name) / "object").write_text("new")
        found.pin_file(name).write_text(f"pin of {name}")
    (found.state_dir / "audit").mkdir()
    found.site_file.write_text(site_of(CLUSTER))
    return found


@pytest.fixture
def backup(tmp_path: Path) -> backups.Backup:
    """Of the same tokens before, without PINs, as every backup is."""
    kept, folder = tmp_path / "kept", tmp_path / "backup"
    folder.mkdir()
    for name in ("serving", "log"):
        (kept / "tokens" / name).mkdir(parents=True)
        (kept / "tokens" / name / "object").write_text("old")
    (kept / "audit").mkdir()
    (kept / "audit" / "hand-overs").write_text("hand-over 1\n")
    with tarfile.open(folder / backups.FILES, "w") as archive:
        for name in ("tokens", "audit"):
            archive.add(kept / name, name)
    return backups.Backup(folder, str(CLUSTER), "a", 7, "ab", "2026-12-01", b"")


def put_back(settings: Settings, backup: backups.Backup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return restoring._tokens(settings, ALONE, backup)  # type: ignore[arg-type]


def standing(settings: Settings) -> dict[str, tuple[str, str]]:
    folders = {name: settings.token_dir(name) for name in ("serving", "log")}
    return {name: ((folder / "object").read_text(), (folder / "pin").read_text()) for name, folder in folders.items()}


BOTH = {"serving": ("old", "pin of serving"), "log": ("old", "pin of log")}


def test_tokens_come_back_with_the_pins_that_were_there(settings: Settings, backup: backups.Backup) -> None:
    kept, left = put_back(settings, backup)
    assert (standing(settings), len(kept), left) == (BOTH, 2, ())


def test_a_restore_that_was_cut_off_between_the_renames_finds_the_pin_again(settings: Settings, backup: backups.Backup) -> None:
    settings.token_dir("serving").rename(settings.token_dir("serving.20200101T000000Z"))
    older = settings.token_dir("serving.20190101T000000Z")
    older.mkdir()
    (older / "pin").write_text("a PIN of long ago")
    put_back(settings, backup)
    assert standing(settings) == BOTH


def test_a_log_that_went_over_to_a_newer_key_keeps_the_token_that_has_it(settings: Settings, backup: backups.Backup) -> None:
    settings.hand_overs_file.write_text("hand-over 1\nhand-over 2\n")
    kept, left = put_back(settings, backup)
    assert standing(settings) == BOTH | {"log": ("new", "pin of log")}
    assert (len(kept), left) == (1, (str(settings.token_dir("log")),))


@pytest.mark.parametrize(
    ("name", "kind"), [("../out", tarfile.REGTYPE), ("/out", tarfile.REGTYPE), ("tokens/link", tarfile.SYMTYPE)]
)
def test_an_archive_reaches_nothing_outside(settings: Settings, backup: backups.Backup, name: str, kind: bytes) -> None:
    with tarfile.open(backup.folder / backups.FILES, "w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, str(settings.state_dir)
        archive.addfile(member)
    with pytest.raises(BackupRefused):
        put_back(settings, backup)
    assert standing(settings)["serving"][0] == "new"


def test_a_site_is_compared_also_where_its_roster_is_missing(settings: Settings, backup: backups.Backup) -> None:
    assert not settings.roster_file.exists()
    with pytest.raises(BackupRefused):
        restoring.apply(settings, replace(backup, site="b"), database=False, tokens=True)
    settings.site_file.write_text(site_of(UUID(int=2)))
    with pytest.raises(BackupRefused):
        restoring.apply(settings, backup, database=False, tokens=True)
    settings.site_file.unlink()
    with pytest.raises(HalfMade):
        restoring.apply(settings, backup, database=False, tokens=True)
    assert standing(settings)["serving"][0] == "new"
