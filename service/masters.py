"""The serving token opened beside its database: what it may hold, and what it must hold so that stored keys are not lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine

from keyvault.database import SITE_WIDE, Database, Transaction, see_every_tenant
from keyvault.errors import MasterMissing
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import RingMaster, SiteHsm
from keyvault.hsm_listeners import UNHEARD, Listeners
from keyvault.key_uses import Place
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.records import RecordMac
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.state import NO_ANCHOR, Anchor, SiteState
from keyvault.sync.store import SyncStore, lasting
from service.settings import Settings
from service.site import Site, token_config

POOL_SIZE = 16


def connect(url: str, *, site_wide: bool = False) -> Database:
    """A pool of connections that finds out by itself when the database was restarted.

    `site_wide`: for a process whose work is all tenants'. Any other sees rows of the tenants that its transactions name.
    """
    arguments = {"options": SITE_WIDE} if site_wide else {}
    return create_engine(
        url,
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
        pool_pre_ping=True,
        pool_timeout=4.0,
        hide_parameters=True,
        connect_args=arguments,
    )


@contextmanager
def serving_token(settings: Settings, database: Database, home: Place, listeners: Listeners = UNHEARD) -> Iterator[GuardedHsm]:
    """The serving token, audited and probed: it may hold the masters that a ceremony announced here or that the sites know.

    One master that is gone is for the sites to notice and to repair. A token that holds none of those that stored keys need,
    though nothing says that the database is older than the token, is another token, or an empty one: MasterMissing names the
    version and how many keys need it, and nothing new is made.
    Its keys may be used as from `home`, and as from wherever a thread is `acting`; a refusal stands in the process's log at least.
    Raises HsmUnavailable, PinRejected, PromiseBroken.
    """
    site = Site.load(settings.site_file)
    with lasting(database) as transaction:
        see_every_tenant(transaction)
        store = KeyStore()
        known = store.masters(transaction)
        needed = dict(_needed(transaction, store))
    allowed = sorted({*known, *site.masters})
    config = token_config(settings, "serving", site.tokens["serving"])
    token = Pkcs11Hsm.open(config, settings.serving_pin.read(), expected_masters=allowed, required_masters=(), listeners=listeners)
    hsm = GuardedHsm(token, home, listeners.refused)
    try:
        if _level(database, settings.site, hsm):
            _require_one(needed, hsm.masters())
        yield hsm
    finally:
        hsm.close()


def _needed(transaction: Transaction, store: KeyStore) -> Iterator[tuple[RingMaster, int]]:
    """Masters under which stored keys lie and that were not destroyed, with how many."""
    for ring in store.rings(transaction):
        destroyed = {one.version for one in store.ring_versions(transaction, ring) if one.state is KeyState.DESTROYED}
        for version, count in store.references(transaction, ring).items():
            if version not in destroyed:
                yield RingMaster(ring, version), count


def _level(database: Database, site: str, hsm: SiteHsm) -> bool:
    """Whether the database is as new as the token: an older one, restored, may name masters that are gone for good reason."""
    with lasting(database) as transaction:
        stored = SyncStore(RecordMac(hsm)).state(transaction, site)
    if stored is None:
        return True
    state, known = SiteState.decode(stored), (Anchor.decode(value) for value in hsm.anchors())
    return state.recovering is None and max(known, key=lambda one: one.rank, default=NO_ANCHOR).rank <= state.anchor.rank


def _require_one(needed: dict[RingMaster, int], held: tuple[RingMaster, ...]) -> None:
    if needed and not needed.keys() & set(held):
        said = ", ".join(f"{master.label} (under which {count} stored keys lie)" for master, count in sorted(needed.items()))
        raise MasterMissing(f"this token does not hold {said}")
