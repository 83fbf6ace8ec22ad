"""Model manifests: what a model takes and gives, and the SHA-256 of every file it is made of.

A manifest (`models/NAME.manifest.json`) is part of the package; the files it pins may lie elsewhere. A file is read once,
hashed, and only then used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from synth.errors import ModelRefused, RuntimeConflict

SHIPPED = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Manifest:
    """One model. `rate` is in Hz (0: gives no sound), `conditioning` counts float32 numbers, `files` maps names to SHA-256."""

    name: str
    licence: str
    languages: tuple[str, ...]
    rate: int
    conditioning: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    files: Mapping[str, str]
    digest: str

    def read(self, folder: Path, name: str) -> bytes:
        """The bytes of one pinned file. Raises ModelRefused if it is missing or not the pinned one."""
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ModelRefused(f"model {self.name}: {name} cannot be read ({error.strerror})") from error
        found = hashlib.sha256(content).hexdigest()
        if found != self.files[name]:
            raise ModelRefused(f"model {self.name}: {name} has SHA-256 {found}, pinned is {self.files[name]}")
        return content

    def verify(self, folder: Path) -> None:
        """Check every pinned file. Raises ModelRefused at the first that differs."""
        for name in self.files:
            self.read(folder, name)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest file. Raises ModelRefused if a field is missing or has another type."""
    content = path.read_bytes()
    try:
        fields = json.loads(content)
        return Manifest(
            name=str(fields["name"]),
            licence=str(fields["licence"]),
            languages=tuple(fields["languages"]),
            rate=int(fields["rate"]),
            conditioning=int(fields["conditioning"]),
            inputs=dict(fields["inputs"]),
            outputs=dict(fields["outputs"]),
            files=dict(fields["files"]),
            digest=hashlib.sha256(content).hexdigest(),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelRefused(f"{path.name} is no model manifest: {error!r}") from error


def require_one_runtime(search_path: list[str] | None = None) -> None:
    """Refuse to start where two distributions have put the same `onnxruntime` folder on the path: which one runs is chance.

    Raises RuntimeConflict, whose `fix` names the commands. `search_path` defaults to `sys.path`.
    """
    found = metadata.distributions() if search_path is None else metadata.distributions(path=search_path)
    owners = {
        dist.name
        for dist in found
        if dist.name.lower().replace("_", "-").startswith(("onnxruntime", "ort-nightly"))
        and any(str(file) == "onnxruntime/__init__.py" for file in dist.files or ())
    }
    if len(owners) < 2:
        return
    names = sorted(owners)
    raise RuntimeConflict(
        f"{' and '.join(names)} are both installed and overwrite each other: "
        f"run `pip uninstall -y {' '.join(names)}`, then `pip install {names[0]}` (or the one you want)"
    )
