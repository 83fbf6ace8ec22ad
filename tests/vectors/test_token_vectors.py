"""Published vectors through a real token. What it does otherwise stands in `docs/pkcs11-vectors.md`, and nothing else may."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_unwrap_with_padding
from hsm_fixtures import in_own_process
from vectors_in_token import FILES, Deviation, VectorToken, through_a_token

from keyvault.pkcs11_names import Attribute, KeyType

TABLE = Path(__file__).parents[2] / "docs" / "pkcs11-vectors.md"
KNOWN = b"k" * 32


def written_down() -> set[Deviation]:
    """The rows of the table: file, operation, vectors ("11-17, 19"), answer, why."""
    rows = [line.strip("|\n ").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    found: set[Deviation] = set()
    for file, operation, vectors, said, why in ([cell.strip(" `") for cell in row] for row in rows):
        assert len(why) > 40, "every deviation is explained"
        for span in vectors.split(","):
            first, _, last = span.strip().partition("-")
            found |= {(file, operation, number, said) for number in range(int(first), int(last or first) + 1)}
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], list[Deviation], list[Deviation]]:
    return in_own_process(through_a_token, tmp_path_factory.mktemp("vectors") / "token")


def test_the_token_deviates_from_published_vectors_as_written_down_and_nowhere_else(
    outcome: tuple[dict[str, int], list[Deviation], list[Deviation]],
) -> None:
    ran, found, _ = outcome
    assert ran == {
        "aes_wrap": 165,
        "aes_kwp": 254,
        "aes_cmac": 311,
        "ecdsa_secp256r1_sha256_p1363": 262,
        "rsa_oaep_2048_sha1_mgf1sha1": 36,
    }
    assert set(found) == written_down()
    assert not [deviation for deviation in found if deviation[3] == "accepted"], "no vector that must be refused is accepted"


def test_the_comparison_sees_a_deviation(outcome: tuple[dict[str, int], list[Deviation], list[Deviation]]) -> None:
    """Each file has one valid and one invalid vector turned into its opposite: both must be told, in every file."""
    _, _, control = outcome
    assert set(Counter(file for file, *_ in control)) == set(FILES)
    assert {file for file, _, _, said in control if said == "accepted"} == set(FILES)
    assert {file for file, _, _, said in control if said != "accepted"} == set(FILES)


def wrapped_two_ways(folder: Path) -> dict[str, bytes]:
    import pkcs11

    token = VectorToken(folder)
    master = token.known(KNOWN, KeyType.AES, Attribute.WRAP, Attribute.UNWRAP)
    key = token.known(bytes(range(32)), KeyType.AES)
    padded = token.object(master).wrap_key(token.object(key), mechanism=pkcs11.Mechanism.AES_KEY_WRAP_PAD)
    return {"AES_KEY_WRAP": token.calls.wrap(token.handle, master, key), "AES_KEY_WRAP_PAD": bytes(padded)}


def test_which_standard_each_wrap_mechanism_is_shows_by_behaviour(tmp_path: Path) -> None:
    """A mechanism's name is no promise: what another implementation unwraps tells which standard it is."""
    blobs = in_own_process(wrapped_two_ways, tmp_path / "token")
    standards = {"RFC 3394": aes_key_unwrap, "RFC 5649": aes_key_unwrap_with_padding}
    found: dict[str, list[str]] = {name: [] for name in blobs}
    for name, blob in blobs.items():
        for standard, unwrap in standards.items():
            try:
                assert unwrap(KNOWN, blob) == bytes(range(32))
            except InvalidUnwrap:
                continue
            found[name].append(standard)
    assert found == {"AES_KEY_WRAP": ["RFC 3394"], "AES_KEY_WRAP_PAD": ["RFC 5649"]}
