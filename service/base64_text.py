"""Bytes in JSON: base64 (RFC 4648 §4), strictly read."""

from __future__ import annotations

import base64


def encoded(data: bytes) -> str:
    """The bytes as text."""
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    """The bytes of such a text. Raises ValueError for anything else."""
    return base64.b64decode(text, validate=True)
