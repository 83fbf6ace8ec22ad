"""Start one vault worker on the Unix socket that the supervisor hands over."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from uvicorn import Config, Server

from service.isolation import harden_process
from service.logs import configure_logging
from service.settings import Settings
from service.vault.http import create_app
from service.vault.sweep import sweeping
from service.wiring import vault


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging(f"vault-{settings.worker}", settings.log_level)
    harden_process()
    with vault(settings) as uses, sweeping(uses.database, uses.store, time.time):
        listener = socket.socket(fileno=settings.listen_fd)
        config = Config(create_app(uses), log_config=None, access_log=False, ws="none", server_header=False, lifespan="off")
        asyncio.run(Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
