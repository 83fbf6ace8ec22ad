"""SoftHSM, the software token of development: where its module is, and how an empty token is made.

Not a hardware boundary: SoftHSM holds keys in its own process while it works, and a PIN with the token's files gives away
every key (`docs/threat-model.md`). Nothing here is needed with a hardware module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from keyvault.errors import CeremonyRefused, ModuleRefused
from keyvault.pkcs11_names import Role
from keyvault.pkcs11_start import Module

MODULE_VARIABLE = "GLOTTIS_PKCS11_MODULE"
_FILE = "libsofthsm2.so"
_SYSTEM = (
    "/usr/lib/softhsm",
    "/usr/lib/x86_64-linux-gnu/softhsm",
    "/usr/lib/aarch64-linux-gnu/softhsm",
    "/usr/lib64/pkcs11",
    "/usr/lib64/softhsm",
    "/usr/local/lib/softhsm",
    "/opt/homebrew/lib/softhsm",
)


def find_module() -> Path:
    """The PKCS#11 module to use: the one the environment names, one unpacked inside this venv, or the system's.

    Raises ModuleRefused, naming how to install one. A named module that is missing is never replaced by another.
    """
    named = os.environ.get(MODULE_VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise ModuleRefused(f"{MODULE_VARIABLE} names {named}, which does not exist")
    unpacked = sorted((Path(sys.prefix) / "softhsm").rglob(_FILE))
    for candidate in (*unpacked, *(Path(folder) / _FILE for folder in _SYSTEM)):
        if candidate.is_file():
            return candidate
    raise ModuleRefused(f"SoftHSM is not installed: `apt install softhsm2`, or set {MODULE_VARIABLE} to a PKCS#11 module")


def make_token(module: Path, folder: Path, label: str, so_pin: str, user_pin: str) -> str:
    """Make an empty SoftHSM token in `folder` (0700) and set both PINs; returns its serial.

    Starts and stops the module: for a process that has not started it. Raises CeremonyRefused if the folder holds a token.
    """
    objects = folder / "objects"
    if objects.exists() and any(objects.iterdir()):
        raise CeremonyRefused(f"{folder} already holds a token")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    objects.mkdir(mode=0o700, exist_ok=True)
    (folder / "softhsm2.conf").write_text(f"directories.tokendir = {objects}\nobjectstore.backend = file\nlog.level = ERROR\n")
    started = Module(module, folder)
    try:
        started.calls.init_token(started.empty_slot(), so_pin, label)
        token = started.token(label)
        session = started.session(token)
        started.calls.login(session.handle, Role.SECURITY_OFFICER, so_pin)
        started.calls.init_pin(session.handle, user_pin)
        started.calls.logout(session.handle)
        session.close()
        return str(token.serial.decode())
    finally:
        started.stop()
