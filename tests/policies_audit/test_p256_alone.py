"""The verifier's own ECDSA over P-256, against published vectors: it accepts what holds in its one form, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies.audit.verify import check_p256

VECTORS = Path(__file__).parents[1] / "vectors/wycheproof/ecdsa_secp256r1_sha256_p1363_test.json"
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def cases() -> Iterator[tuple[bytes, dict[str, Any]]]:
    for group in json.loads(VECTORS.read_text())["testGroups"]:
        for case in group["tests"]:
            yield bytes.fromhex(group["publicKey"]["uncompressed"]), case


def deviating(every: int) -> list[int]:
    """The numbers of cases that are judged otherwise than published; a valid signature counts in its form with a low s."""
    found = []
    for public, case in list(cases())[::every]:
        signature = bytes.fromhex(case["sig"])
        r, s = signature[:32], int.from_bytes(signature[32:], "big")
        low = r + min(s, ORDER - s).to_bytes(32, "big") if len(signature) == 64 and s < ORDER else signature
        if holds(public, case, low) != (case["result"] == "valid") or (low != signature and holds(public, case, signature)):
            found.append(case["tcId"])
    return found


def holds(public: bytes, case: dict[str, Any], signature: bytes) -> bool:
    try:
        check_p256(public, bytes.fromhex(case["msg"]), signature)
    except ValueError:
        return False
    return True


def test_published_vectors() -> None:
    assert deviating(every=9) == []


@pytest.mark.soak
def test_every_published_vector() -> None:
    assert deviating(every=1) == []


@pytest.mark.parametrize("change", ["", "short", "infinity", "off the curve", "not reduced", "compressed"])
def test_only_points_of_the_curve_are_keys(change: str) -> None:
    public, case = next((public, case) for public, case in cases() if case["result"] == "valid")
    x, y = public[1:33], public[33:]
    signature = bytes.fromhex(case["sig"])
    r, s = signature[:32], int.from_bytes(signature[32:], "big")
    signature = r + min(s, ORDER - s).to_bytes(32, "big")
    other = {
        "": public,
        "short": public[:-1],
        "infinity": b"\x04" + bytes(64),
        "off the curve": b"\x04" + x + bytes(31) + b"\x01",
        "not reduced": b"\x04" + (int.from_bytes(x, "big") + 2**256 - 2**224 + 2**192 + 2**96 - 1).to_bytes(33, "big")[-32:] + y,
        "compressed": bytes([2 + y[-1] % 2]) + x + bytes(32),
    }[change]
    assert holds(other, case, signature) == (change == "")
