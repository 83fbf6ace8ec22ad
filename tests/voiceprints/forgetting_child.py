"""A process that enrols, opens and compares as it is told, one word a line, so that another can look into its memory.

Arguments: module, token label, serial, folder, PIN, master's version, database URL, a folder with the recordings (.npy).
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import sqlalchemy
from erasing import ErasingVault
from vault import SmallVault

from keyvault.hsm import RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from voiceprints.activity import Activity
from voiceprints.encoder import Encoder
from voiceprints.opening import OpenVoice


@dataclass(frozen=True)
class Token:
    hsm: Pkcs11Hsm


def main() -> None:
    module, label, serial, folder, pin, version, url, speech = sys.argv[1:]
    config = TokenConfig(Path(module), label, serial, Path(folder))
    hsm = Pkcs11Hsm.open(config, pin, expected_masters=[RingMaster("main", int(version))])
    told = Told(SmallVault(Token(hsm), sqlalchemy.create_engine(url), Activity(), Encoder()), Path(speech))
    for line in sys.stdin:
        told.vault.now = time.time()
        word, *rest = line.split()
        getattr(told, word)(*rest)
        print("done", flush=True)


class Told:
    """What the other process may say; `plant` and `scale` do what must never be done."""

    def __init__(self, vault: SmallVault, speech: Path) -> None:
        self.vault, self.speech, self.kept = vault, speech, []

    def enrol(self) -> None:
        self.voice = self.vault.enrol([np.load(path) for path in sorted(self.speech.glob("enrol*.npy"))])

    def open(self, times: str) -> None:
        for _ in range(int(times)):
            with self._opened():
                pass

    def compare(self) -> None:
        self.vault.matching.compare(np.load(self.speech / "probe.npy"), self.voice.voice_id, self.vault.compare(self.voice))

    def reseal(self) -> None:
        voice = self.voice.voice_id
        resealing = ErasingVault(self.vault)
        self.voice = replace(self.voice, key=resealing.resealing.reseal(voice, resealing.grant(voice)))

    def hold(self) -> None:
        self.block = self._opened()
        self.known = self.block.__enter__()

    def plant(self, kind: str) -> None:
        self.kept.append(self.known.embedding.astype(kind))

    def scale(self, factor: str) -> None:
        self.kept.append(self.known.embedding * np.float32(factor))

    def release(self) -> None:
        self.block.__exit__(None, None, None)
        del self.known

    def drop(self) -> None:
        self.kept.clear()

    def _opened(self) -> AbstractContextManager[OpenVoice]:
        return self.vault.voices.opened(self.voice.voice_id, self.vault.speak(self.voice))


if __name__ == "__main__":
    main()
