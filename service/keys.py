"""A site's keys as the operator and the clock see them: commands on master versions, schedules, and what is due.

Lives in the site process, which alone steps the sites' agreement: `calls` are its commands, and `turn` is its background work.
Moving keys is left to `service.rewrapping`, but for what a schedule moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import structlog

from keyvault.approvals import Approval, Operation
from keyvault.database import Database
from keyvault.errors import KeyNotFound, KeyVaultError
from keyvault.events import Recorder
from keyvault.hsm import RingMaster, SiteHsm
from keyvault.lifecycle import Lifecycle, Masters, Officers, Version
from keyvault.records import RecordMac
from keyvault.rotation import Rewrapping
from keyvault.schedules import Action, Schedule, Schedules
from keyvault.states import KeyState
from keyvault.store import KeyStore
from keyvault.sync.coordinator import Coordinator
from service.rewrapping import plan_facts
from service.sync.arguments import Call

Facts = dict[str, Any]
_log = structlog.get_logger()


@dataclass(frozen=True)
class KeyParts:
    """What the keys of a site are worked on with."""

    database: Database
    hsm: SiteHsm
    recorder: Recorder
    masters: Masters
    officers: Officers
    cluster: str
    least_delay: timedelta


@dataclass(frozen=True)
class DrivenMasters:
    """The coordinator, taken by one command at a time. `done` hears of every approved operation that was carried out."""

    coordinator: Coordinator
    driving: AbstractContextManager[object]
    """One that its holder may take again."""
    done: Callable[[Operation], None]

    def change_states(
        self,
        states: Mapping[str, KeyState],
        reason: str,
        operation: Operation | None = None,
        approvals: Sequence[Approval] = (),
    ) -> object:
        with self.driving:
            closed = self.coordinator.change_states(states, reason, operation, approvals)
        if operation is not None:
            self.done(operation)
        return closed

    def alone(self) -> AbstractContextManager[object]:
        return self.driving

    def ending(self, label: str) -> bool:
        vote = self.coordinator.node.current.vote
        records = vote.proposal.records if vote else ()
        return any(record.name == label and record.state is KeyState.DESTROYED for record in records)


class KeyCommands:
    """The commands about keys of one site process, as functions from JSON to JSON, and the work that falls due."""

    def __init__(self, parts: KeyParts) -> None:
        store, mac = KeyStore(), RecordMac(parts.hsm)
        self.lifecycle = Lifecycle(
            database=parts.database,
            hsm=parts.hsm,
            store=store,
            recorder=parts.recorder,
            masters=parts.masters,
            officers=parts.officers,
            cluster=parts.cluster,
            clock=_now,
            least_delay=parts.least_delay,
        )
        self._rewrapping = Rewrapping(parts.database, parts.hsm, store, parts.recorder, mac)
        self.schedules = Schedules(
            database=parts.database,
            mac=mac,
            recorder=parts.recorder,
            lifecycle=self.lifecycle,
            rewrapping=self._rewrapping,
            officers=parts.officers,
            cluster=parts.cluster,
        )

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        named = (self.keys, self.key, self.key_plan, self.key_change, self.key_destroy, self.key_cancel)
        scheduled = (self.key_schedules, self.key_schedule_set, self.key_schedule_remove)
        return {call.__name__: call for call in (*named, *scheduled)}

    # --- versions

    def keys(self, ring: str | None = None) -> Facts:
        """Every version with its state, what it wraps here, and a pending destruction."""
        return {"versions": [_version_facts(version) for version in self.lifecycle.versions(ring)]}

    def key(self, master: str) -> Facts:
        """One version. Raises KeyNotFound."""
        named = RingMaster.named(master)
        for version in self.lifecycle.versions(named.ring):
            if version.master == named:
                return _version_facts(version)
        raise KeyNotFound(f"there is no {master}")

    def key_plan(self, ring: str, target: int | None = None) -> Facts:
        """What a re-wrap would do. Raises what refuses its target."""
        return plan_facts(self._rewrapping.plan(ring, target=target))

    def key_change(self, act: Literal["suspend", "resume", "deactivate", "compromise"], master: str, reason: str) -> Facts:
        """`suspend`, `resume`, `deactivate` or `compromise` one version, at both sites."""
        acts = {
            "suspend": self.lifecycle.suspend,
            "resume": self.lifecycle.resume,
            "deactivate": self.lifecycle.deactivate,
            "compromise": self.lifecycle.compromise,
        }
        acts[act](RingMaster.named(master), reason)
        return self.key(master)

    def key_destroy(self, master: str, reason: str, delay_hours: float | None = None) -> Facts:
        """Schedule a destruction, or file the officers' request for it."""
        delay = {} if delay_hours is None else {"delay": timedelta(hours=delay_hours)}
        found = self.lifecycle.destroy(RingMaster.named(master), reason, **delay)
        return {**self.key(master), "request": found.request or None}

    def key_cancel(self, master: str, reason: str) -> Facts:
        """Stop a destruction, pending or only asked for. Raises NothingPending."""
        done = self.lifecycle.cancel(RingMaster.named(master), reason)
        return {**self.key(master), "changed": True, "scheduled": done.scheduled, "withdrawn": list(done.requests)}

    # --- schedules

    def key_schedules(self) -> Facts:
        """Every schedule, and what is due of each."""
        due = {found.schedule.name: found.why for found in self.schedules.due(_now())}
        return {"schedules": [_schedule_facts(schedule, due.get(schedule.name)) for schedule in self.schedules.all()]}

    def key_schedule_set(
        self,
        name: str,
        ring: str,
        action: str,
        after_days: int | None = None,
        after_keys: int | None = None,
        rate: float | None = None,
    ) -> Facts:
        """Set a schedule."""
        schedule = Schedule(name, ring, Action(action), after_days, after_keys, rate)
        self.schedules.put(schedule)
        return _schedule_facts(schedule, None)

    def key_schedule_remove(self, name: str) -> Facts:
        """End a schedule."""
        self.schedules.remove(name)
        return {"removed": name}

    # --- what is due

    def turn(self) -> None:
        """Carry out destructions and schedules that are due, each once.

        A schedule that cannot be carried out stays due and is logged; what keeps all of them from being read is raised.
        """
        for ended in self.lifecycle.destroy_due(_now()):
            if ended.code:
                _log.warning("destruction_waits", version=ended.master.label, code=ended.code, said=ended.said)
        for due in self.schedules.due(_now()):
            try:
                done = self.schedules.run(due, _now())
            except KeyVaultError as error:  # it stays due, and hinders no other schedule
                _log.warning("schedule_waits", schedule=due.schedule.name, why=due.why, code=error.code)
                continue
            _log.info("schedule", schedule=due.schedule.name, why=due.why, done=done.what, **done.facts)


def _now() -> datetime:
    return datetime.now(UTC)


def _version_facts(version: Version) -> Facts:
    """One version as JSON. `alert` says what a pending destruction would take with it."""
    times = {"destroy_at": version.destroy_at, "peer_destroy_at": version.peer_destroy_at}
    pending = any(times.values()) and version.state is not KeyState.DESTROYED
    return {
        "name": version.master.label,
        "ring": version.master.ring,
        "version": version.master.version,
        "state": version.state.value,
        "created_at": version.created_at.isoformat(),
        "reason": version.reason,
        "keys": version.keys,
        "held_here": version.held,
        **{name: None if at is None else at.isoformat() for name, at in times.items()},
        "alert": f"{version.keys} keys are wrapped under a version that is to be destroyed" if pending and version.keys else None,
    }


def _schedule_facts(schedule: Schedule, due: str | None) -> Facts:
    facts = {name: value for name, value in asdict(schedule).items() if not name.startswith("last_")}
    times = {
        "last_run_at": None if schedule.last_run_at is None else schedule.last_run_at.isoformat(),
        "last_reminder_at": None if schedule.last_reminder_at is None else schedule.last_reminder_at.isoformat(),
    }
    return {**facts, "action": schedule.action.value, **times, "due": due}
