"""Which operating system user runs what, and what every process of Glottis gives up before it works.

As root, with code and state where other users may reach them, vault, edge, log and database run as system users of their
own; otherwise all run as whoever started them, and `describe` says so and why.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from service.errors import PartMissing, StateFolderRefused

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_libc = ctypes.CDLL(None, use_errno=True)
_CODE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Account:
    """One operating system user, with the group that a socket or file is shared through."""

    name: str
    uid: int
    gid: int

    @classmethod
    def current(cls) -> Self:
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        return cls(name, uid, os.getegid())

    @classmethod
    def system(cls, name: str) -> Self:
        """The system user `name`, made when missing (root only). Raises PartMissing where that fails."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            _useradd(name)
            entry = pwd.getpwnam(name)
        return cls(name, entry.pw_uid, grp.getgrgid(entry.pw_gid).gr_gid)

    def own(self, path: Path, mode: int) -> None:
        """Give `path` to this user with exactly `mode`; nothing is followed and no parent is touched.

        Raises StateFolderRefused where it is neither a folder nor a file of one name alone: its old owner may have laid a link.
        """
        with _unfollowed(path) as descriptor:
            self._give(descriptor, mode)

    def own_tree(self, path: Path) -> None:
        """Give a folder and all below it to this user alone (0700, files 0600). Raises StateFolderRefused as `own` does."""
        with _unfollowed(path) as descriptor:
            self._give_tree(descriptor, path)

    def folder(self, path: Path, mode: int = 0o700) -> Path:
        """Make `path` (its parent must exist) and give it to this user."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with _unfollowed(path, os.O_DIRECTORY) as descriptor:
            self._give(descriptor, mode)
        return path

    def file(self, path: Path, content: str | bytes, mode: int = 0o600) -> None:
        """Write a file of this user whole or not at all: a temporary one, synced, then renamed."""
        part = f".{path.name}.part"
        with _unfollowed(path.parent, os.O_DIRECTORY) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(part, flags, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                self._give(descriptor, mode)
                os.fsync(descriptor)
            os.rename(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)

    def _give(self, descriptor: int, mode: int) -> None:
        if os.geteuid() == 0:
            os.fchown(descriptor, self.uid, self.gid)
        os.fchmod(descriptor, mode)

    def _give_tree(self, descriptor: int, path: Path) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._give(descriptor, 0o600)
            return
        self._give(descriptor, 0o700)
        for name in sorted(os.listdir(descriptor)):
            with _unfollowed(path / name, inside=descriptor) as inner:
                self._give_tree(inner, path / name)


@dataclass(frozen=True)
class Isolation:
    """The users in force. `reason` says why they are one and the same, or is empty when each part has its own."""

    vault: Account
    edge: Account
    log: Account
    database: Account
    officer: Account
    reason: str

    def owner(self, token: str) -> Account:
        """Whose a token is, by its folder's name."""
        return {"serving": self.vault, "log": self.log}.get(token, self.officer)

    @property
    def separate(self) -> bool:
        return not self.reason

    def database_groups(self, *, embedded: bool) -> tuple[int, ...]:
        """The group through which vault and log reach the embedded database's socket; only root can hand it on."""
        return (self.database.gid,) if embedded and os.geteuid() == 0 else ()

    def describe(self) -> str:
        """One line for `glottis doctor`."""
        if self.separate:
            names = (self.vault, self.edge, self.log, self.database, self.officer)
            return "separate users: " + ", ".join(account.name for account in names)
        return f"one user, {self.vault.name}, runs vault, edge and log: {self.reason}"


def establish(state_dir: Path, site: str = "a") -> Isolation:
    """Decide the users for this installation, making missing system users (root only).

    Each site has its own: on one machine, too, neither may read the other's tokens and PINs.
    """
    prefix = "glottis" if site == "a" else f"glottis-{site}"
    current = Account.current()
    if os.geteuid() != 0:
        return Isolation(current, current, current, current, current, "started by an ordinary user")
    database = Account.system(f"{prefix}-db")
    if not reachable(state_dir.parent):
        return Isolation(current, current, current, database, current, f"other users may not enter {state_dir.parent}")
    for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(sys.prefix), _CODE / "settings.py"):
        if not reachable(path):
            return Isolation(current, current, current, database, current, f"other users may not reach {path}")
    vault, edge, log = (Account.system(f"{prefix}-{part}") for part in ("vault", "edge", "log"))
    return Isolation(vault, edge, log, database, current, "")


