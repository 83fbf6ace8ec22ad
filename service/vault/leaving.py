"""How a vault worker is replaced without its clients noticing: successor first, then no new connections, then the end.

The supervisor gives each worker one end of a pipe. The worker says `serving` there once it accepts, and `replace` when it is
worn: after a set count of openings, because modules leak with each, or when its calls into the HSM hang. The supervisor starts
a successor on the same listening socket, and once that serves it sends SIGUSR1: the worker accepts nothing more, finishes what
it has and ends with 0. What waits in the socket meanwhile is the successor's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import structlog
from starlette.applications import Starlette
from uvicorn import Config, Server

SERVING, REPLACE = b"serving\n", b"replace\n"
AGAIN_S = 60.0
"""How often a worn worker asks again: a successor that did not come up is not the end of it."""
_LAST_REQUESTS_S = 1.0  # a connection that was accepted at the last moment sends its request within this

_log = structlog.get_logger()


class Leaving:
    """The worker's side of its replacement. `descriptor` is the pipe to the supervisor; None where nobody supervises."""

    def __init__(self, descriptor: int | None, again_s: float = AGAIN_S) -> None:
        self._descriptor, self._again_s = descriptor, again_s
        self._worn = threading.Event()
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def ask(self, cause: Exception | None) -> None:
        """Ask to be replaced; None: it has done its share. From any thread, again as often as one likes."""
        if not self._worn.is_set():
            self._worn.set()
            _log.warning("replacement_wanted", cause=type(cause).__name__ if cause else "openings")
            threading.Thread(target=self._keep_asking, name="leaving", daemon=True).start()

    def _keep_asking(self) -> None:
        pause = threading.Event()
        while self.say(REPLACE):
            pause.wait(self._again_s)

    def say(self, word: bytes) -> bool:
        """Say a word to the supervisor; False where it does not listen."""
        if self._descriptor is None:
            return False
        try:
            os.write(self._descriptor, word)
        except OSError:
            return False
        return True


def serve(app: Starlette, listener: socket.socket, leaving: Leaving) -> None:
    """Serve `app` until a signal: SIGTERM stops, SIGUSR1 leaves to a successor."""
    config = Config(app, log_config=None, access_log=False, ws="none", server_header=False, lifespan="off")
    asyncio.run(_Worker(config, leaving).serve(sockets=[listener]))


class _Worker(Server):
    """A server that says when it accepts, and that can leave."""

    def __init__(self, config: Config, leaving: Leaving) -> None:
        super().__init__(config)
        self._leaving = leaving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._leave)
        self._leaving.say(SERVING)

    def _leave(self) -> None:
        """Accept nothing more; give what was accepted the time to send its request; then stop as a server stops."""
        for listening in self.servers:
            listening.close()
        asyncio.get_running_loop().call_later(_LAST_REQUESTS_S, setattr, self, "should_exit", True)
