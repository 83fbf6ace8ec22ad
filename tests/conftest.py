"""Fixtures for every test: real parts, each in its own file.

They are plugins, so that a session has one of each: importing a fixture into a test module would make another one of it.
"""

import os
import tempfile
from pathlib import Path

import pytest

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


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests go to one worker (`--dist loadgroup`): those of one file, and all that share the running installation."""
    for item in items:
        shared = "running" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("installation" if shared else item.path.stem))
