"""The log's Merkle tree (RFC 6962, section 2.1; RFC 9162, section 2.1), built from leaf hashes. Pure.

The hashes, the right edge and the consistency check stand in `verify.py`, the one file that auditors carry away; here is
what only the log's side needs: a tree that keeps its complete subtrees and makes proofs.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.audit.verify import node_hash, subtrees

_HASH = 32


class Tree:
    """Every complete subtree's hash, 64 bytes of memory a leaf. Appending costs two hashes on average, proofs O(log² n)."""

    def __init__(self, leaf_hashes: Iterable[bytes] = ()) -> None:
        self._levels: list[bytearray] = [bytearray()]
        for digest in leaf_hashes:
            self.append(digest)

    @property
    def size(self) -> int:
        """Leaves so far."""
        return len(self._levels[0]) // _HASH

    def append(self, digest: bytes) -> None:
        """Add a leaf by its hash."""
        if len(digest) != _HASH:
            raise ValueError("a leaf hash has 32 bytes")
        index, level = self.size, 0
        self._levels[0] += digest
        while index & 1:
            digest = node_hash(self._node(level, index - 1), digest)
            index, level = index >> 1, level + 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += digest

    def root(self, start: int = 0, end: int | None = None) -> bytes:
        """MTH(D[start:end]) of a range that is not empty and lies as RFC 6962 splits trees: by default, of all."""
        return self._fold(self.cover(start, self.size if end is None else end))

    def cover(self, start: int, end: int) -> list[bytes]:
        """The hashes of the fewest complete subtrees over [start, end): what stands in for entries not exported."""
        self._inside(start, end)
        return [self._node(level, first >> level) for first, level in subtrees(start, end)]

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """PATH(index, D[0:size]), lowest sibling first. Raises ValueError outside the tree."""
        self._inside(index, size)
        if index == size:
            raise ValueError("there is no such leaf")
        start, end, path = 0, size, []
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                path.append(self.root(middle, end))
                end = middle
            else:
                path.append(self.root(start, middle))
                start = middle
        return path[::-1]

    def consistency(self, old: int, size: int) -> list[bytes]:
        """PROOF(old, D[0:size]) for 0 < old <= size. Raises ValueError outside the tree."""
        self._inside(old, size)
        if not old:
            raise ValueError("an empty tree has no consistency proof")
        start, end, proof = 0, size, []
        while old != end:
            middle = start + _split(end - start)
            if old <= middle:
                proof.append(self.root(middle, end))
                end = middle
            else:
                proof.append(self.root(start, middle))
                start = middle
        if start:
            proof.append(self.root(start, end))
        return proof[::-1]

    def _node(self, level: int, index: int) -> bytes:
        return bytes(self._levels[level][index * _HASH : (index + 1) * _HASH])

    def _fold(self, cover: list[bytes]) -> bytes:
        if not cover:
            raise ValueError("an empty range has no root here")
        digest = cover[-1]
        for left in reversed(cover[:-1]):
            digest = node_hash(left, digest)
        return digest

    def _inside(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"[{start}, {end}) is not inside a tree of {self.size} leaves")


def check_inclusion(index: int, size: int, leaf: bytes, root: bytes, path: list[bytes]) -> None:
    """RFC 9162, section 2.1.3.2: this leaf stands at `index` of the tree with this root. Raises ValueError otherwise."""
    if not 0 <= index < size or len(leaf) != _HASH:
        raise ValueError("the leaf lies outside the tree")
    low, high, digest = index, size - 1, leaf
    for sibling in path:
        if not high:
            raise ValueError("the inclusion proof is too long")
        if low & 1 or low == high:
            digest = node_hash(sibling, digest)
            while low and not low & 1:
                low, high = low >> 1, high >> 1
        else:
            digest = node_hash(digest, sibling)
        low, high = low >> 1, high >> 1
    if high or digest != root:
        raise ValueError("the inclusion proof does not hold")


def _split(count: int) -> int:
    """The largest power of two smaller than `count`."""
    return 1 << (count - 1).bit_length() - 1
