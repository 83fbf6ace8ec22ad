"""One site's protocol state over its real store and token: a step is durable, in the order it asks for, before anybody hears.

The store's writes between two moves of the anchor are one transaction, and so is the record of what happened: what is not
recorded does not happen. A step that was cut off leaves nothing in memory; the next call loads what became durable, mends
what a crash cut off, and goes on from there. Another process of the same site may step too: compare-and-swap decides, and
whoever loses loads again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from keyvault.approvals import Approval, Operation
from keyvault.database import Database, Transaction
from keyvault.errors import RecordTampered, RowChanged
from keyvault.events import KeyEvent, Recorder
from keyvault.hsm import KeyName, RingMaster, SiteHsm
from keyvault.records import RecordMac
from keyvault.rings import Rings
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync import steps
from keyvault.sync.errors import Conflict, SiteUnfounded, SyncRefused, TokenForeign
from keyvault.sync.journal import events
from keyvault.sync.mirror import VOIDED, WAITING, Mirror
from keyvault.sync.protocol import Site, Step
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import (
    NO_ANCHOR,
    AdvanceAnchor,
    Anchor,
    ChangeState,
    Discard,
    Effect,
    FileCertificate,
    InstallPreActive,
    RecordEvidence,
    SaveState,
    SiteState,
)
from keyvault.sync.statement import Certificate
from keyvault.sync.store import SyncStore, lasting, reading


@dataclass(frozen=True)
class SiteParts:
    """What a site is made of. `serial` is the serial number of the token that `hsm` opened; `clock` tells the time, in UTC."""

    name: str
    serial: str
    hsm: SiteHsm
    database: Database
    recorder: Recorder
    clock: Callable[[], datetime]
    rotation_holds: Callable[[RingMaster], bool] = lambda _: False
    """Whether this site has another token that holds a version too, as a re-wrap without TRUSTED masters needs."""


class DurableSite:
    """A `Site` that survives. Methods may be called from any thread; each step runs alone."""

    def __init__(self, parts: SiteParts) -> None:
        mac = RecordMac(parts.hsm)
        self.parts, self.store, self.keys = parts, SyncStore(mac), KeyStore()
        self.rings = Rings(parts.hsm, self.keys, parts.recorder, mac)
        self.lock = threading.RLock()
        self._site: Site | None = None

    def anchor(self) -> Anchor:
        """The highest anchor in the token: a crash may have left the one before it too."""
        known = (Anchor.decode(value) for value in self.parts.hsm.anchors())
        return max(known, key=lambda anchor: anchor.rank, default=NO_ANCHOR)

    # --- how it begins

    def found(self, roster: Roster) -> None:
        """Begin a new cluster from the pinned roster. Raises TokenRolledBack, TokenForeign, Conflict if a state is there."""
        self._require_token(roster)
        self._begin(steps.found(roster, self.parts.name, self.anchor()))

    def join(self, roster: Roster, certificates: Sequence[bytes]) -> None:
        """Begin as a replacement site, from the pinned roster and the whole history. Raises what `steps.join` raises."""
        change = steps.join(roster, self.parts.name, certificates, self.anchor(), verify_p256)
        self._require_token(change[0].ledger.roster)
        filed = tuple(FileCertificate(Certificate.decode(certificate).epoch, certificate) for certificate in certificates)
        self._begin((change[0], (*filed, *change[1])))

    def load(self) -> None:
        """Go on from what is durable, and compare the table with the token.

        Raises SiteUnfounded, TokenForeign, RecordTampered, StoreRolledBack, TokenRolledBack: nothing is served then.
        """
        with self.lock:
            self._site = None
            data = self._stored()
            state, effects = steps.load(data, self.anchor())
            self._begin((state, effects))
            with reading(self.parts.database) as transaction:
                filed = self.store.certificates(transaction, state.ledger.epoch)
            for certificate in filed:
                self._accept(certificate)
            self.do(lambda site: site.inspect(self.parts.hsm.held()))

    def check(self) -> None:
        """As `load`, for a process that goes on: what it heard and its nonce stay, unless another process stepped."""
        with self.lock:
            state = self.current().state
            _, effects = steps.load(self._stored(), self.anchor())
            held = self.parts.hsm.held()
            # What ended is looked for in the token at every start; a process that goes on sees by `held` that it is gone.
            self._carry(state, state, [effect for effect in effects if set(_ended(effect)) <= held.keys()])
            self.do(lambda site: site.inspect(held))

    def close_now(self, names: Iterable[str], reason: str) -> None:
        """Let versions in quarantine open nothing here either: reported as compromised, before the sites have agreed on it."""
        with self.lock, lasting(self.parts.database) as transaction:
            mirror = self._mirror(transaction)
            for name in names:
                mirror.write(name, KeyState.COMPROMISED, reason)

    def expect(self, master: RingMaster) -> None:
        """Enter a version that this site has never known as PRE_ACTIVE. Idempotent."""
        with self.lock, lasting(self.parts.database) as transaction:
            if all(row.version != master.version for row in self.rings.versions(transaction, master.ring)):
                self._mirror(transaction).write(master.label, KeyState.PRE_ACTIVATION, WAITING)

    def discard(self, master: RingMaster) -> None:
        """End a version that waits and that no table and no vote knows. Raises SyncRefused."""
        with self.lock:
            state = self.current().state
            if master.label in {record.name for record in (*state.ledger.records, *state.pre_active)}:
                raise SyncRefused(f"{master.label} is agreed or voted for; it ends by a transaction")
            self._write(state, state, [Discard(master.label)])

    def reported(self, transaction: Transaction) -> dict[str, str]:
        """Versions that `close_now` closed and the sites have not agreed on yet, with the reasons."""
        state = self.current().state
        agreed = {record.name: record.state for record in state.ledger.records}
        rows = [row for row in self.rings.all_versions(transaction) if row.state is KeyState.COMPROMISED]
        closed = {RingMaster(row.ring, row.version).label: row.reason for row in rows}
        ended = (KeyState.COMPROMISED, KeyState.DESTROYED)
        return {name: why for name, why in closed.items() if name in state.quarantined and agreed[name] not in ended}

    def adoption_subject(self) -> bytes:
        """What officers approve, as `steps.ADOPT`, before this store and this token are used together."""
        return self.adoption_state().digest

    def adoption_state(self) -> SiteState:
        """The stored state, recovering to the anchor that the token holds: its digest is the subject of an adoption."""
        return replace(SiteState.decode(self._stored()), recovering=self.anchor())

    def adopt(self, operation: Operation, approvals: Sequence[Approval]) -> None:
        """Use a restored store or token by the officers' approval of exactly this pair; then compare it with the token."""
        with self.lock:
            self._site = None
            data, anchor = self._stored(), self.anchor()
            before = SiteState.decode(data)
            change = steps.adopt(data, anchor, operation, approvals, verify_p256, self.parts.clock())
            facts: dict[str, str | int] = {"site": self.parts.name, "epoch": before.ledger.epoch, "anchor": anchor.epoch}
            with lasting(self.parts.database) as transaction:
                event = KeyEvent("sync.adopted", {**facts, "operation": operation.digest.hex()})
                self.parts.recorder.record(transaction, event)
            self._begin(change, before)
            self.do(lambda site: site.inspect(self.parts.hsm.held()))

    # --- how it steps

    def current(self) -> Site:
        """The site as it is durable now: loaded again if another process stepped."""
        with self.lock:
            if self._site is not None:
                with reading(self.parts.database) as transaction:
                    if self.store.state(transaction, self.parts.name) != self._site.state.encode():
                        self._site = None
            if self._site is None:
                self.load()
            assert self._site is not None
            return self._site

    def do(self, method: Callable[[Site], Step]) -> bytes:
        """Take one step: effects, then the new site, then the reply. Raises Conflict if another process stepped first."""
        with self.lock:
            site = self.current()
            step = method(site)
            self._carry(site.state, step.site.state, step.effects)
            self._site = step.site
            return step.reply

    def challenge(self) -> bytes:
        """A fresh nonce: what the other site's next status, and the next proof, must contain."""
        with self.lock:
            self._site = self.current().challenge(self.parts.hsm.random(32))
            return self._site.nonce

    def serve(self, more: Iterable[RingMaster] = ()) -> None:
        """Let this process's token serve with what it holds: every version that may be there, and `more` that is proposed."""
        with reading(self.parts.database) as transaction:
            known = self.rings.known(transaction)
        self.parts.hsm.refresh(sorted({*known, *more}), ())

    # --- what every beginning and step shares

    def _begin(self, change: steps.Change, before: SiteState | None = None) -> None:
        state, effects = change
        with self.lock:
            self._carry(before, state, effects)
            self._site = Site(state, lambda data: self.parts.hsm.sign(KeyName.SITE_IDENTITY, data), verify_p256)

    def _accept(self, certificate: bytes) -> None:
        self.do(lambda site: site.accept(certificate))

    def _stored(self) -> bytes:
        with reading(self.parts.database) as transaction:
            unchecked = self.store.unchecked_state(transaction, self.parts.name)
            if unchecked is None:
                raise SiteUnfounded
            try:
                data = self.store.state(transaction, self.parts.name)
            except RecordTampered:
                self._require_token(SiteState.decode(unchecked).ledger.roster)  # another token has another MAC key
                raise
        assert data is not None
        self._require_token(SiteState.decode(data).ledger.roster)
        return data

    def _require_token(self, roster: Roster) -> None:
        """The roster names this site by this token, or does not name it any more."""
        for site in roster.sites:
            if site.name == self.parts.name:
                if site.token_serial != self.parts.serial:
                    raise TokenForeign(
                        f"the roster names token {site.token_serial} for site {site.name}, and this is {self.parts.serial}"
                    )
                if site.public_key != self.parts.hsm.public_key(KeyName.SITE_IDENTITY):
                    raise TokenForeign(f"the token of site {site.name} does not hold the identity key that the roster names")

    def _carry(self, before: SiteState | None, after: SiteState, effects: Sequence[Effect]) -> None:
        """Make the effects durable, each before the next."""
        freed = set(before.quarantined if before else ()) - set(after.quarantined)
        states = {record.name: record.state for record in after.ledger.records}
        freed_effects = tuple(ChangeState(name, states[name]) for name in sorted(freed) if name in states)
        run: list[Effect] = []
        try:
            for effect in (*effects, *freed_effects):
                if isinstance(effect, AdvanceAnchor):
                    self._write(before, after, run)
                    self.parts.hsm.replace_anchors(effect.anchor.encode())
                    run = []
                else:
                    run.append(effect)
            self._write(before, after, run)
        except RowChanged as error:
            # What became durable of it stands; whoever asked asks again.
            self._site = None
            raise Conflict("another process of this site stepped first", self.current().state.ledger.epoch) from error
        except BaseException:
            self._site = None
            raise

    def _write(self, before: SiteState | None, after: SiteState, run: Sequence[Effect]) -> None:
        if not run:
            return
        with lasting(self.parts.database) as transaction:
            mirror = self._mirror(transaction)
            for effect in run:
                self._write_one(transaction, mirror, before, after, effect)
        if gone := [name for effect in run for name in _ended(effect)]:
            for name in gone:
                self.parts.hsm.destroy_master(RingMaster.named(name))
            if {RingMaster.named(name) for name in gone} & set(self.parts.hsm.masters()):
                self.serve()

    def _write_one(
        self, transaction: Transaction, mirror: Mirror, before: SiteState | None, after: SiteState, effect: Effect
    ) -> None:
        match effect:
            case InstallPreActive(name):
                mirror.write(name, KeyState.PRE_ACTIVATION, WAITING)
            case SaveState(state, replaces):
                self.store.save_state(transaction, after.site, state, replaces)
                for name in sorted({*after.quarantined} - {*(before.quarantined if before else ())}):
                    mirror.follow(after, name)
                for event in events(before, after):
                    self.parts.recorder.record(transaction, event)
            case FileCertificate(epoch, certificate):
                self.store.file_certificate(transaction, epoch, certificate, Certificate.decode(certificate).head)
            case RecordEvidence(site, evidence):
                self.store.file_evidence(transaction, site, evidence, self.parts.clock())
            case ChangeState(name, _):
                mirror.follow(after, name)
            case Discard(name):
                if mirror.write(name, KeyState.DESTROYED, VOIDED):
                    event = KeyEvent("sync.discarded", {"site": after.site, "version": name})
                    self.parts.recorder.record(transaction, event)

    def _mirror(self, transaction: Transaction) -> Mirror:
        return Mirror(self.rings, transaction, self.parts.clock())


def _ended(effect: Effect) -> tuple[str, ...]:
    """The version whose objects in the token this effect destroys, if it is such a one."""
    match effect:
        case Discard(name) | ChangeState(name, KeyState.DESTROYED):
            return (name,)
        case _:
            return ()
