"""A process with a real token and a real database that enrols, re-wraps, opens, and can be killed at a named step.

    python rotation_child.py '{"token": …, "database": …, "sealed": …, "do": [["open", {}], ["rewrap", {"page": 3}]]}'

Prints one JSON line for each call. Run by `test_rotation_token.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import Engine, create_engine

from keyvault.database import Transaction
from keyvault.events import KeyEvent
from keyvault.hsm import RingMaster, Sealed
from keyvault.keys import VoiceKeys
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from keyvault.records import RecordMac, RingVersion, WrappedKey
from keyvault.rotation import Part, Rewrapping
from keyvault.states import KeyState
from keyvault.store import KeyStore

MASTERS = (RingMaster("main", 1), RingMaster("main", 2))
WORDS = b"what one voice is made of" * 4


class Silent:
    def record(self, transaction: Transaction, event: KeyEvent) -> None:
        """Nothing."""


class Mortal:
    """Ends the process, as kill -9 does, when a step is reached for the n-th time."""

    def __init__(self, step: str, time: int) -> None:
        self._step, self._left = step, time

    def reached(self, step: str) -> None:
        if step == self._step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(KeyStore):
    def __init__(self, mortal: Mortal) -> None:
        self._mortal = mortal

    def keys_under(self, *arguments) -> list[WrappedKey]:
        found = super().keys_under(*arguments)
        self._mortal.reached("read")
        return found

    def move_keys(self, *arguments) -> int:
        self._mortal.reached("wrapped")
        moved = super().move_keys(*arguments)
        self._mortal.reached("written")
        return moved


class Child:
    def __init__(self, request: dict) -> None:
        token = request["token"]
        config = TokenConfig(Path(token["module"]), token["label"], token["serial"], Path(token["folder"]))
        self.hsm = Pkcs11Hsm.open(config, token["pin"], expected_masters=MASTERS)
        self.database: Engine = create_engine(request["database"])
        self.mac, self.store = RecordMac(self.hsm), KeyStore()
        self.keys = VoiceKeys(self.hsm, self.store, Silent(), self.mac)
        self.folder = Path(request["sealed"])

    def enrol(self, count: int) -> dict:
        with self.database.begin() as transaction:
            self.keys.rings.register(transaction, MASTERS[0])
        for _ in range(count):
            voice = uuid4()
            with self.database.begin() as transaction, LockedBuffer(4096) as buffer:
                buffer.view(0, len(WORDS))[:] = list(WORDS)
                with self.keys.create(transaction, tenant="acme", voice=voice) as key:
                    sealed = key.seal(buffer, len(WORDS), voice.bytes)
            (self.folder / str(voice)).write_bytes(sealed)
        return {"enrolled": count}

    def rotate(self) -> dict:
        """Version 2 serves from now on."""
        with self.database.begin() as transaction:
            self.keys.rings.register(transaction, MASTERS[1])
            for old in self.store.ring_versions(transaction, "main"):
                if old.version == 1:
                    new = replace(old, state=KeyState.DEACTIVATED, row_version=old.row_version + 1)
                    new = replace(new, mac=self.mac.make(RingVersion.DOMAIN, *new.fields))
                    self.store.replace_ring_version(transaction, old, new)
        return {}

    def rewrap(self, page: int, die: tuple[str, int] = ("never", 1), part: tuple[int, int] = (0, 1)) -> dict:
        mortal = Mortal(*die)
        rewrapping = Rewrapping(self.database, self.hsm, DyingStore(mortal), Silent(), self.mac, page=page)
        outcome = rewrapping.run(rewrapping.plan("main"), Part(*part), tell=lambda _: mortal.reached("told"))
        return {"moved": outcome.moved, "left": outcome.left, "bad": {str(dek): code for dek, code in outcome.bad.items()}}

    def open(self) -> dict:
        """How many of the enrolled voices still open to what was sealed, and under which versions the keys are."""
        opened = 0
        for file in self.folder.iterdir():
            with self.database.begin() as transaction:
                key = self.keys.current(transaction, UUID(file.name))
            with LockedBuffer(4096) as buffer:
                self.keys.open(key, [Sealed(file.read_bytes(), UUID(file.name).bytes, buffer)], lambda: None)
                opened += bytes(buffer.view(0, len(WORDS))) == WORDS
        with self.database.begin() as transaction:
            under = self.store.references(transaction, "main")
        return {"opened": opened, "under": under}


def main() -> None:
    request = json.loads(sys.argv[1])
    child = Child(request)
    for call, arguments in request["do"]:
        print(json.dumps(getattr(child, call)(**arguments)), flush=True)
    child.hsm.close()


if __name__ == "__main__":
    main()
