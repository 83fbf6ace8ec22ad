"""The table of master key versions that both sites agree on, and what may follow it. Pure rules.

States are those of `keyvault.states`. PRE_ACTIVATION lives between a vote and both acknowledgements and is never in an agreed
table. A record never leaves the table, so a version number is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from keyvault.errors import KeyStateForbids
from keyvault.states import KeyState, require_step
from keyvault.sync.errors import SyncRefused
from keyvault.sync.wire import Statement, require

_NEEDS_EVERY_SITE = frozenset({KeyState.ACTIVE, KeyState.SUSPENDED})


@dataclass(frozen=True)
class Record(Statement):
    """One master version: `attributes` are those that must be read back equal at both sites ("TRUSTED=1"), sorted.

    `holders` names the sites that proved to hold it. What differs by birthplace (LOCAL, ALWAYS_SENSITIVE) is not in here.
    """

    DOMAIN = "hsm-sync/1/record"
    key_id: str
    version: int
    state: KeyState
    algorithm: str
    attributes: tuple[str, ...]
    holders: tuple[str, ...]

    def __post_init__(self) -> None:
        require(bool(self.key_id) and self.version > 0, "a key has a name and a version from 1")
        require(self.state is not KeyState.PRE_ACTIVATION, "an agreed version is past pre-activation")
        for names in (self.attributes, self.holders):
            require(list(names) == sorted(set(names)), "names are sorted and unique")

    @property
    def name(self) -> str:
        """The label of this version in the token: `ring/main/3`."""
        return f"{self.key_id}/{self.version}"


Records = tuple[Record, ...]


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, over the exact bytes of each leaf."""
    level = [sha256(b"\x00" + leaf).digest() for leaf in leaves]
    if not level:
        return sha256().digest()
    while len(level) > 1:
        # Pairing level by level and carrying an odd last node up gives the same tree as splitting at powers of two.
        paired = [sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def table_root(records: Records) -> bytes:
    """The root over the records in their order, which `check_table` makes (key id, version)."""
    return merkle_root([record.encode() for record in records])


def check_table(records: Records, sites: Sequence[str]) -> None:
    """What holds for every agreed table. Raises SyncRefused."""
    order = [(record.key_id, record.version) for record in records]
    if order != sorted(set(order)):
        raise SyncRefused("the records are not sorted by key id and version, each once")
    active = [record.key_id for record in records if record.state is KeyState.ACTIVE]
    if len(active) != len(set(active)):
        raise SyncRefused("a key has two active versions")
    for record in records:
        if not set(record.holders) <= set(sites):
            raise SyncRefused(f"{record.name} names a holder that is no site")
        if record.state in _NEEDS_EVERY_SITE and set(record.holders) != set(sites):
            raise SyncRefused(f"{record.name} may not be {record.state}: not every site holds it")


def check_successor(before: Records, after: Records, proved: frozenset[str]) -> None:
    """Whether `after` may follow `before` when both sites prove the versions named in `proved`. Raises SyncRefused."""
    old = {record.name: record for record in before}
    kept = {record.name for record in after} & old.keys()
    if missing := old.keys() - kept:
        raise SyncRefused(f"{min(missing)} is missing: a version never leaves the table")
    highest: dict[str, int] = {}
    for record in before:
        highest[record.key_id] = max(record.version, highest.get(record.key_id, 0))
    for record in after:
        if record.name in old:
            _check_change(old[record.name], record, proved)
        elif record.version <= highest.get(record.key_id, 0):
            raise SyncRefused(f"{record.name} reuses a version number: the next is above {highest[record.key_id]}")
        elif record.state is not KeyState.ACTIVE or record.name not in proved:
            raise SyncRefused(f"{record.name} is new and must be proved and become active")


def _check_change(before: Record, after: Record, proved: frozenset[str]) -> None:
    if (before.algorithm, before.attributes) != (after.algorithm, after.attributes):
        raise SyncRefused(f"{after.name} is described otherwise than when it was made")
    if after.state is not before.state:
        try:
            require_step(before.state, after.state)
        except KeyStateForbids as error:
            raise SyncRefused(f"{after.name}: {error}") from error
    if not set(after.holders) <= set(before.holders) and after.name not in proved:
        raise SyncRefused(f"{after.name} gains a holder that has proved nothing")


def new_records(before: Records, after: Records) -> Records:
    """The records of `after` whose versions `before` does not know."""
    known = {record.name for record in before}
    return tuple(record for record in after if record.name not in known)


def with_sites(records: Records, kept: Sequence[str], sites: Sequence[str]) -> Records:
    """The table once the cluster is `sites`, of which `kept` were members before and still are the same HSMs.

    A version that not every site holds goes on opening what it wrapped and wraps nothing more.
    """
    return tuple(_held_by(record, tuple(sorted(set(record.holders) & set(kept))), sites) for record in records)


def _held_by(record: Record, holders: tuple[str, ...], sites: Sequence[str]) -> Record:
    lost = record.state in _NEEDS_EVERY_SITE and set(holders) != set(sites)
    return replace(record, holders=holders, state=KeyState.DEACTIVATED if lost else record.state)
