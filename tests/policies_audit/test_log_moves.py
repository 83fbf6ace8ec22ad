"""Readiness sees a log that stands still, and none where nothing waits."""

from __future__ import annotations

import pytest
from audit_parts import Log

from policies.errors import AuditUnavailable
from service.vault.log_moves import PATIENCE_S, LogMoves


def test_a_record_that_waits_too_long_says_that_the_log_stands_still(log: Log) -> None:
    now = [0.0]
    moves = LogMoves(log.database, lambda: now[0])
    moves()
    log.append()
    now[0] = 1000.0
    moves()  # it was seen waiting only now
    now[0] += PATIENCE_S
    moves()
    log.append()
    now[0] += 1
    for _ in range(2):
        with pytest.raises(AuditUnavailable):
            moves()
    log.sequence()
    moves()
    now[0] += 10 * PATIENCE_S
    moves()
    log.append()
    moves()
    log.sql("INSERT INTO leaf SELECT 2, 'intent', intent_id, body FROM intent WHERE counter = 2")
    now[0] += PATIENCE_S + 1
    with pytest.raises(AuditUnavailable):  # a leaf is not signed yet
        moves()
