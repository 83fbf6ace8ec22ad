"""Fixtures for every test: real parts, each in its own file.

They are plugins, so that a session has one of each: importing a fixture into a test module would make another one of it.
"""

import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Before anything imports the ONNX Runtime, which would report to its maker (voiceprints.models.require_no_telemetry).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

_MEMORY, _ROOM = Path("/dev/shm"), 4 << 30


def _in_memory() -> bool:
    """Whether there is a file system in memory with room for every database, whose programs may be run."""
    try:
        found = os.statvfs(_MEMORY)
    except FileNotFoundError:
        return False
    return found.f_bavail * found.f_frsize > _ROOM and not found.f_flag & os.ST_NOEXEC


if _in_memory():
    # Databases write through to the disk at each commit. Here processes die and no machine does, so that it shows nothing.
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

pytest_plugins = ["postgres_fixture", "hsm_fixtures", "house", "installation", "spoken", "split_tokens"]


class ByInstallation(LoadFileScheduling):
    """One file's tests go to one worker (`--dist loadfile`), and so do all files that share the running installation."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "the running installation" if _shares_installation(file) else file


_ASKS = re.compile(r"(def test_\w+|fixture[^\n]*\ndef \w+)\([^)]*\brunning: Installation\b")


@cache
def _shares_installation(file: str) -> bool:
    return _ASKS.search((Path(__file__).parents[1] / file).read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByInstallation:
    return ByInstallation(config, log)
