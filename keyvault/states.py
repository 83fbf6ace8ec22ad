"""Key states and what each allows: NIST SP 800-57 Part 1 Rev. 5, section 7. A state belongs to one version of a key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from keyvault.errors import KeyStateForbids


class KeyState(StrEnum):
    """SP 800-57 Part 1, 7.1 to 7.6."""

    PRE_ACTIVATION = "pre-activation"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DEACTIVATED = "deactivated"
    COMPROMISED = "compromised"
    DESTROYED = "destroyed"


class KeyUse(StrEnum):
    """What a key can be wanted for: to protect new data, to open old data, to move under another master."""

    SEAL = "seal"
    OPEN = "open"
    REWRAP = "rewrap"


ALLOWED: Mapping[KeyState, frozenset[KeyUse]] = {
    KeyState.PRE_ACTIVATION: frozenset(),
    KeyState.ACTIVE: frozenset({KeyUse.SEAL, KeyUse.OPEN, KeyUse.REWRAP}),
    KeyState.SUSPENDED: frozenset(),
    KeyState.DEACTIVATED: frozenset({KeyUse.OPEN, KeyUse.REWRAP}),
    # The standard leaves opening under a compromised key to special permission; ordinary requests have none. To move a key
    # from under it opens nothing, and is what mends the damage.
    KeyState.COMPROMISED: frozenset({KeyUse.REWRAP}),
    KeyState.DESTROYED: frozenset(),
}

FOLLOWS: Mapping[KeyState, frozenset[KeyState]] = {
    KeyState.PRE_ACTIVATION: frozenset({KeyState.ACTIVE, KeyState.COMPROMISED, KeyState.DESTROYED}),
    KeyState.ACTIVE: frozenset({KeyState.SUSPENDED, KeyState.DEACTIVATED, KeyState.COMPROMISED}),
    KeyState.SUSPENDED: frozenset({KeyState.ACTIVE, KeyState.DEACTIVATED, KeyState.COMPROMISED}),
    KeyState.DEACTIVATED: frozenset({KeyState.COMPROMISED, KeyState.DESTROYED}),
    KeyState.COMPROMISED: frozenset({KeyState.DESTROYED}),
    KeyState.DESTROYED: frozenset(),
}
"""Which state may come after which: the transitions of section 7, and only those that Glottis makes."""


def require_use(state: KeyState, use: KeyUse) -> None:
    """Raise KeyStateForbids unless a key in `state` may be used so."""
    if use not in ALLOWED[state]:
        raise KeyStateForbids(f"a key in state {state} may not {use}")


def require_step(state: KeyState, following: KeyState) -> None:
    """Raise KeyStateForbids unless `following` may come after `state`."""
    if following not in FOLLOWS[state]:
        raise KeyStateForbids(f"a key in state {state} cannot become {following}")
