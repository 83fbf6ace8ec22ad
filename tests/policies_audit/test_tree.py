"""RFC 6962 hashes and proofs: published vectors, then every proof of every tree below 130 leaves."""

import base64
import hashlib
import json
import time
from pathlib import Path

import pytest

from policies.audit.tree import Tree, check_inclusion
from policies.audit.verify import Frontier, check_consistency, leaf_hash, node_hash, subtrees

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "audit" / "merkle_proofs.json").read_text())

# The leaves and roots that Certificate Transparency implementations share.
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
SIZE = 130
HASHES = [leaf_hash(bytes([n])) for n in range(SIZE)]


def by_definition(hashes: list[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, word for word."""
    if not hashes:
        return hashlib.sha256(b"").digest()
    if len(hashes) == 1:
        return hashes[0]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return node_hash(by_definition(hashes[:k]), by_definition(hashes[k:]))


@pytest.fixture(scope="module")
def roots() -> list[bytes]:
    return [by_definition(HASHES[:n]) for n in range(SIZE)]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(HASHES)


def test_roots_are_the_published_ones() -> None:
    edge, tree = Frontier(), Tree()
    assert edge.root().hex() == ROOTS[0]
    for size, leaf in enumerate(LEAVES, 1):
        digest = leaf_hash(bytes.fromhex(leaf))
        edge.push(digest)
        tree.append(digest)
        assert edge.root().hex() == tree.root().hex() == ROOTS[size]


def decoded(proof: list[str] | None) -> list[bytes]:
    return [base64.b64decode(item) for item in proof or []]


def test_published_inclusion_proofs_and_their_corruptions() -> None:
    accepted = 0
    for case in VECTORS["inclusion"]:
        leaf, root = (base64.b64decode(case[name] or "") for name in ("leafHash", "root"))
        try:
            check_inclusion(case["leafIdx"], case["treeSize"], leaf, root, decoded(case["proof"]))
        except ValueError:
            assert case["wantErr"], case["desc"]
        else:
            assert not case["wantErr"], case["desc"]
            accepted += 1
    assert accepted


def test_published_consistency_proofs_and_their_corruptions() -> None:
    accepted = 0
    for case in VECTORS["consistency"]:
        first, second = (base64.b64decode(case[name] or "") for name in ("root1", "root2"))
        if case["size1"] == 0:
            continue  # everything extends the empty tree; there is no proof to check, and we refuse to be asked
        try:
            check_consistency(case["size1"], first, case["size2"], second, decoded(case["proof"]))
        except ValueError:
            assert case["wantErr"], case["desc"]
        else:
            assert not case["wantErr"], case["desc"]
            accepted += 1
    assert accepted


def test_every_inclusion_proof_holds_for_its_leaf_only(tree: Tree, roots: list[bytes]) -> None:
    for size in range(1, SIZE):
        for index in range(size):
            proof = tree.inclusion(index, size)
            check_inclusion(index, size, HASHES[index], roots[size], proof)
            with pytest.raises(ValueError):
                check_inclusion(index, size, HASHES[(index + 1) % SIZE], roots[size], proof)
            with pytest.raises(ValueError):
                check_inclusion(index, size, HASHES[index], roots[size], [*proof, HASHES[0]])


def test_every_consistency_proof_holds_between_its_roots_only(tree: Tree, roots: list[bytes]) -> None:
    for size in range(1, SIZE):
        for old in range(1, size + 1):
            proof = tree.consistency(old, size)
            check_consistency(old, roots[old], size, roots[size], proof)
            for bad_old, bad_new, bad_proof in (
                (HASHES[3], roots[size], proof),
                (roots[old], HASHES[3], proof),
                (roots[old], roots[size], [*proof, HASHES[0]]),
            ):
                with pytest.raises(ValueError):
                    check_consistency(old, bad_old, size, bad_new, bad_proof)
            if proof:
                with pytest.raises(ValueError):
                    check_consistency(old, roots[old], size, roots[size], proof[:-1])


def test_every_range_is_completed_by_the_subtrees_beside_it(tree: Tree, roots: list[bytes]) -> None:
    size = 71
    for start in range(size + 1):
        for end in range(start, size + 1):
            edge = Frontier()
            for first, last in ((0, start), (end, size)):
                for (_, level), digest in zip(subtrees(first, last), tree.cover(first, last), strict=True):
                    edge.push(digest, level)
                if first == 0:
                    for digest in HASHES[start:end]:
                        edge.push(digest)
            assert edge.root() == roots[size]


def test_a_subtree_out_of_place_is_refused() -> None:
    edge = Frontier()
    edge.push(HASHES[0])
    with pytest.raises(ValueError):
        edge.push(HASHES[1], level=1)


@pytest.mark.parametrize(("index", "size"), [(-1, 3), (3, 3), (0, 0), (0, SIZE + 1)])
def test_proofs_outside_the_tree_are_refused(tree: Tree, index: int, size: int) -> None:
    with pytest.raises(ValueError):
        tree.inclusion(index, size)
    with pytest.raises(ValueError):
        tree.consistency(size + 1, size)


def test_proofs_stay_cheap_in_a_large_tree() -> None:
    tree = Tree(leaf_hash(n.to_bytes(4, "big")) for n in range(100_000))
    started = time.process_time()
    for index in range(0, 100_000, 1000):
        check_inclusion(index, tree.size, leaf_hash(index.to_bytes(4, "big")), tree.root(), tree.inclusion(index, tree.size))
        tree.consistency(index + 1, tree.size)
    assert time.process_time() - started < 1.0
