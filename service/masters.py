"""The serving token opened beside its database: what it may hold, and what it must hold so that stored keys are not lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine

from keyvault.database import Database
from keyvault.errors import MasterMissing
from keyvault.hsm import RingMaster
from keyvault.hsm_listeners import UNHEARD, Listeners
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.store import KeyStore
from keyvault.sync.store import lasting
from service.settings import Settings
from service.site import Site, token_config

POOL_SIZE = 16


def connect(url: str) -> Database:
    """A pool of connections that finds out by itself when the database was restarted."""
    return create_engine(url, pool_size=POOL_SIZE, max_overflow=POOL_SIZE, pool_pre_ping=True, pool_timeout=4.0)


@contextmanager
def serving_token(settings: Settings, database: Database, listeners: Listeners = UNHEARD) -> Iterator[Pkcs11Hsm]:
    """The serving token, audited and probed: it may hold the masters that a ceremony announced here or that the sites know.

    One master that is gone is for the sites to notice and to repair. A token that holds none of those that stored keys need
    is another token, or an empty one: MasterMissing names the version and how many keys need it, and nothing new is made.
    Raises HsmUnavailable, PinRejected, PromiseBroken.
    """
    site = Site.load(settings.site_file)
    with lasting(database) as transaction:
        store = KeyStore()
        known = store.masters(transaction)
        needed = {
            RingMaster(ring, version): count
            for ring in store.rings(transaction)
            for version, count in store.references(transaction, ring).items()
        }
    allowed = sorted({*known, *site.masters})
    config = token_config(settings, "serving", site.tokens["serving"])
    hsm = Pkcs11Hsm.open(config, settings.serving_pin.read(), expected_masters=allowed, required_masters=(), listeners=listeners)
    try:
        _require_one(needed, hsm.masters())
        yield hsm
    finally:
        hsm.close()


def _require_one(needed: dict[RingMaster, int], held: tuple[RingMaster, ...]) -> None:
    if needed and not needed.keys() & set(held):
        said = ", ".join(f"{master.label} (under which {count} stored keys lie)" for master, count in sorted(needed.items()))
        raise MasterMissing(f"this token does not hold {said}")
