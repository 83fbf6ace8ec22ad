"""Threads for the vault's work, and an end to waiting for one whose call into the HSM hangs.

No code of this process can end such a call. So each request's work runs in a thread, the event loop only awaits it, and
`abandon` (called by the HSM's watch) lets that await end with HsmTimeout. The thread is left to itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread

from keyvault.errors import HsmTimeout

T = TypeVar("T")


class Threads:
    """At most `limit` pieces of work at once; one that hangs keeps its place."""

    def __init__(self, limit: int) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._awaited: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in a thread. Raises what it raises, and HsmTimeout where its thread was abandoned."""
        loop = asyncio.get_running_loop()
        abandoned: asyncio.Future[None] = loop.create_future()

        def noted() -> T:
            thread = threading.get_ident()
            self._awaited[thread] = loop, abandoned
            try:
                return function(*arguments)
            finally:
                self._awaited.pop(thread, None)

        working = asyncio.ensure_future(anyio.to_thread.run_sync(noted, limiter=self._limiter))
        futures: list[asyncio.Future[Any]] = [working, abandoned]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.add_done_callback(_unheard)
            raise HsmTimeout
        return working.result()

    def abandon(self, thread: int) -> None:
        """End the await for this thread's work, if there is one. May be called from any thread."""
        awaited = self._awaited.get(thread)
        if awaited is not None:
            loop, abandoned = awaited
            loop.call_soon_threadsafe(_give_up, abandoned)


def _give_up(abandoned: asyncio.Future[None]) -> None:
    if not abandoned.done():
        abandoned.set_result(None)


def _unheard(working: asyncio.Future[Any]) -> None:
    """Its answer came too late: nobody hears it, and that it failed is no news."""
    if not working.cancelled():
        working.exception()
