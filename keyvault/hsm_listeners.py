"""Who hears what happens to an HSM's process: its circuit breaker, calls that hang, refused uses, and its age."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keyvault.breaker import unheard
from keyvault.events import KeyEvent


def _nobody(_: object) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Listeners:
    """Each is called from whatever thread it happens in, and must return soon and not raise."""

    breaker: Callable[[KeyEvent], None] = unheard
    """`hsm.breaker_opened` and `hsm.breaker_closed`, one event each."""
    stuck: Callable[[int], None] = _nobody
    """The identity of a thread whose call into the module hangs: who awaits it need not wait any longer."""
    worn: Callable[[Exception | None], None] = _nobody
    """This process should be replaced: None after `openings` keys opened, or what no retry in this process can mend."""
    openings: int | None = None
    refused: Callable[[KeyEvent], None] = unheard
    """`hsm.use_refused`: a key was asked for from where it may not be used."""


UNHEARD = Listeners()
