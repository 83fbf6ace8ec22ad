"""Start the log process: its token, its database role, its own copy of the newest checkpoint."""

from __future__ import annotations

import os

from keyvault.breaker import unheard
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import KeyName
from keyvault.key_uses import Place
from keyvault.pkcs11_hsm import Pkcs11Hsm
from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.sequencer import Sequencer
from service.isolation import harden_process
from service.log.process import engine, run, stopping
from service.logs import configure_logging
from service.settings import Settings
from service.site import Site, token_config


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging("log", settings.log_level)
    harden_process()
    site = Site.load(settings.site_file)
    token = Pkcs11Hsm.open(token_config(settings, "log", site.tokens["log"]), settings.log_pin.read(), expected_masters=())
    hsm = GuardedHsm(token, Place.LOG, unheard)
    try:
        key = verifier_key(site.origin, hsm.public_key(KeyName.CHECKPOINT_SIGNER))
        database, last = engine(settings.role_url("log")), LastCheckpoint(settings.checkpoint_file)
        with stopping() as wait:
            run(lambda: Sequencer(database, key, lambda data: hsm.sign(KeyName.CHECKPOINT_SIGNER, data), last), wait)
    finally:
        hsm.close()


if __name__ == "__main__":
    main()
