"""Start one edge worker on the listening socket that the supervisor hands over."""

from __future__ import annotations

import asyncio
import os
import socket

from uvicorn import Server

from service.edge.app import create_app
from service.edge.tls import server_config
from service.isolation import harden_process
from service.logs import configure_logging
from service.settings import Settings


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging("edge", settings.log_level)
    harden_process()
    listener = socket.socket(fileno=settings.listen_fd)
    config = server_config(create_app(settings.vault_sockets), settings.tls_dir, log_config=None, access_log=False)
    asyncio.run(Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
