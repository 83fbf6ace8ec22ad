"""Officers' approvals of this site, for a process that is not the site process but acts on what they approved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from keyvault.approval_kinds import Facts, Kind, Request, described
from keyvault.approvals import Operation, signed_by
from keyvault.database import Database
from keyvault.hsm import Hsm, KeyName
from keyvault.inbox import Inbox, InboxParts
from keyvault.lifecycle import APPROVALS_LAST
from keyvault.records import RecordMac
from keyvault.sync.durable import SiteParts
from keyvault.sync.errors import ApprovalInvalid
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


def asked_by_site(parts: SiteParts, cluster: str, kind: Kind, subject: bytes, facts: Facts) -> Request:
    """A request in this site's name, signed by its HSM, which is not filed in its inbox: its store is what is in question."""
    name, until = machine(parts.name), parts.clock() + APPROVALS_LAST
    operation = Operation(cluster, kind.value, subject, name, os.urandom(16), until)
    asked = signed_by(operation, name, "request", lambda data: parts.hsm.sign(KeyName.SITE_IDENTITY, data))
    return Request(operation, described(facts), (asked,))


def joined(copies: Sequence[Request]) -> Request:
    """One request with the signatures that its copies came back with, one for each person and role.

    Raises ApprovalInvalid where there is no copy, or where they are copies of different requests.
    """
    if not copies or any(one.operation != copies[0].operation for one in copies):
        raise ApprovalInvalid("the files are of different requests: let every officer sign the same file")
    signed = {(one.role, one.person): one for request in copies for one in request.approvals}
    return replace(copies[0], approvals=tuple(signed.values()))


def inbox_now() -> datetime:
    """The time by which approvals hold or are over."""
    return datetime.now(UTC)
