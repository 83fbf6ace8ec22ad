"""Builds every object of the site process, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from keyvault.database import Database
from keyvault.hsm import SiteHsm
from keyvault.hsm_listeners import Listeners
from keyvault.inbox import Inbox
from keyvault.key_uses import Place
from keyvault.records import RecordMac
from keyvault.sync.batches import Batches
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.durable import SiteParts
from keyvault.sync.errors import SiteUnfounded
from keyvault.sync.node import SiteNode
from keyvault.sync.peer import RemotePeer
from keyvault.sync.rows import Rows
from policies.audit.details import Details
from policies.audit.store import AuditStore
from policies.store import PolicyStore
from policies.witness.cosigning import Cosigning, Witness
from service.approving import ApprovalCommands, site_inbox
from service.authority_rows import AuthorityRows
from service.client_approvals import ClientApprovals
from service.client_commands import ClientCommands
from service.detail_exports import DetailCommands
from service.key_events import KeyEventRecorder
from service.keys import DrivenMasters, KeyCommands, KeyParts
from service.masters import connect, serving_token
from service.officers import read_roster
from service.policy_sets import ActiveSet, PolicyCommands
from service.registration import Registration
from service.replication import VoiceRows
from service.settings import Settings
from service.signing import SignerCommands
from service.site import Site, rotation_holds
from service.sites import link_name, read_history
from service.sync.link import HttpsLink, NoLink
from service.vault.hsm_events import HsmEvents


@dataclass(frozen=True)
class SiteService:
    """One site at work: its node, and what drives it. `peer` is None in a cluster of one site."""

    settings: Settings
    database: Database
    hsm: SiteHsm
    node: SiteNode
    peer: RemotePeer | None
    coordinator: Coordinator
    batches: Batches
    rows: Rows
    inbox: Inbox
    witness: Witness
    driving: AbstractContextManager[object] = field(default_factory=threading.RLock, repr=False)
    """Held by whatever drives both sites from here: two at once would only get into each other's way."""

    def keys(self) -> KeyCommands:
        """The commands on master versions, and what falls due for them."""
        masters = DrivenMasters(self.coordinator, self.driving, self.inbox.done)
        parts = KeyParts(
            database=self.database,
            hsm=self.hsm,
            recorder=self.node.parts.recorder,
            masters=masters,
            officers=self.inbox,
            cluster=self.node.ledger.roster.cluster,
            least_delay=timedelta(hours=self.settings.destroy_delay_hours),
        )
        return KeyCommands(parts)

    def signers(self) -> SignerCommands:
        """The commands on signing keys, and what falls due for them."""
        return SignerCommands(self.database, self.hsm, self.node.parts.recorder, timedelta(days=self.settings.signer_days))

    def approvals(self) -> ApprovalCommands:
        """The commands on officers' requests."""
        return ApprovalCommands(self.inbox, self.node, self.coordinator, self.driving)

    def clients(self) -> ClientCommands:
        """The commands on clients."""
        audit, store = AuditStore(self.database, self.hsm), PolicyStore(RecordMac(self.hsm))
        active = ActiveSet(self.hsm, self.settings.site, self.settings.roster_file)

        def registration() -> Registration:
            officers = ClientApprovals(self.database, active, self.inbox, self.node.ledger.roster, self.settings.site)
            return Registration(self.database, store, audit, officers)

        return ClientCommands(registration, self.settings.origins)

    def cosigning(self, peer: RemotePeer) -> Cosigning:
        """This site's log as it is shown to the other site."""
        return Cosigning(self.node, peer, Site.load(self.settings.site_file).audit_key)

    def details(self) -> DetailCommands:
        """The commands on the audit log's sealed details."""
        return DetailCommands(self.inbox, self.node, self.database, self.hsm, Site.load(self.settings.site_file).audit_key)

    def policies(self) -> PolicyCommands:
        """The commands on sets of policies."""
        return PolicyCommands(self.inbox, self.node, ActiveSet(self.hsm, self.settings.site, self.settings.roster_file))

    @property
    def peer_certificate_name(self) -> str:
        """The one name whose certificate this site answers; empty where there is no other site."""
        return link_name(self.peer.name, self.node.ledger.roster.cluster) if self.peer else ""


@contextmanager
def site_service(settings: Settings) -> Iterator[SiteService]:
    """Open token and database and go on where this site stopped; a new one begins from the roster in its folder, and from the
    cluster's history where it came in later.

    Raises HsmUnavailable, PinRejected, MasterMissing, TokenForeign, StoreRolledBack, TokenRolledBack: nothing is changed then.
    """
    database = connect(settings.role_url("vault"), site_wide=True)
    try:
        events = HsmEvents()
        with serving_token(settings, database, Place.SITE, Listeners(refused=events.hear)) as hsm:
            serial = Site.load(settings.site_file).tokens["serving"].serial
            recorder = KeyEventRecorder(AuditStore(database, hsm))
            parts = SiteParts(settings.site, serial, hsm, database, recorder, _now, partial(rotation_holds, settings))
            with events.writing(database, recorder):
                yield _service(settings, parts, hsm)
    finally:
        database.dispose()


def _service(settings: Settings, parts: SiteParts, hsm: SiteHsm) -> SiteService:
    try:
        node = SiteNode.open(parts)
    except SiteUnfounded:
        roster, history = read_roster(settings.roster_file), read_history(settings)
        node = SiteNode.join(parts, roster, history) if history else SiteNode.found(parts, roster)
    peer = _peer(settings, node)
    store = PolicyStore(RecordMac(hsm))
    batches, rows = Batches(node, peer, VoiceRows(store, Details(hsm))), Rows(node, peer, AuthorityRows(store))
    coordinator, inbox = Coordinator(node, peer, _now), site_inbox(node)
    return SiteService(settings, parts.database, hsm, node, peer, coordinator, batches, rows, inbox, Witness(node))


def _peer(settings: Settings, node: SiteNode) -> RemotePeer | None:
    roster = node.ledger.roster
    names = roster.peers(settings.site)
    if not names:
        return None
    if settings.peer_url is None:
        return RemotePeer(names[0], NoLink())
    return RemotePeer(names[0], HttpsLink(settings.peer_url, settings.link_dir, link_name(names[0], roster.cluster)))


def _now() -> datetime:
    return datetime.now(UTC)
