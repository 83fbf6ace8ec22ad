"""Faults between the door and a real module: every function that the door calls, replaced in the module's own table.

What a real token cannot be made to show on demand (a device error, a call that hangs, an idle login thrown away) is answered
here; everything else goes through to SoftHSM. Patch before `Pkcs11Hsm.open`, in a process of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_ulong, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from keyvault.pkcs11_names import Answer
from keyvault.pkcs11_raw import RawCalls

FUNCTIONS = {
    "C_Initialize": (0, 1),
    "C_GetSlotList": (4, 3),
    "C_GetTokenInfo": (6, 2),
    "C_OpenSession": (12, 5),
    "C_CloseSession": (13, 1),
    "C_GetSessionInfo": (15, 2),
    "C_Login": (18, 4),
    "C_DestroyObject": (22, 2),
    "C_GetAttributeValue": (24, 4),
    "C_FindObjectsInit": (26, 3),
    "C_FindObjects": (27, 4),
    "C_FindObjectsFinal": (28, 1),
    "C_EncryptInit": (29, 3),
    "C_Encrypt": (30, 5),
    "C_DecryptInit": (33, 3),
    "C_Decrypt": (34, 5),
    "C_SignInit": (42, 3),
    "C_Sign": (43, 5),
    "C_GenerateKey": (58, 5),
    "C_WrapKey": (60, 6),
    "C_UnwrapKey": (61, 8),
    "C_GenerateRandom": (64, 3),
}
"""Each function's place in CK_FUNCTION_LIST, counted after its version, and its number of arguments."""

Fault = Callable[[str], Answer | None]


class FaultyModule:
    """Counts calls by name; `fault` is asked before each and may answer in the module's stead, or wait. Lives as long as it."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, module: Path) -> None:
        self.calls: Counter[str] = Counter()
        self.fault: Fault = lambda _: None
        self._running, self._gate = 0, threading.Condition()
        self._closed = False
        self._original: dict[str, Any] = {}
        self.kept.append(self)
        library = ctypes.CDLL(str(module))
        self.kept.append(library)
        table = RawCalls(library).table
        # Only for `alone`: the interpreter's own end calls it too, when no Python function can run any more.
        self._original["C_Finalize"] = CFUNCTYPE(c_ulong, c_void_p)(c_void_p.from_address(table + 8).value or 0)
        for name, (place, arguments) in FUNCTIONS.items():
            slot = c_void_p.from_address(table + 8 * place)
            prototype = CFUNCTYPE(c_ulong, *[c_void_p] * arguments)
            self._original[name] = prototype(slot.value or 0)
            replacement = prototype(self._replacing(name))
            self.kept.append(replacement)
            slot.value = ctypes.cast(replacement, c_void_p).value

    def _replacing(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            answer = self.fault(name)
            if answer is not None:
                return int(answer)
            with self._gate:
                self._gate.wait_for(lambda: not self._closed)
                self._running += 1
            try:
                return int(self._original[name](*arguments))
            finally:
                with self._gate:
                    self._running -= 1
                    self._gate.notify_all()

        return call

    @contextmanager
    def alone(self) -> Iterator[Any]:
        """No call of anybody else is inside the module until the block ends: SoftHSM does not survive a stop under a call."""
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: self._running == 0)
        try:
            yield self._original
        finally:
            with self._gate:
                self._closed = False
                self._gate.notify_all()


def once(function: str, answer: Answer) -> Fault:
    """The next call of `function` is answered so; every other goes through."""
    left = [1]

    def fault(name: str) -> Answer | None:
        if name == function and left and left.pop():
            return answer
        return None

    return fault
