"""Uploads between edge and vault: one JSON head, then the samples. The edge decodes; the vault never sees a container format.

`length(4, big endian) | JSON | float32 little-endian samples at 16 kHz, one recording after another`. The head either says
what follows, or carries the code of the refusal that decoding ended in, so that the vault can record it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

MAX_HEAD = 64 * 1024
MAX_SAMPLES = 16_000 * 60 * 10
MAX_FRAME = 4 + MAX_HEAD + 4 * MAX_SAMPLES


class FrameError(ValueError):
    """The frame is not what its head says."""


@dataclass(frozen=True)
class Refused:
    """Decoding ended in a refusal."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True)
class Upload:
    """Form fields and decoded recordings."""

    fields: dict[str, str]
    recordings: list[Samples]


def pack(frame: Upload | Refused) -> list[bytes]:
    """The frame as byte chunks."""
    if isinstance(frame, Refused):
        return [_head({"refused": {"code": frame.code, "message": frame.message, "fix": frame.fix}})]
    head = _head({"fields": frame.fields, "lengths": [len(r) for r in frame.recordings]})
    return [head, *(np.ascontiguousarray(r, dtype="<f4").tobytes() for r in frame.recordings)]


def unpack(data: bytes) -> Upload | Refused:
    """Read a frame. Raises FrameError if a length is off; allocates nothing that the bytes do not hold."""
    if len(data) < 4 or not 0 < (size := int.from_bytes(data[:4], "big")) <= min(MAX_HEAD, len(data) - 4):
        raise FrameError("head length is off")
    try:
        head = json.loads(data[4 : 4 + size])
    except ValueError as error:
        raise FrameError("head is not JSON") from error
    if not isinstance(head, dict):
        raise FrameError("head is not an object")
    if "refused" in head:
        return _refused(head["refused"])
    return Upload(_fields(head.get("fields")), _recordings(head.get("lengths"), data[4 + size :]))


def _head(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text


def _refused(value: Any) -> Refused:
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in ("code", "message", "fix")):
        raise FrameError("refusal is malformed")
    return Refused(value["code"][:64], value["message"][:500], value["fix"][:500])


def _fields(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise FrameError("fields are malformed")
    return dict(value)


def _recordings(lengths: Any, body: bytes) -> list[Samples]:
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise FrameError("lengths are malformed")
    if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) * 4 != len(body):
        raise FrameError("samples are not as long as the head says")
    out, start = [], 0
    for n in lengths:
        out.append(np.frombuffer(body, dtype="<f4", count=n, offset=start).astype(np.float32, copy=False))
        start += 4 * n
    return out
