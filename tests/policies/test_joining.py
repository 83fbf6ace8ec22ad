"""Two sites' copies of one row become one, the same at both, and nothing that was closed opens again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from uuid import UUID

import pytest

from policies.authority import Client, ClientState, Voice, VoiceState
from policies.joining import joined

CLIENT = Client("studio", "acme", "x5t", "jkt", ("speaker",), ClientState.ACTIVE, 3)
VOICE = Voice(UUID(int=1), "acme", "Ann", UUID(int=2), VoiceState.ACTIVE, UUID(int=3), 1, datetime(2026, 12, 1, tzinfo=UTC), 3)
CLIENTS = [
    replace(CLIENT, state=state, jkt=jkt, roles=roles, row_version=version)
    for state, jkt, roles, version in product(ClientState, ("one", "two"), (("speaker",), ("reader", "speaker")), (1, 2, 3))
]
VOICES = [
    replace(VOICE, state=state, terms=terms, row_version=version, dek_id=UUID(int=9 + key), key_version=key)
    for state, terms, version, key in product(VoiceState, ((), ("liveness",)), (1, 2, 3), (1, 2))
]


@pytest.mark.parametrize("rows", [CLIENTS, VOICES])
def test_both_sites_come_to_the_same_row_and_it_closes_what_either_closed(rows: list) -> None:
    for mine, theirs in product(rows, rows):
        stands = joined(mine, theirs)
        assert stands == joined(theirs, mine)
        assert joined(stands, mine) == joined(stands, theirs) == stands, "it prevails over both"
        closed = {ClientState.REVOKED, VoiceState.SUSPENDED}
        assert (stands.state in closed) == bool({mine.state, theirs.state} & closed)
        assert stands.row_version >= max(mine.row_version, theirs.row_version)


def test_an_older_row_changes_nothing_and_a_newer_one_stands_as_it_is() -> None:
    newer = replace(CLIENT, jkt="newer", row_version=4)
    assert joined(newer, CLIENT) is newer
    assert joined(CLIENT, newer) is newer


def test_a_revocation_outlives_a_rotation_that_did_not_know_of_it() -> None:
    revoked, rotated = replace(CLIENT, state=ClientState.REVOKED, row_version=4), replace(CLIENT, jkt="newer", row_version=6)
    assert joined(rotated, revoked) == replace(rotated, state=ClientState.REVOKED, row_version=7)


def test_of_one_version_the_fewer_roles_stand() -> None:
    assert joined(replace(CLIENT, roles=("reader", "speaker")), CLIENT) == CLIENT


def test_a_voices_newer_key_stands_whatever_the_row_with_the_older_one_says() -> None:
    resealed, termed = replace(VOICE, dek_id=UUID(int=4), key_version=2), replace(VOICE, terms=("liveness",), row_version=5)
    assert joined(termed, resealed) == replace(resealed, row_version=6)
