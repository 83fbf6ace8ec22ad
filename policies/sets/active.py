"""Which set of policies decides now: the one that officers activated last, checked again by every process that decides by it.

Each decision reads, in its own transaction, the number of the newest activation. Where that moved, the activation is read and
checked: MAC, exact bytes, the officers' signatures over version and hash, and that their roster is one of this cluster's history.
A process that cannot load it goes on by the set that it has, and says so once; one that has none yet decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

import structlog

from keyvault.approval_kinds import Kind, quorum_for
from keyvault.approval_subjects import policy_subject
from keyvault.approvals import Approval, Operation
from keyvault.database import Transaction
from keyvault.errors import KeyVaultError
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify
from policies.engine import PolicyEngine
from policies.errors import PolicyError, PolicySetTampered
from policies.sets.policy_set import PolicySet
from policies.sets.store import Activation, ActivationStore

RETRY_S = 30.0
"""How long an activation that could not be loaded is not tried again."""

_NONE = -1

Rosters = Callable[[Transaction], Iterable[Roster]]
"""The roster in force, then every one that this cluster ever had; those are looked for only if need be."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Checked:
    """An activation whose signatures hold. `current`: its officers are those of the roster in force."""

    version: int
    policies: PolicySet
    approved_by: tuple[str, ...]
    current: bool


def checked(activation: Activation, rosters: Iterable[Roster], verify: Verify) -> Checked:
    """What an activation establishes. Raises PolicySetTampered, PolicySetInvalid."""
    try:
        operation = Operation.decode(activation.operation)
        approvals = [Approval.decode(one) for one in activation.approvals]
        roster = Roster.decode(activation.roster)
        known = iter(rosters)
        current = roster == next(known)
        if not current and roster not in known:
            raise PolicySetTampered(f"activation {activation.version} names a roster that this cluster never had")
        digest = sha256(activation.policies).digest()
        wanted = policy_subject(roster.cluster, activation.version, activation.before_sha256, digest)
        if (operation.cluster, operation.kind, operation.subject) != (roster.cluster, Kind.POLICY, wanted):
            raise PolicySetTampered(f"activation {activation.version} is not what its officers signed")
        # The site that activated it saw them in time.
        quorum_for(Kind.POLICY, roster).check(operation, approvals, verify, None)
    except KeyVaultError as error:
        raise PolicySetTampered(f"activation {activation.version}: {error}") from error
    people = tuple(sorted({one.person for one in approvals if one.role == "approve"}))
    return Checked(activation.version, PolicySet.decode(activation.policies), people, current)


class ActivePolicies:
    """One process's view. Implements `policies.engine.Policies`; safe from any thread."""

    def __init__(
        self, store: ActivationStore, rosters: Rosters, verify: Verify, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rosters, self._verify, self._clock = store, rosters, verify, clock
        self._lock = threading.Lock()
        self._version = _NONE
        self._engine: PolicyEngine | None = None
        self._refused: tuple[int, float, PolicyError] | None = None
        self._put_back = _NONE

    def at(self, version: int, transaction: Transaction) -> PolicyEngine:
        """The engine of this activation; the one before where it does not load, or where a newer one was seen here already.

        Raises PolicySetTampered or PolicySetInvalid where this process never had one: nothing is decided then.
        """
        with self._lock:
            if version > self._version:
                self._follow(version, transaction)
            elif version < self._version and version != self._put_back:
                self._put_back = version
                _log.error("policy_set_put_back", code=PolicySetTampered.code, version=version, decides_by=self._version)
            if self._engine is None:
                assert self._refused is not None
                raise self._refused[2]
            return self._engine

    def _follow(self, version: int, transaction: Transaction) -> None:
        if self._refused is not None and self._refused[0] == version and self._clock() - self._refused[1] < RETRY_S:
            return
        try:
            engine = self._loaded(version, transaction)
        except PolicyError as error:
            if self._refused is None or self._refused[0] != version:
                _log.error("policy_set_refused", code=error.code, version=version, decides_by=self._version, said=error.detail)
            self._refused = (version, self._clock(), error)
            return
        self._version, self._engine, self._refused = version, engine, None
        _log.info("policy_set_active", version=version)

    def _loaded(self, version: int, transaction: Transaction) -> PolicyEngine:
        if version == 0:
            return PolicyEngine.shipped()
        activation = self._store.activation(transaction, version)
        return checked(activation, self._rosters(transaction), self._verify).policies.engine()
