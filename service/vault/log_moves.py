"""Does the log move? A record that waits is followed until a checkpoint covers it, or until it has waited too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Select, and_, func, or_, select

from keyvault.database import Database
from policies.audit.tables import NEWEST, checkpoints, intents, leaves
from policies.errors import AuditUnavailable

PATIENCE_S = 30.0
"""How long a record may wait: well above what the log needs to come back from a lost database (`service/log/process.py`)."""

_SIGNED = select(func.coalesce(func.max(checkpoints.c.size), 0)).scalar_subquery()
_LEAF = and_(leaves.c.kind == "intent", leaves.c.ref == intents.c.intent_id)
_UNSIGNED = (
    select(intents.c.intent_id).outerjoin(leaves, _LEAF).where(or_(leaves.c.seq.is_(None), leaves.c.seq >= _SIGNED)).limit(1)
)


def _any_unsigned() -> Select[UUID]:
    """Of the newest intent of each worker, one that no checkpoint covers."""
    worker, counter = (newest := NEWEST["intent"].subquery()).columns
    return _UNSIGNED.join(newest, and_(intents.c.worker == worker, intents.c.counter == counter))


class LogMoves:
    """A probe of readiness. It remembers one record that waits; with none that waits there is nothing that had to move."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock = database, clock
        self._waiting: UUID | None = None
        self._since = 0.0

    def __call__(self) -> None:
        """Raise AuditUnavailable where a record has waited for its checkpoint longer than PATIENCE_S."""
        with self._database.connect() as connection:
            if self._waiting is not None:
                waits = connection.execute(_UNSIGNED.where(intents.c.intent_id == self._waiting)).one_or_none()
                if waits is not None:
                    if self._clock() - self._since > PATIENCE_S:
                        raise AuditUnavailable("the log signs nothing: see log/log.log")
                    return
            found = connection.execute(_any_unsigned()).one_or_none()
        self._waiting, self._since = None if found is None else found.intent_id, self._clock()
