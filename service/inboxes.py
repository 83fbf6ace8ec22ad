"""Officers' approvals of this site, for a process that is not the site process but acts on what they approved."""

from __future__ import annotations

from datetime import UTC, datetime

from keyvault.database import Database
from keyvault.hsm import Hsm, KeyName
from keyvault.inbox import Inbox, InboxParts
from keyvault.records import RecordMac
from keyvault.sync.roster import Roster, machine
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import SiteState
from keyvault.sync.store import SyncStore
from policies.audit.store import AuditStore
from policies.store import durable
from service.key_events import KeyEventRecorder
from service.officers import read_roster
from service.settings import Settings


def roster_in_force(settings: Settings, database: Database, hsm: Hsm) -> Roster:
    """The roster in force; before the site process began, the one that it will begin with."""
    with durable(database) as transaction:
        state = SyncStore(RecordMac(hsm)).state(transaction, settings.site)
    return SiteState.decode(state).ledger.roster if state else read_roster(settings.roster_file)


def inbox_of(settings: Settings, database: Database, hsm: Hsm, audit: AuditStore, roster: Roster) -> Inbox:
    """The requests and signatures in this site's database; what is filed here is filed in the site's name."""
    return Inbox(
        InboxParts(
            database=database,
            recorder=KeyEventRecorder(audit),
            roster=lambda: roster,
            requester=machine(settings.site),
            sign=lambda data: hsm.sign(KeyName.SITE_IDENTITY, data),
            verify=verify_p256,
            clock=inbox_now,
        )
    )


def inbox_now() -> datetime:
    """The time by which approvals hold or are over."""
    return datetime.now(UTC)