@contextlib.contextmanager
def _unfollowed(path: Path, flags: int = 0, *, inside: int | None = None) -> Iterator[int]:
    """A descriptor of a folder or file, found under its last name in the folder `inside` where that is given.

    Its owner may be a user of less power than ours. A link, a device, a pipe, a socket, or a file that has a second name
    elsewhere is refused with StateFolderRefused: what we do to it would be done to something that is not theirs.
    """
    name = path if inside is None else path.name
    try:
        _require_plain(os.stat(name, dir_fd=inside, follow_symlinks=False), path)  # opening a device can already do something
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=inside)
    except OSError as error:
        raise StateFolderRefused(f"{path} cannot be used: {error.strerror}") from error
    try:
        _require_plain(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def _require_plain(found: os.stat_result, path: Path) -> None:
    plain = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
    if not plain:
        raise StateFolderRefused(
            f"{path} is a link or a special file, where only plain files and folders belong",
            fix=f"See who made {path} and why, then take it away: Glottis makes no such thing in its state folder.",
        )


def reachable(path: Path) -> bool:
    """Whether users who own nothing of it may reach `path`: every folder on the way may be entered, a file be read.

    A folder that does not exist yet counts by its nearest parent that does.
    """
    for step in {*_way(path.absolute()), *_way(path.resolve())}:
        try:
            mode = step.stat().st_mode
        except FileNotFoundError:
            continue
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            return False
    return True


def _way(path: Path) -> tuple[Path, ...]:
    return (path, *path.parents)


def start(
    argv: Sequence[str | Path],
    account: Account,
    *,
    environ: Mapping[str, str],
    groups: Sequence[int] = (),
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | int = subprocess.DEVNULL,
    stdin: int = subprocess.DEVNULL,
    death_signal: int = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a child as `account` in the folder `/`, with this environment alone and only the named descriptors open.

    It gets `death_signal` when this process dies, however that happens, and can neither dump core nor gain privileges.
    Call it from the main thread: the kernel ties the signal to the thread that forked.
    """
    drop = account.uid != os.geteuid()
    return subprocess.Popen(
        [str(part) for part in argv],
        env=dict(environ),
        cwd="/",
        stdin=stdin,
        stdout=output,
        stderr=output if output == subprocess.DEVNULL else subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        umask=0o077,
        start_new_session=True,
        user=account.uid if drop else None,
        group=account.gid if drop else None,
        extra_groups=list(groups) if os.geteuid() == 0 else None,
        preexec_fn=_confined(os.getpid(), death_signal),
    )


def _confined(parent: int, death_signal: int) -> Callable[[], None]:
    """What the child does between fork and exec, after it changed its user: that change would clear the death signal."""

    def confine() -> None:
        _prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # the parent died before the line above took hold
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a supervisor holds signals back; its children must not
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return confine


def harden_process() -> None:
    """Called first in every process that holds a secret: no core file, no ptrace by its own user, no new privileges.

    exec undoes the first of these, so that each process must ask for itself.
    """
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _useradd(name: str) -> None:
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise PartMissing(
            "useradd is missing, and so is the user " + name, fix=f"Install the package passwd, or make the user {name}."
        )
    done = subprocess.run(
        [
            program,
            "--system",
            "--user-group",
            "--no-create-home",
            "--home-dir",
            "/nonexistent",
            "--shell",
            "/usr/sbin/nologin",
            name,
        ],
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode not in {0, 9}:  # 9: somebody made it meanwhile
        raise PartMissing(
            f"useradd could not make the user {name}: {done.stderr.strip()}", fix=f"Make the system user {name} yourself."
        )


def require_reachable_by(account: Account, folder: Path) -> None:
    """Raise StateFolderRefused where `account` could not enter the parents of `folder`. No mode is ever changed for it."""
    if account.uid != os.geteuid() and not reachable(folder.parent):
        raise StateFolderRefused(
            f"the user {account.name} may not enter {folder.parent}",
            fix="Name a state folder whose parents other users may enter, such as /var/lib/glottis, in GLOTTIS_STATE_DIR.",
        )
