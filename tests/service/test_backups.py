"""A backup is what a site's HSM signed, file by file, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from keyvault.approvals import Officer
from keyvault.sync.roster import Roster, SiteKey
from service import backups
from service.errors import BackupFailed, BackupRefused
from service.officers import OfficerKey
from service.settings import Settings

Change = Callable[[Path, OfficerKey], None]


def new_key() -> OfficerKey:
    return OfficerKey(ec.generate_private_key(ec.SECP256R1()))


def sealed(folder: Path, key: OfficerKey, site: str = "a", cluster: str = "cluster-1") -> None:
    files = {name: sha256((folder / name).read_bytes()).hexdigest() for name in (backups.DUMP, backups.FILES)}
    facts = {"format": 1, "cluster": cluster, "site": site, "epoch": 7, "head": "ab", "made_at": "2026-12-01", "files": files}
    manifest = json.dumps(facts).encode()
    (folder / backups.MANIFEST).write_bytes(manifest)
    (folder / backups.SIGNATURE).write_bytes(key(backups.signed_bytes("cluster-1", site, manifest)))


@pytest.fixture
def key() -> OfficerKey:
    return new_key()


@pytest.fixture
def roster(key: OfficerKey) -> Roster:
    officers = tuple(Officer(name, (new_key().public,)) for name in ("ada", "bo"))
    return Roster("cluster-1", 1, (SiteKey("a", "1", key.public), SiteKey("b", "2", new_key().public)), officers, 2)


@pytest.fixture
def folder(tmp_path: Path, key: OfficerKey) -> Path:
    for name in (backups.DUMP, backups.FILES):
        (tmp_path / name).write_bytes(name.encode() * 50)
    sealed(tmp_path, key)
    return tmp_path


@pytest.mark.parametrize("step", ["_dump", "_pack", "_sealed"])
def test_a_backup_that_fails_leaves_nothing_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    made = tmp_path / "backup"
    whole = backups.Backup(made, "cluster-1", "a", 7, "ab", "2026-12-01", b"")

    def written(*_: object) -> backups.Backup:
        (made / backups.DUMP).write_bytes(b"rows")
        return whole

    def full(*_: object) -> None:
        written()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backups, "ask", lambda *_: {"head": "ab"})
    for name in ("_dump", "_pack", "_sealed"):
        monkeypatch.setattr(backups, name, full if name == step else written)
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path / "state")})
    with pytest.raises(OSError, match="No space left"):
        backups.make(settings, None, made)
    assert not made.exists()
    monkeypatch.setattr(backups, step, written)
    assert backups.make(settings, None, made) == whole
    with pytest.raises(BackupFailed):  # the control: a whole one is never written over
        backups.make(settings, None, made)
    assert made.exists()


def test_a_whole_backup_says_whose_it_is(folder: Path, roster: Roster) -> None:
    found = backups.check(folder, roster)
    assert (found.site, found.cluster, found.epoch) == ("a", "cluster-1", 7)


def _changed_dump(folder: Path, _: OfficerKey) -> None:
    (folder / backups.DUMP).write_bytes(b"another database")


def _changed_files(folder: Path, _: OfficerKey) -> None:
    (folder / backups.FILES).write_bytes(b"another token")


def _missing_file(folder: Path, _: OfficerKey) -> None:
    (folder / backups.FILES).unlink()


def _changed_manifest(folder: Path, _: OfficerKey) -> None:
    path = folder / backups.MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"epoch": 7', b'"epoch": 8'))


def _signed_by_nobody_of_the_roster(folder: Path, _: OfficerKey) -> None:
    sealed(folder, new_key())


def _signed_for_the_other_site(folder: Path, key: OfficerKey) -> None:
    sealed(folder, key, site="b")


def _no_json(folder: Path, _: OfficerKey) -> None:
    (folder / backups.MANIFEST).write_bytes(b"{")


@pytest.mark.parametrize(
    "change",
    [
        _changed_dump,
        _changed_files,
        _missing_file,
        _changed_manifest,
        _signed_by_nobody_of_the_roster,
        _signed_for_the_other_site,
        _no_json,
    ],
)
def test_a_changed_backup_is_refused(folder: Path, roster: Roster, key: OfficerKey, change: Change) -> None:
    change(folder, key)
    with pytest.raises(BackupRefused):
        backups.check(folder, roster)
    if (folder / backups.FILES).exists():  # the control: sealed anew it is whole
        sealed(folder, key)
        assert backups.check(folder, roster).epoch == 7
