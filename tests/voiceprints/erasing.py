"""A small vault that can erase and seal again, with the real audit log beside it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy as sa
from vault import SmallVault

from keyvault.database import metadata
from keyvault.hsm import KeyName
from keyvault.keys import VoiceKeys
from keyvault.records import RecordMac, RingVersion
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.roster import Roster, SiteKey
from keyvault.tombstones import Tombstones
from policies.audit.details import Details
from policies.audit.store import AuditStore
from policies.grants import MaintenanceGrant
from policies.store import PolicyStore
from service.key_events import KeyEventRecorder
from voiceprints.erasure import Erased, Erasure
from voiceprints.opening import OpenVoices
from voiceprints.resealing import Resealing


class ErasingVault:
    """`small` with its key events in a real log, and the use cases of erasure over it."""

    def __init__(self, small: SmallVault, *, alone: bool = True) -> None:
        self.small, self.database, self.hsm = small, small.database, small.hsm
        self.mac = RecordMac(small.hsm)
        self.audit = AuditStore(small.database, small.hsm)
        recorder = KeyEventRecorder(self.audit)
        small.keys = VoiceKeys(small.hsm, KeyStore(), recorder, self.mac)
        small.enrolment = small.enrolling()
        small.voices = OpenVoices(database=small.database, keys=small.keys, memory=small.memory, clock=small.clock)
        self.policies = PolicyStore(self.mac)
        self.tombstones = Tombstones(self.mac, recorder)
        self.erasure = Erasure(
            tombstones=self.tombstones,
            policies=self.policies,
            registry=small.registry,
            details=Details(small.hsm),
            recorder=recorder,
            alone=alone,
            clock=small.clock,
        )
        self.resealing = Resealing(
            database=small.database,
            keys=small.keys,
            tombstones=self.tombstones,
            policies=self.policies,
            recorder=recorder,
            memory=small.memory,
            clock=small.clock,
        )
        self.roster = Roster("c", 1, (SiteKey("a", "1", small.hsm.public_key(KeyName.SITE_IDENTITY)),), (), 0)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.small.now, UTC)

    def erase(self, voice: UUID, **options: object) -> Erased:
        with self.database.begin() as transaction:
            return self.erasure.erase(transaction, voice, **options)

    def grant(self, *voices: UUID) -> MaintenanceGrant:
        return MaintenanceGrant.development(self.roster, "job", voices, now=self.now())

    def set_ring(self, version: int, state: KeyState, **values: object) -> None:
        """Write the state of a ring version as the site process would."""
        store = KeyStore()
        with self.database.begin() as transaction:
            known = {found.version: found for found in store.ring_versions(transaction, "main")}
            old = known.get(version)
            new = replace(old or RingVersion("main", version, state, self.now()), state=state, **values)
            new = replace(new, row_version=old.row_version + 1 if old else 1)
            new = replace(new, mac=self.mac.make(RingVersion.DOMAIN, *new.fields))
            if old:
                store.replace_ring_version(transaction, old, new)
            else:
                store.add_ring_version(transaction, new)

    def holding(self, *needles: bytes | str) -> set[str]:
        """The tables in which any of these stands, in any column of any row."""
        found = set()
        with self.database.connect() as connection:
            for table in metadata.sorted_tables:
                for row in connection.execute(sa.select(table)):
                    cells = b"\n".join(_bytes(cell) for cell in row)
                    if any(_bytes(needle) in cells for needle in needles):
                        found.add(table.name)
        return found

    def edit(self, statement: str, **values: object) -> None:
        with self.database.begin() as transaction:
            transaction.execute(sa.text(statement), values)


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
