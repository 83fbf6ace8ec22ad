"""Start the log process: its token, its database role, its own copy of the newest checkpoint."""

from __future__ import annotations

import os

from keyvault.breaker import unheard
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import SiteHsm
from keyvault.key_uses import Place
from keyvault.pkcs11_hsm import Pkcs11Hsm
from policies.audit.checkpoint import HandOvers, LastCheckpoint
from policies.audit.sequencer import Sequencer
from service.isolation import harden_process
from service.log.keys import CheckpointKeys
from service.log.process import Wait, engine, run, stopping
from service.logs import configure_logging
from service.settings import Settings
from service.site import Site, token_config


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging("log", settings.log_level)
    harden_process()
    site = Site.load(settings.site_file)
    with stopping() as wait:  # before the token's own threads start: a signal must find none that would end the process
        token = Pkcs11Hsm.open(token_config(settings, "log", site.tokens["log"]), settings.log_pin.read(), expected_masters=())
        try:
            _log(settings, site, GuardedHsm(token, Place.LOG, unheard), wait)
        finally:
            token.close()


def _log(settings: Settings, site: Site, hsm: SiteHsm, wait: Wait) -> None:
    database, last = engine(settings.role_url("log")), LastCheckpoint(settings.checkpoint_file)
    keys = CheckpointKeys(hsm, site.audit_key, HandOvers(settings.hand_overs_file), last)

    def sequencer() -> Sequencer:
        keys.follow()
        return Sequencer(database, site.audit_key, keys.sign, last, handed=keys.handed)

    run(sequencer, wait, keys.outdated)


if __name__ == "__main__":
    main()
