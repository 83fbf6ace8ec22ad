"""Keys moved by another process: the one that holds the rotation token's PIN, and nothing else of a site.

A re-wrap worker has database, record MACs and the serving token; where masters are not TRUSTED it cannot move keys, and sends
them over a socket pair, blob by blob, to a process of the rotation token's owner. That one sees wrapped keys and no row, no
voice and no database. One JSON line asks for a page, one answers.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from keyvault.errors import HsmUnavailable, KeyNotFound, KeyVaultError, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.rotation import Mover
from service.base64_text import encoded


class RotationLink:
    """`Mover` over the worker's end of the socket pair."""

    def __init__(self, link: socket.socket) -> None:
        self._lines = link.makefile("rwb")

    def close(self) -> None:
        """Ask for nothing more."""
        self._lines.close()

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        """See `keyvault.rotation.Mover`. Raises KeyNotFound for a master that its token lacks, HsmUnavailable for all else."""
        asked = {"source": source.label, "target": target.label, "blobs": [encoded(blob) for blob in wrapped]}
        try:
            self._lines.write(json.dumps(asked).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            raise HsmUnavailable("the process with the rotation token is gone") from error
        if not line:
            raise HsmUnavailable("the process with the rotation token is gone")
        answer = json.loads(line)
        if "failed" in answer:
            missing = answer["code"] == KeyNotFound.code
            raise (KeyNotFound if missing else HsmUnavailable)(f"the rotation token: {answer['failed']}")
        return [UnwrapRejected(one["refused"]) if isinstance(one, dict) else base64.b64decode(one) for one in answer["blobs"]]


@contextmanager
def mover_at(descriptor: int | None) -> Iterator[Mover | None]:
    """What a worker moves keys with: the process at this descriptor, or None: then its own token does."""
    if descriptor is None:
        yield None
        return
    with socket.socket(fileno=descriptor) as link, closing(RotationLink(link)) as mover:
        yield mover


def serve_moves(mover: Mover, link: socket.socket) -> None:
    """The other end: answer page after page until the worker closes."""
    with link, link.makefile("rwb") as lines:
        for line in lines:
            lines.write(json.dumps(_answer(mover, json.loads(line))).encode() + b"\n")
            lines.flush()


def _answer(mover: Mover, asked: dict[str, Any]) -> dict[str, Any]:
    source, target = RingMaster.named(asked["source"]), RingMaster.named(asked["target"])
    try:
        moved = mover.rewrap_many([base64.b64decode(blob) for blob in asked["blobs"]], source, target)
    except KeyVaultError as error:
        return {"failed": str(error), "code": error.code}
    return {"blobs": [{"refused": str(one)} if isinstance(one, UnwrapRejected) else encoded(one) for one in moved]}
