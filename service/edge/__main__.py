"""Start one edge worker on the listening socket that the supervisor hands over: TLS on a TCP socket, none on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from typing import Any

from uvicorn import Config, Server

from service.edge.app import create_app
from service.edge.authorities import Authorities
from service.edge.proxied import ProxiedCertificate
from service.edge.self_test import require_client_certificates
from service.edge.tls import server_config, unix_config
from service.isolation import harden_process
from service.logs import configure_logging
from service.refusal_counts import RefusalCounts
from service.settings import Settings


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging("edge", settings.log_level)
    harden_process()
    listener = socket.socket(fileno=settings.listen_fd)
    asyncio.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> None:
    if listener.family != socket.AF_UNIX:
        await require_client_certificates()
    await Server(_config(settings, listener)).serve(sockets=[listener])


def _config(settings: Settings, listener: socket.socket) -> Config:
    authorities, counts = Authorities(settings.tls_dir), RefusalCounts(time.time)
    callers = partial(ProxiedCertificate, authorities=authorities, proxies=settings.proxies, count=counts.count)
    app = create_app(settings.vault_sockets, callers, origins=settings.origins)
    quiet: dict[str, Any] = {"log_config": None, "access_log": False}
    if listener.family == socket.AF_UNIX:
        return unix_config(app, **quiet)
    return server_config(app, settings.tls_dir, factory=authorities.context_factory(), **quiet)


if __name__ == "__main__":
    main()
