"""The package's own model files, by name and SHA-256: what was hashed is what is loaded."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from voiceprints.errors import ModelRefused

FOLDER = Path(__file__).parent / "models"

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
"""Set to 1 in the environment of every process, before the runtime is imported."""


def require_no_telemetry() -> None:
    """Refuse an ONNX Runtime that reports to its maker: since 1.32 it does, from wherever it is imported, unless told not to.

    Raises ModelRefused where the environment does not say so. A vault talks to its socket and its database, and to nobody.
    """
    if os.environ.get(TELEMETRY_OFF) != "1":
        raise ModelRefused(f"{TELEMETRY_OFF}=1 is not set in the environment: the ONNX Runtime would report to its maker")


@dataclass(frozen=True)
class Model:
    """A pinned model file."""

    name: str
    file: str
    sha256: str

    @property
    def model_id(self) -> str:
        """Name and content hash; stands in the AAD of what is sealed for it."""
        return f"{self.name}/{self.sha256[:16]}"

    def read(self, folder: Path = FOLDER) -> bytes:
        """The file's bytes. Raises ModelRefused when it is missing or not the pinned one."""
        try:
            content = (folder / self.file).read_bytes()
        except OSError as error:
            raise ModelRefused(f"{self.file}: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ModelRefused(f"{self.file} is not the pinned model")
        return content


GE2E = Model("ge2e", "ge2e.onnx", "a2577b1e3d7b1b0bb9d4555d8bdfc3f65239242efcfa8326df692486774289f1")
SILERO = Model("silero-vad", "silero_vad_16k_op15.onnx", "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49")
