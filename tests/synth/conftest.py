"""One engine and three enrolled speakers for all tests of synthesis."""

from __future__ import annotations

import numpy as np
import pytest
from synth_voices import SPEAKERS, Opened, utterances

from synth.hibari_engine import HibariEngine


@pytest.fixture(scope="session")
def engine() -> HibariEngine:
    return HibariEngine()


@pytest.fixture(scope="session")
def own(engine: HibariEngine) -> Opened:
    """The model's own voice: all zeros."""
    return Opened(engine)


@pytest.fixture(scope="session")
def enrolled(engine: HibariEngine) -> dict[str, Opened]:
    """Three speakers, each from the first three utterances."""
    return {speaker: Opened(engine, np.concatenate(utterances(speaker)[:3])) for speaker in SPEAKERS}
