"""A state folder that any system user may enter, on a path short enough for Unix sockets; gone after the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def state_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="glottis-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
