"""Who holds a state folder: one `glottis up`, or one command that needs it at rest. It loads next to nothing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from service.errors import AlreadyRunning, NotRunning, StateFolderRefused
from service.settings import Settings
from service.site import Site

LOCK = ".lock"


@contextmanager
def held(settings: Settings) -> Iterator[None]:
    """Make the state folder where it is missing and hold it for this process alone.

    Raises AlreadyRunning, and StateFolderRefused for a folder that holds something else: its mode is never changed.
    """
    folder = settings.state_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / LOCK).exists() and any(folder.iterdir()):
            raise StateFolderRefused(f"{folder} holds files that are not of Glottis")
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateFolderRefused(f"{folder} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"another glottis holds {folder}") from None
        yield
    finally:
        os.close(descriptor)


def require_running(settings: Settings) -> None:
    """Raise NotRunning unless a `glottis up` holds this state folder, and HalfMade where none ever did."""
    Site.load(settings.site_file)
    with suppress(AlreadyRunning), held(settings):
        raise NotRunning(f"no glottis up holds {settings.state_dir}")
