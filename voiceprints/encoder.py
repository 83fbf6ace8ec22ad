"""Speech to window embeddings: the GE2E speaker encoder (Wan et al. 2018, weights of Resemblyzer) over ONNX Runtime.

ONNX Runtime writes window embeddings straight into locked memory (I/O binding). What it computes on the way stays in its
arena: of the last batch, the embeddings before they are scaled to unit length. A run over a fixed signal of the same shape
follows each use and overwrites them. The arena stays on for that reason: without it each run has other blocks of the heap,
and the overwriting misses them (measured by looking into the process's memory; `tests/voiceprints/test_forgetting.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from voiceprints.decoding import RATE, Samples, checked_samples
from voiceprints.embedding import SIZE, Vector, centre
from voiceprints.errors import ModelRefused
from voiceprints.mel import BANDS, FRAMES, slaney_filters, window_count, windowed_mel
from voiceprints.memory import Scratch
from voiceprints.models import FOLDER, GE2E, require_no_telemetry

BATCH = 4
"""Windows in one run: always as many, so that every run has the same shape and the next one overwrites it."""

_TEST_TOLERANCE = 1e-4
# Every sixteenth number of the embedding of `_test_signal`, as the pinned model gave it.
_TEST_NUMBERS = (
    0.0, 0.09866, 0.03257, 0.1229, 0.05116, 0.0, 0.0, 0.0, 0.0185, 0.0, 0.00052, 0.0761, 0.0, 0.01548, 0.06371, 0.12545,
)  # fmt: skip

Numbers = npt.NDArray[np.float32]


class Encoder:
    """The encoder. Same samples, same bits. One use at a time: the arena then has one set of blocks to overwrite."""

    def __init__(self, folder: Path = FOLDER) -> None:
        require_no_telemetry()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(GE2E.read(folder), options, providers=["CPUExecutionProvider"])
        self._filters = slaney_filters()
        self._turn = threading.Lock()
        self._fixed = _in_batches(windowed_mel(_test_signal(), self._filters))[:BATCH]
        self._test()

    @property
    def model_id(self) -> str:
        """Name and content hash of the model."""
        return GE2E.model_id

    def locked_bytes(self, speech: Sequence[Samples]) -> int:
        """What `windows` takes from its scratch for these recordings."""
        return (_padded(sum(window_count(len(samples)) for samples in speech)) + BATCH) * SIZE * 4

    def windows(self, speech: Sequence[Samples], scratch: Scratch) -> Vector:
        """Embeddings [n, 256] of the windows of all recordings in order, in locked memory taken from `scratch`.

        Raises EmptyAudio, InvalidSamples, and MemoryError when `scratch` has no room.
        """
        mel = np.concatenate([windowed_mel(checked_samples(samples), self._filters) for samples in speech])
        batches = _in_batches(mel)
        out, spent = scratch((len(batches), SIZE), np.float32), scratch((BATCH, SIZE), np.float32)
        with self._turn:
            try:
                for start in range(0, len(batches), BATCH):
                    self._run(batches[start : start + BATCH], out[start : start + BATCH])
            finally:
                self._run(self._fixed, spent)
        return out[: len(mel)]

    def _run(self, mel: Numbers, out: Vector) -> None:
        # The runtime writes 4 * n * 256 bytes at this address and asks nothing.
        assert mel.dtype == out.dtype == np.float32
        assert mel.flags.c_contiguous and out.flags.c_contiguous  # noqa: PT018
        binding = self._session.io_binding()
        for bind, name, array in ((binding.bind_input, "mel", mel), (binding.bind_output, "embedding", out)):
            bind(name, "cpu", 0, np.float32, list(array.shape), array.ctypes.data)
        self._session.run_with_iobinding(binding)

    def _test(self) -> None:
        """The fixed signal must give the pinned numbers, twice the same. Raises ModelRefused."""
        # Nobody's voice: ordinary memory will do.
        one, two = (np.zeros(SIZE, dtype=np.float32) for _ in range(2))
        for out in (one, two):
            centre(self.windows([_test_signal()], np.zeros), out)
        if not np.array_equal(one, two) or float(np.abs(one[::16] - _TEST_NUMBERS).max()) > _TEST_TOLERANCE:
            raise ModelRefused("the speaker encoder does not give the numbers it gave when it was pinned")


def _padded(count: int) -> int:
    return -(-count // BATCH) * BATCH


def _in_batches(mel: Numbers) -> Numbers:
    """`mel` [n, 160, 40] with silent windows after it, so that n is a multiple of the batch."""
    out = np.zeros((_padded(len(mel)), FRAMES, BANDS), dtype=np.float32)
    out[: len(mel)] = mel
    return out


def _test_signal() -> Samples:
    """Eight seconds of a gliding buzz with two moving resonances: speech-like, nobody's, and enough for a whole batch."""
    time = np.arange(8 * RATE) / RATE
    pitch = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * time)) / RATE
    centres = (600 + 250 * np.sin(2 * np.pi * 1.3 * time), 1700 + 500 * np.sin(2 * np.pi * 0.9 * time))
    sound = np.zeros_like(time)
    for harmonic in range(1, 31):
        near = sum(np.exp(-(((harmonic * 120 - centre_hz) / 300) ** 2)) for centre_hz in centres)
        sound += (near + 0.02) * np.sin(harmonic * pitch)
    return np.asarray(0.2 * sound / np.abs(sound).max(), dtype=np.float32)
