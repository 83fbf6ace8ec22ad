"""NSS's softoken as a second PKCS#11 module, for interoperability tests alone: it enforces neither EXTRACTABLE on wrap nor
WRAP_WITH_TRUSTED, so that nothing here says anything about security. Its database is made in a folder of the test's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_ulong, c_void_p
from pathlib import Path

from keyvault.pkcs11_names import Role
from keyvault.pkcs11_raw import RawCalls

_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_INITIALIZE, _FINALIZE, _OPEN_SESSION, _VERIFY_INIT, _VERIFY = 0, 1, 12, 48, 49
_KEY_SLOT = c_ulong(2)  # the slot of the private database; 1 holds the module's own operations
_PIN = "nss-interop"


def find_module() -> Path | None:
    """Softoken, or None where the machine has none."""
    names = ("libsoftokn3.so", "nss/libsoftokn3.so")
    return next((path for place in _PLACES for name in names if (path := Path(place) / name).is_file()), None)


class _Arguments(ctypes.Structure):
    """CK_C_INITIALIZE_ARGS with NSS's parameter string before the reserved pointer."""

    _fields_ = (
        ("create", c_void_p), ("destroy", c_void_p), ("lock", c_void_p), ("unlock", c_void_p),
        ("flags", c_ulong), ("parameters", c_char_p), ("reserved", c_void_p),
    )  # fmt: skip


@contextmanager
def opened(module: Path, folder: Path) -> Iterator[tuple[RawCalls, int]]:
    """The module's calls and a read-write session on its own database, logged in. For a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    calls = RawCalls(ctypes.CDLL(str(module)))
    said = f"configdir='sql:{folder}' certPrefix='' keyPrefix='' secmod='secmod.db' flags= dbTokenDescription='second'"
    arguments = _Arguments(flags=2, parameters=said.encode())
    calls._call(_INITIALIZE, "C_Initialize", byref(arguments))
    session = c_ulong()
    try:
        calls._call(_OPEN_SESSION, "C_OpenSession", _KEY_SLOT, c_ulong(6), None, None, byref(session))
        calls.login(session.value, Role.SECURITY_OFFICER, "")  # a new database has an empty officer's PIN
        calls.init_pin(session.value, _PIN)
        calls.logout(session.value)
        calls.login(session.value, Role.USER, _PIN)
        yield calls, session.value
    finally:
        calls._call(_FINALIZE, "C_Finalize", None)


def verifies(calls: RawCalls, session: int, key: int, mechanism: ctypes.Structure, data: bytes, signature: bytes) -> None:
    """C_Verify. Raises CallFailed."""
    calls._call(_VERIFY_INIT, "C_VerifyInit", c_ulong(session), byref(mechanism), c_ulong(key))
    sizes = c_ulong(len(data)), c_ulong(len(signature))
    calls._call(_VERIFY, "C_Verify", c_ulong(session), c_char_p(data), sizes[0], c_char_p(signature), sizes[1])
