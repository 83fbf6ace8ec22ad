"""Start the site process on the sockets that the supervisor hands over: the operator's, and the other site's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial

from uvicorn import Config, Server

from keyvault.key_uses import Place, acting
from keyvault.sync.peer import serve
from service.isolation import harden_process
from service.logs import configure_logging
from service.settings import Settings
from service.sync import http, operator
from service.sync.assembly import SiteService, site_service
from service.sync.commands import Commands
from service.sync.tasks import tasks
from service.sync.work import working


class _Quiet(Server):
    """A server that leaves signals to us: two of them run in one loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: Settings, site: SiteService) -> None:
    commands = Commands(site)
    desk = operator.create_app(commands.calls(), commands.ready)
    servers = [(_Quiet(Config(desk, log_config=None, access_log=False, lifespan="off")), settings.listen_fd)]
    if settings.peer_fd is not None and site.peer is not None:
        answer = partial(serve, site.node, site.batches, rows=site.rows, witness=site.witness)
        app = http.create_app(acting(Place.SITE_PEER)(answer), site.peer_certificate_name)
        servers.append((_Quiet(http.config(app, settings.link_dir)), settings.peer_fd))

    def stop() -> None:
        for server, _ in servers:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await asyncio.gather(*(server.serve(sockets=[socket.socket(fileno=descriptor)]) for server, descriptor in servers))


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging("site", settings.log_level)
    harden_process()
    with site_service(settings) as site, working(tasks(site)):
        asyncio.run(_serve(settings, site))


if __name__ == "__main__":
    main()
