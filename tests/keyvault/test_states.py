"""Key states: what each allows (NIST SP 800-57 Part 1, section 7)."""

from __future__ import annotations

import itertools

import pytest

from keyvault.errors import KeyStateForbids
from keyvault.states import ALLOWED, FOLLOWS, KeyState, KeyUse, require_step, require_use


def test_only_an_active_key_protects_new_data() -> None:
    assert [state for state in KeyState if KeyUse.SEAL in ALLOWED[state]] == [KeyState.ACTIVE]


@pytest.mark.parametrize("state", [KeyState.PRE_ACTIVATION, KeyState.SUSPENDED, KeyState.DESTROYED])
def test_these_states_allow_nothing(state: KeyState) -> None:
    for use in KeyUse:
        with pytest.raises(KeyStateForbids, match=state.value):
            require_use(state, use)


def test_from_under_a_compromised_key_things_move_and_nothing_more() -> None:
    assert ALLOWED[KeyState.COMPROMISED] == {KeyUse.REWRAP}


def test_a_deactivated_key_still_opens_what_it_sealed() -> None:
    require_use(KeyState.DEACTIVATED, KeyUse.OPEN)
    require_use(KeyState.DEACTIVATED, KeyUse.REWRAP)
    with pytest.raises(KeyStateForbids):
        require_use(KeyState.DEACTIVATED, KeyUse.SEAL)


def test_steps_go_only_where_the_standard_lets_them() -> None:
    for state, following in itertools.product(KeyState, KeyState):
        if following in FOLLOWS[state]:
            require_step(state, following)
        else:
            with pytest.raises(KeyStateForbids):
                require_step(state, following)
    assert not FOLLOWS[KeyState.DESTROYED]
    assert all(KeyState.ACTIVE not in FOLLOWS[state] for state in (KeyState.DEACTIVATED, KeyState.COMPROMISED))
    assert all(KeyState.PRE_ACTIVATION not in following for following in FOLLOWS.values())
