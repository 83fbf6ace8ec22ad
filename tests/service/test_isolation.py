"""Owner and mode: given to what lies there itself, never through a link that a user of less power laid."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from service.errors import StateFolderRefused
from service.isolation import Account

NOBODY = Account("nobody", 65534, 65534)


@pytest.fixture
def account() -> Account:
    return NOBODY if os.geteuid() == 0 else Account.current()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of ours outside the folder that is given away."""
    file = tmp_path / "victim"
    file.write_text("ours")
    file.chmod(0o640)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state" / "deep").mkdir(parents=True)
    return tmp_path / "state"


def facts(path: Path) -> tuple[int, int, int, bytes]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), path.read_bytes()


def lay(kind: str, place: Path, victim: Path) -> None:
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "dangling link":
        place.symlink_to(victim.with_name("none"))
    elif kind == "second name":
        place.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(place))


@pytest.mark.parametrize("kind", ["link", "dangling link", "second name", "pipe", "socket"])
def test_what_is_not_plain_is_refused_by_its_path_and_its_target_is_untouched(account, folder, victim, kind):
    before = facts(victim)
    trap = folder / "deep" / "trap"
    lay(kind, trap, victim)
    for give in (lambda: account.own(trap, 0o666), lambda: account.own_tree(folder), lambda: account.folder(trap)):
        with pytest.raises(StateFolderRefused, match=str(trap)):
            give()
    assert facts(victim) == before


def test_a_link_to_a_folder_is_not_walked(account, folder, victim):
    elsewhere = victim.with_name("elsewhere")
    elsewhere.mkdir(mode=0o755)
    before = elsewhere.stat()
    (folder / "deep" / "objects").symlink_to(elsewhere)
    with pytest.raises(StateFolderRefused, match="objects is a link"):
        account.own_tree(folder)
    with pytest.raises(StateFolderRefused, match="objects"):
        account.folder(folder / "deep" / "objects")
    with pytest.raises(StateFolderRefused, match="objects"):
        account.file(folder / "deep" / "objects" / "key", "secret")
    assert (elsewhere.stat().st_uid, elsewhere.stat().st_mode) == (before.st_uid, before.st_mode)
    assert list(elsewhere.iterdir()) == []


def test_a_tree_is_given_whole(account, folder):
    (folder / "deep" / "file").write_text("x")
    (folder / "deep" / "file").chmod(0o644)
    account.own_tree(folder)
    for path, mode in ((folder, 0o700), (folder / "deep", 0o700), (folder / "deep" / "file", 0o600)):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (account.uid, mode)


def test_a_file_replaces_links_instead_of_writing_through_them(account, folder, victim):
    before = facts(victim)
    for name in ("key", ".key.part"):
        (folder / name).symlink_to(victim)
    account.file(folder / "key", "secret", mode=0o640)
    assert facts(victim) == before
    assert not (folder / "key").is_symlink()
    assert facts(folder / "key") == (account.uid, account.gid, 0o640, b"secret")
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "key"]
