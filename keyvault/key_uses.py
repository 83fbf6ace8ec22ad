"""What each key in a token may be used for, and from where: data beside `templates.py`, enforced by `guarded_hsm.py`.

The token itself allows a key one mechanism and no more. This table narrows that to places: the code that compares voices has no
business with the token signer, although both stand in one token under one login. A place is what a process does at the moment:
its start and background work, or the route, command or message that it is answering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

from keyvault.hsm import KeyName


class Use(StrEnum):
    """What may be asked of a key. Reading what is public (names, public halves, attributes) is no use of it."""

    MAC = "mac"
    SIGN = "sign"
    SEAL = "seal"
    UNSEAL = "unseal"
    WRAP = "wrap"
    """Make a voice's key and wrap it: the key seals until the block ends."""
    OPEN = "open"
    """Unwrap a voice's key: it opens until the block ends."""
    REWRAP = "rewrap"
    PROVE = "prove"
    """MACs by keys under a master, which show another site that both hold the same."""
    MAKE = "make"
    DESTROY = "destroy"
    WRITE = "write"


class Place(StrEnum):
    """Where a process is. Those of a process's own are what it does outside any request."""

    VAULT = "vault"  # a worker's start, its sweeping, and the events that it writes down
    READYZ = "vault.readyz"
    JWKS = "vault.jwks"
    TOKEN = "vault.token"  # noqa: S105 — a place
    CONSENT = "vault.consent"
    TICKET = "vault.ticket"
    BROWSER = "vault.browser"
    ENROL = "vault.enrol"
    READ = "vault.read"
    ERASE = "vault.erase"
    COMPARE = "vault.compare"
    LIVENESS = "vault.liveness"  # giving digits out; whoever hears them compares
    APPROVE = "vault.approve"
    SPEAK = "vault.speak"
    SITE = "site"  # the site process's start and background work
    SITE_COMMAND = "site.command"
    SITE_SIGNERS = "site.signers"  # the commands about signing keys, and what falls due for them
    SITE_DETAILS = "site.details"
    SITE_PEER = "site.peer"
    CLIENTS = "site.clients"
    VOICES = "step.voices"
    REKEY = "step.rekey"
    REWRAP = "step.rewrap"
    AUDIT = "step.audit"
    RESTORE = "step.restore"
    PROBE = "step.probe"
    AUTHORITY = "step.authority"
    LOG_KEY = "step.log-key"
    LOG = "log"


RING_MASTER = "ring-master"
"""Every version of every ring's master: what differs between them is their state, not their use."""
SYNC_ANCHOR = "sync-anchor"

_SITE = frozenset({Place.SITE, Place.SITE_COMMAND, Place.SITE_PEER})
_ROWS = frozenset(Place) - {Place.PROBE, Place.AUTHORITY, Place.LOG_KEY, Place.LOG}
"""Wherever rows are read or written: each carries a MAC."""
_RECORDS = _ROWS - {Place.READYZ, Place.JWKS}
"""Wherever something is written into the audit log."""
_SIGNERS = dict.fromkeys((Use.MAKE, Use.DESTROY), frozenset({Place.SITE_SIGNERS}))

USES: Mapping[str, Mapping[Use, frozenset[Place]]] = {
    KeyName.RECORD_MAC: {Use.MAC: _ROWS},
    KeyName.AUDIT_PSEUDONYM: {Use.MAC: _RECORDS},
    KeyName.AUDIT_DETAIL: {Use.SEAL: _RECORDS, Use.UNSEAL: frozenset({Place.VOICES, Place.SITE_DETAILS})},
    KeyName.TOKEN_SIGNER: {Use.SIGN: frozenset({Place.TOKEN}), **_SIGNERS},
    KeyName.PROVENANCE_SIGNER: _SIGNERS,  # nothing signs with it so far
    KeyName.SITE_IDENTITY: {Use.SIGN: _SITE | {Place.SITE_DETAILS, Place.VOICES, Place.REKEY, Place.CLIENTS, Place.RESTORE}},
    KeyName.CHECKPOINT_SIGNER: {
        Use.SIGN: frozenset({Place.LOG}),
        Use.MAKE: frozenset({Place.LOG_KEY}),
        Use.DESTROY: frozenset({Place.LOG}),
    },
    KeyName.CERTIFICATE_AUTHORITY: {Use.SIGN: frozenset({Place.AUTHORITY})},
    RING_MASTER: {
        Use.WRAP: frozenset({Place.ENROL, Place.REKEY, Place.REWRAP, Place.SITE, Place.READYZ, Place.PROBE}),
        Use.OPEN: frozenset({Place.SPEAK, Place.COMPARE, Place.REKEY, Place.READYZ, Place.PROBE}),
        Use.REWRAP: frozenset({Place.REWRAP, Place.SITE}),
        Use.PROVE: _SITE,
        Use.DESTROY: _SITE,
    },
    SYNC_ANCHOR: {Use.WRITE: _SITE | {Place.RESTORE}},
}
"""Key, use, places. What does not stand here is refused before the token is asked."""

_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def acting(place: Place) -> Iterator[None]:
    """Within the block this thread or task, and what it starts in copies of its context, is at `place`. Also a decorator."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def current_place() -> Place | None:
    """Where this thread or task is; None outside every `acting`."""
    return _place.get()


def allowed(key: str, use: Use, place: Place) -> bool:
    """Whether this use of this key may be asked for from there."""
    return place in USES.get(key, {}).get(use, frozenset())
