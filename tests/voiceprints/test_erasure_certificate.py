"""The certificate of erasure: checked with public keys alone; whoever changes a field is told which."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "keyvault_sync"))
from sync_world import SITES, ceremony, found_pair, history, make_roster, propose, record, rotation, run

from keyvault.records import RingVersion, Tombstone
from keyvault.states import KeyState
from keyvault.sync.statement import Op
from keyvault.tombstones import MISSING
from policies.audit.verify import canonical_json
from voiceprints import erasure_certificate
from voiceprints.erasure_certificate import countersign, fields_of, issue, verify
from voiceprints.errors import ErasureCertificateInvalid

ROSTER = make_roster()
NOW = datetime(2026, 5, 1, tzinfo=UTC)
STONE = Tombstone(
    UUID(int=7), "acme", (UUID(int=8), MISSING), "main", 1, 1, NOW, NOW + timedelta(minutes=1), NOW + timedelta(days=9)
)
DESTROYED = RingVersion("main", 1, KeyState.DESTROYED, NOW)


@pytest.fixture(scope="module")
def chain() -> list[bytes]:
    """Two versions; the first was destroyed at epoch 4."""
    a, b = found_pair()
    ceremony([a, b], "ring/main/2")
    run(rotation(a.ledger, 2), [a, b])
    run(propose(a.ledger, Op.STATE, (record(1, KeyState.DESTROYED), record(2))), [a, b])
    return history(a)


@pytest.fixture(scope="module")
def fields(chain: list[bytes]) -> dict[str, Any]:
    return fields_of(STONE, [DESTROYED], chain, {4: NOW + timedelta(days=8)}, ROSTER)


@pytest.fixture
def document(fields: dict[str, Any]) -> dict[str, Any]:
    return issue(fields, "a", NOW + timedelta(days=10), SITES["a"])


def data(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def refused(document: dict[str, Any], match: str, *options: Any) -> None:
    with pytest.raises(ErasureCertificateInvalid, match=match):
        verify(data(document), ROSTER, *options)


def test_it_says_what_was_erased_and_how_far(document, chain):
    found = verify(data(document), ROSTER, chain)
    assert (found["voice"], found["tenant"], found["stage"]) == (str(STONE.voice), "acme", "shredded")
    assert found["keys"] == [{"version": 1, "id": str(UUID(int=8))}, {"version": 2, "id": None}]
    (version,) = found["ring_versions"]
    assert (version["name"], version["state"], version["epoch"]) == ("ring/main/1", "destroyed", 4)
    assert version["destroyed_at"] == "2026-05-09T00:00:00+00:00"
    assert len(version["certificate_sha256"]) == 64
    assert (found["erased_at"], found["shredded_at"]) == ("2026-05-01T00:00:00+00:00", "2026-05-10T00:00:00+00:00")
    assert (found["sites"], found["signed_by"]) == (["a", "b"], ["a"])
    assert any("recordings" in line for line in found["not_covered"])
    assert verify(data(document), ROSTER) == found, "the history is only needed to look destructions up"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return found or [path]


def changed(document: dict[str, Any], path: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    other = copy.deepcopy(document)
    at = other
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = change(at[path[-1]])
    return other


def test_every_changed_field_is_named(document):
    places = leaves(document["erasure"])
    assert len(places) > 20
    for path in places:
        refused(changed(document, ("erasure", *path), lambda value: f"{value}x"), f"^{path[0]}: ")
    for name in document["erasure"]:
        refused({**document, "erasure": {key: value for key, value in document["erasure"].items() if key != name}}, f"^{name}: ")
    refused(changed(document, ("erasure",), lambda erasure: erasure | {"more": 1}), "^more: ")
    refused(changed(document, ("digests",), lambda digests: digests | {"more": "0"}), "^more: ")


def test_a_field_changed_with_its_digest_breaks_the_signature(document):
    other = changed(document, ("erasure", "voice"), lambda _: str(UUID(int=9)))
    other["digests"]["voice"] = erasure_certificate._digest("voice", str(UUID(int=9)))
    refused(other, "^signatures: a's does not hold")


@pytest.mark.parametrize(
    ("signatures", "match"),
    [
        ([], "nobody signed"),
        ([{"site": "a"}], "another form"),
        (["a"], "another form"),
        ([{"site": "a", "signature": "!!"}], "another form"),
        ([{"site": "z", "signature": "AAAA"}], "z's does not hold"),
    ],
)
def test_signatures_that_are_none(document, signatures, match):
    refused({**document, "signatures": signatures}, f"^signatures: .*{match}")


def test_one_sites_signature_passes_for_no_other(document):
    refused(changed(document, ("signatures", 0, "site"), lambda _: "b"), "b's does not hold")
    refused({**document, "signatures": document["signatures"] * 2}, "one stands twice")


def test_a_signature_over_a_part_of_a_certificate_is_none(fields):
    erasure = {**fields, "site": "a", "issued_at": "now"}
    signed = SITES["a"](canonical_json({name: erasure_certificate._digest(name, value) for name, value in erasure.items()}))
    refused(issue(fields, "a", NOW, lambda _: signed), "does not hold")


@pytest.mark.parametrize("junk", [b"", b"{}", b"[]", b"null", b"\xff", b'{"a":1,"a":2}', b"[" * 5000, b" " * (1 << 21)])
def test_what_is_no_certificate_is_said_so(junk):
    with pytest.raises(ErasureCertificateInvalid, match="no certificate"):
        verify(junk, ROSTER)


def test_another_clusters_roster_does_not_fit(document):
    with pytest.raises(ErasureCertificateInvalid, match=r"^cluster: "):
        verify(data(document), replace(ROSTER, cluster="other"))


def test_a_destruction_that_the_history_does_not_know_is_refused(fields, chain):
    undestroyed = issue(fields, "a", NOW, SITES["a"])
    refused(undestroyed, "^ring_versions: the sites' history does not say so of ring/main/1", chain[:3])
    invented = copy.deepcopy(fields)
    invented["ring_versions"][0]["certificate_sha256"] = "0" * 64
    refused(issue(invented, "a", NOW, SITES["a"]), "^ring_versions: ", chain)
    refused(undestroyed, "history does not hold", chain[1:])


def test_shredded_needs_every_version_destroyed(fields):
    early = copy.deepcopy(fields)
    early["ring_versions"][0]["state"] = "deactivated"
    refused(issue(early, "a", NOW, SITES["a"]), "^stage: ")


def test_the_other_site_signs_what_it_knows_too(document, chain):
    theirs = fields_of(replace(STONE, erased_at=NOW + timedelta(minutes=1)), [DESTROYED], chain, {}, ROSTER)
    theirs["ring_versions"][0] |= {"destroyed_at": "2026-05-09T00:00:07+00:00"}
    both = countersign(data(document), theirs, "b", ROSTER, SITES["b"])
    assert verify(data(both), ROSTER, chain)["signed_by"] == ["a", "b"]
    assert verify(data(countersign(data(both), theirs, "b", ROSTER, SITES["b"])), ROSTER)["signed_by"] == ["a", "b"]


@pytest.mark.parametrize(
    ("stone", "versions", "match"),
    [
        (replace(STONE, voice=UUID(int=1)), [DESTROYED], "another value of voice"),
        (replace(STONE, dek_ids=(UUID(int=8),)), [DESTROYED], "another value of keys"),
        (replace(STONE, shredded_at=None), [DESTROYED], "stage: at this site"),
        (replace(STONE, last_ring_version=2), [DESTROYED], "another value of ring_versions"),
        (STONE, [replace(DESTROYED, state=KeyState.DEACTIVATED)], "another value of ring_versions"),
    ],
)
def test_the_other_site_signs_nothing_else(document, chain, stone, versions, match):
    with pytest.raises(ErasureCertificateInvalid, match=match):
        countersign(data(document), fields_of(stone, versions, chain, {}, ROSTER), "b", ROSTER, SITES["b"])


def test_checking_needs_no_token_and_no_database():
    code = "import sys, voiceprints.erasure_certificate; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "voiceprints.erasure_certificate" in loaded
    assert not {"pkcs11", "onnxruntime"} & set(loaded)
