"""The vector value: 256 float32 numbers of unit length. Everything here works in place, in memory that the caller locked.

No function makes a copy on the ordinary heap: operations write with `out=`, sums go row by row, because numpy may run arrays
of unlike shapes through a buffer of its own, and `numpy.dot` of two vectors is BLAS `sdot`, which reads both where they lie.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from voiceprints.errors import EmbeddingInvalid

SIZE = 256
BYTES = SIZE * 4

Vector = npt.NDArray[np.float32]

_UNIT_TOLERANCE = 1e-3


def centre(windows: Vector, out: Vector) -> None:
    """Write the unit vector of the sum of `windows` [n, 256] into `out` [256]. Raises EmbeddingInvalid; `out` is zero then."""
    out.fill(0)
    for window in windows:
        np.add(out, window, out=out)
    length = math.sqrt(float(np.dot(out, out))) if np.isfinite(out).all() else 0.0
    if length < 1e-6:
        out.fill(0)
        raise EmbeddingInvalid
    np.divide(out, np.float32(length), out=out)
    checked_embedding(out)


def checked_embedding(vector: Vector) -> Vector:
    """The same array, if it is an embedding. Raises EmbeddingInvalid for another shape or type, NaN, infinity, another length."""
    if vector.shape != (SIZE,) or vector.dtype != np.float32:
        raise EmbeddingInvalid
    # NaN and infinity make this comparison false, so one check covers all three rules.
    if not abs(float(np.dot(vector, vector)) - 1.0) <= 2 * _UNIT_TOLERANCE:
        raise EmbeddingInvalid
    return vector


def cosine(one: Vector, other: Vector) -> float:
    """Similarity of two embeddings in [-1, 1]. Raises EmbeddingInvalid if either is not one."""
    return max(-1.0, min(1.0, float(np.dot(checked_embedding(one), checked_embedding(other)))))
