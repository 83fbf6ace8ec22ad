"""What one row becomes of two sites' copies of it: both sites come to the same answer, whoever asks first.

The newer row by its row version stands, and of a voice the one with the newer key. One thing is stronger than any version: a
client that was revoked, a consent that was withdrawn and a voice that was suspended stay so, whatever the other site wrote
meanwhile. What is neither site's row as it was gets the next version, and so prevails over both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from keyvault.records import canonical
from policies.authority import Client, ClientState, Voice, VoiceState
from policies.consent import Consent, ConsentState

Row = TypeVar("Row", Client, Consent, Voice)
_CLOSED = frozenset({ClientState.REVOKED, ConsentState.WITHDRAWN, VoiceState.SUSPENDED})
"""No way leads out of these."""


def joined(mine: Row, theirs: Row) -> Row:
    """The row that stands at both sites once each has seen the other's."""
    behind, ahead = sorted((mine, theirs), key=_rank)
    stands = closed_like(ahead, behind)
    if stands != ahead or behind.row_version > ahead.row_version:
        return replace(stands, row_version=max(mine.row_version, theirs.row_version) + 1)
    return stands


def closed_like(row: Row, other: Row) -> Row:
    """The row, revoked, withdrawn or suspended if the other is."""
    return replace(row, state=other.state) if other.state in _CLOSED else row


def _rank(row: Client | Consent | Voice) -> tuple[int, int, bool, int, bytes]:
    """Higher stands. Of one version: the stricter, and at last by its bytes, so that both sites choose the same."""
    key_version = row.key_version if isinstance(row, Voice) else 0
    fewer_roles = -len(row.roles) if isinstance(row, Client) else 0
    return (key_version, row.row_version, row.state in _CLOSED, fewer_roles, canonical("rank", *row.fields()))
