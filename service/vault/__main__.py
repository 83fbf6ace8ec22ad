"""Start one vault worker on the Unix socket that the supervisor hands over."""

from __future__ import annotations

import os
import socket
import time

from keyvault.hsm_listeners import Listeners
from service.isolation import harden_process
from service.logs import configure_logging
from service.settings import Settings
from service.vault.hsm_events import HsmEvents
from service.vault.http import THREADS, create_app
from service.vault.leaving import Leaving, serve
from service.vault.sweep import sweeping
from service.vault.threads import Threads
from service.wiring import vault


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging(f"vault-{settings.worker}", settings.log_level)
    harden_process()
    threads, leaving, events = Threads(THREADS), Leaving(settings.supervisor_fd), HsmEvents()
    listeners = Listeners(events.hear, threads.abandon, leaving.ask, settings.vault_openings, events.hear)
    with vault(settings, listeners, events) as uses, sweeping(uses.database, uses.store, time.time):
        serve(create_app(uses, threads), socket.socket(fileno=settings.listen_fd), leaving)


if __name__ == "__main__":
    main()
