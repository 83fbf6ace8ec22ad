"""The door to ONNX Runtime: sessions with fixed options, and the phone classifier that tells which sound a frame is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from synth.errors import ModelRefused
from synth.models import SHIPPED, Manifest, load_manifest
from voiceprints.models import require_no_telemetry

Array = npt.NDArray[np.float32]

PHONES = 45
SILENCE = 0
_STRESS = frozenset({156, 157})  # token ids of the marks before a stressed syllable: no sound of their own


def open_session(graph: bytes, manifest: Manifest | None = None, *, tap: str | None = None) -> Any:
    """A CPU session on one thread. Raises ModelRefused if inputs or outputs are not the manifest's.

    `tap` names an inner value of the graph that the session shall give as one more output, after the manifest's. Memory
    patterns are off: they are cached per input shape, and texts have ever new shapes, so memory would grow.
    """
    require_no_telemetry()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    graph = graph if tap is None else graph + _output(tap)
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    if manifest is not None:
        for kind, promised, ports in (
            ("inputs", manifest.inputs, session.get_inputs()),
            ("outputs", [*manifest.outputs, *([tap] if tap else [])], session.get_outputs()),
        ):
            if [port.name for port in ports] != list(promised):
                raise ModelRefused(f"model {manifest.name}: its {kind} are not those of the manifest")
    return session


def _output(name: str) -> bytes:
    """ModelProto{graph: GraphProto{output: ValueInfoProto{name}}} as protobuf (ModelProto.graph = 7, GraphProto.output = 12).

    Appended to a serialised model it adds that output: a parser merges a message field that comes twice.
    """
    encoded = name.encode()
    for tag in (0x0A, 0x62, 0x3A):
        if len(encoded) > 127:
            raise ValueError("the name of an inner value is at most 120 bytes here")
        encoded = bytes([tag, len(encoded)]) + encoded
    return encoded


class Phones:
    """Which of 45 sounds each 12.5 ms frame holds. Safe to call from several threads."""

    def __init__(self, folder: Path = SHIPPED) -> None:
        self.manifest = load_manifest(SHIPPED / "phones.manifest.json")
        tokens = json.loads(self.manifest.read(folder, "phones.json"))
        self._classes: Mapping[int, int] = {token: place for place, token in enumerate(tokens)}
        self._session = open_session(self.manifest.read(folder, "phones.onnx"), self.manifest)

    def posteriors(self, log_bands: Array) -> Array:
        """Log band powers [frames, 40] to probabilities [frames, 45]."""
        spread = np.maximum(log_bands.std(0), 1e-3)
        normal = ((log_bands - log_bands.mean(0)) / spread).astype(np.float32)
        result: Array = self._session.run(["post"], {"mel": normal[None]})[0][0]
        return result

    def classes(self, tokens: Sequence[int]) -> npt.NDArray[np.intp]:
        """The class of each model token: punctuation is silence, a stress mark belongs to the sound after it."""
        found = [self._classes.get(token, SILENCE) for token in tokens]
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] in _STRESS:
                found[place] = found[place + 1]
        return np.array(found, dtype=np.intp)
