"""Fixtures of voiceprints: the models are loaded once, the token is the session's, each test has a database of its own."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy
from hsm_fixtures import ServingToken
from sound import flac, samples
from vault import SmallVault

from voiceprints.activity import Activity
from voiceprints.encoder import Encoder


@pytest.fixture(scope="session")
def activity() -> Activity:
    return Activity()


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def vault(serving_token: ServingToken, database: sqlalchemy.Engine, activity: Activity, encoder: Encoder) -> SmallVault:
    return SmallVault(serving_token, database, activity, encoder)


@pytest.fixture(scope="session")
def anna() -> list[np.ndarray]:
    """Eleven seconds of speaker 1998, from two utterances."""
    return [samples(flac("1998", 0))[:80_000], samples(flac("1998", 1))]


@pytest.fixture(scope="session")
def ben() -> list[np.ndarray]:
    """Thirteen seconds of speaker 2033, from two utterances."""
    return [samples(flac("2033", number))[:104_000] for number in (0, 2)]
