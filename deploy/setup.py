"""Set up a working tree: `.venv`, locked dependencies, SoftHSM. Standard library only; run again, it finds nothing to do.

    python3 deploy/setup.py run    what the product needs
    python3 deploy/setup.py dev    that, and what the tests need

It names no package index: pip's own configuration says where packages come from, and every file must have its locked hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "glottis-setup"
OLDEST, NEWEST = (3, 11), (3, 13)
SOFTHSM = (
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so",
    "/usr/lib/aarch64-linux-gnu/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/usr/lib64/softhsm/libsofthsm2.so",
    "/usr/local/lib/softhsm/libsofthsm2.so",
    "/opt/homebrew/lib/softhsm/libsofthsm2.so",
)
SOFTHSM_MEND = (
    "Ask an administrator for `apt install softhsm2`, or name a PKCS#11 module: export GLOTTIS_PKCS11_MODULE=/path/to/module.so"
)


class SetupFailed(Exception):
    """Something is missing that this program cannot make. `mend` says what to do."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def main() -> int:
    if sys.argv[1:] not in (["run"], ["dev"]):
        print("usage: python3 deploy/setup.py run|dev", file=sys.stderr)
        return 1
    if sys.version_info[:2] < OLDEST:  # the interpreter that was named is old: another one here may do
        return _start_with_newer()
    try:
        _set_up(sys.argv[1])
    except SetupFailed as error:
        print(f"setup: {error}\n  To mend it: {error.mend}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error}\n  To mend it: see that this folder may be written and the disk has room.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _set_up(kind: str) -> None:
    wanted = _fingerprint(kind)
    if not _stamped(kind, wanted):
        python = _best_python()
        if not _usable():
            _make_venv(python)
        print(f"setup: installing locked dependencies ({kind}.txt)", flush=True)
        _pip("install", "--require-hashes", "-r", str(ROOT / "requirements" / f"{kind}.txt"))
        # What builds the package is itself locked and was installed by the line above.
        _pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        STAMP.write_text(f"{kind} {wanted}\n")
    _softhsm()


def _fingerprint(kind: str) -> str:
    """A hash of everything that decides what the installation holds."""
    digest = hashlib.sha256(str(VENV).encode())
    for path in (ROOT / "pyproject.toml", ROOT / "requirements" / f"{kind}.txt", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamped(kind: str, wanted: str) -> bool:
    """Whether the venv holds this already; the development set holds the other one too."""
    if not STAMP.exists() or not _usable():
        return False
    found = STAMP.read_text().split()
    return found == [kind, wanted] or (kind == "run" and found == ["dev", _fingerprint("dev")])


def _usable() -> bool:
    """Whether the venv's interpreter is there: it may have been removed, or the folder moved."""
    python = VENV / "bin" / "python"
    return (VENV / "pyvenv.cfg").exists() and python.exists() and (VENV / "bin" / "pip").exists()


def _make_venv(python: str) -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"setup: making .venv with {python}", flush=True)
    done = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        last = (done.stdout + done.stderr).strip().splitlines()
        raise SetupFailed(
            f"{python} could not make a virtual environment: {last[-1] if last else 'no message'}",
            "On Debian: apt install python3-venv",
        )


def _pip(*arguments: str) -> None:
    argv = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(argv, check=False, cwd=ROOT).returncode != 0:
        raise SetupFailed(
            f"pip could not finish `{arguments[0]}`; its own message stands above",
            "See that pip reaches its package index (pip config list), then run this again.",
        )


def _best_python() -> str:
    """The interpreter for the venv. For root, one that other users may execute: processes run under users of their own."""
    candidates = [sys.executable, *_found_pythons()]
    suitable = [python for python in candidates if OLDEST <= _version(python) <= NEWEST]
    if not suitable:
        raise SetupFailed(
            "no Python 3.11, 3.12 or 3.13 was found", "Install one, with its venv module: apt install python3 python3-venv"
        )
    if os.geteuid() == 0:
        suitable.sort(key=lambda python: not _open_to_others(Path(python).resolve()))
    return suitable[0]


def _found_pythons() -> list[str]:
    names = ["python3.13", "python3.12", "python3.11", "python3"]
    folders = [*os.get_exec_path(), "/usr/bin", "/usr/local/bin"]
    found = [shutil.which(name, path=os.pathsep.join(folders)) for name in names]
    system = [f"/usr/bin/{name}" for name in names if Path(f"/usr/bin/{name}").exists()]
    return list(dict.fromkeys([path for path in found if path] + system))


def _version(python: str) -> tuple[int, ...]:
    if python == sys.executable:
        return tuple(sys.version_info[:2])
    code = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    return tuple(int(part) for part in done.stdout.split()) if done.returncode == 0 else (0,)


def _open_to_others(path: Path) -> bool:
    """Whether every folder on the way may be entered, and the file executed, by users who own nothing of it."""
    return all(step.stat().st_mode & 0o001 for step in (path, *path.parents))


def _start_with_newer() -> int:
    for python in _found_pythons():
        if OLDEST <= _version(python) <= NEWEST:
            return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode
    found = ".".join(str(part) for part in sys.version_info[:2])
    print(
        f"setup: Python {found} is too old\n  To mend it: install Python 3.11, 3.12 or 3.13 with its venv module", file=sys.stderr
    )
    return 1


def _softhsm() -> None:
    """A PKCS#11 module: the one that is named, the system's, or one unpacked from the same Debian package into the venv."""
    named = os.environ.get("GLOTTIS_PKCS11_MODULE")
    unpacked = VENV / "softhsm"
    if named or any(Path(path).exists() for path in SOFTHSM) or any(unpacked.rglob("libsofthsm2.so")):
        return
    if os.geteuid() == 0:
        _install_softhsm()
    else:
        _unpack_softhsm(unpacked)


def _install_softhsm() -> None:
    print("setup: installing softhsm2", flush=True)
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "softhsm2"]):
        if _run(argv, env=environ) is None:
            raise SetupFailed(
                f"`{' '.join(argv)}` did not work", "Install the package softhsm2 yourself, or set GLOTTIS_PKCS11_MODULE."
            )


def _unpack_softhsm(target: Path) -> None:
    """Without root the package cannot be installed, but it can be fetched and unpacked: the module needs nothing more."""
    print("setup: unpacking libsofthsm2 into .venv/softhsm", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if _run(["apt-get", "download", "-qq", "libsofthsm2"], cwd=scratch) is None:
            raise SetupFailed("SoftHSM is not installed, and its package could not be fetched", SOFTHSM_MEND)
        packages = list(Path(scratch).glob("libsofthsm2_*.deb"))
        unpacked = Path(scratch) / "unpacked"
        if not packages or _run(["dpkg", "-x", str(packages[0]), str(unpacked)]) is None:
            raise SetupFailed("the package libsofthsm2 could not be unpacked", SOFTHSM_MEND)
        if not any(unpacked.rglob("libsofthsm2.so")):
            raise SetupFailed("the package libsofthsm2 holds no module", SOFTHSM_MEND)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(unpacked, target, symlinks=True)


def _run(argv: list[str], **options: object) -> str | None:
    """What a program said; None where it is missing or failed, after its own message."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        print(str(done.stderr).strip(), file=sys.stderr)
        return None
    return str(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
