"""Clients' rows and the log entries that say so, each change in one transaction, written with the serving token's MAC key."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

from keyvault.database import Database, Transaction
from policies.audit.store import AuditStore
from policies.authority import BROWSER_ROLES, Client, ClientState, Role, key_alone
from policies.browsers import Invited, invite
from policies.caller_errors import BrowserRolesRefused
from policies.errors import ClientUnknown, RowChanged
from policies.hours import Hours
from policies.intents import Facts, Intent
from policies.quotas import EVERYONE, Limits, Scope
from policies.registry import Registry
from policies.store import PolicyStore, durable
from service.client_approvals import ClientApprovals

_OPERATOR = "glottis"
"""Whose entry a listing is: it is about no one client or tenant."""


class Registration:
    """Changes who may call. Every method is on disk when it returns, or nothing has happened.

    Raises AuthorityRowTampered rather than build on a row changed outside, and AuditUnavailable where it cannot be recorded.
    """

    def __init__(self, database: Database, store: PolicyStore, audit: AuditStore, officers: ClientApprovals | None = None) -> None:
        """`officers`: whose approval clients with marked roles need; None where nobody marks any."""
        self._database, self._store, self._audit, self._officers = database, store, audit, officers
        self._registry = Registry(store, time.time)

    def register(self, client: str, tenant: str, roles: Sequence[str], cert_sha256: str, jkt: str) -> Client:
        """Register a client. Raises OfficersAwaited, and RowChanged if its name or certificate is taken."""
        named = [Role(role) for role in roles]
        wanted = Client(client, tenant, cert_sha256, jkt, tuple(named), ClientState.ACTIVE, 1)
        with self._approved(wanted, "register", wanted.roles), durable(self._database) as transaction:
            made = self._registry.register_client(
                transaction, client_id=client, tenant=tenant, cert_sha256=cert_sha256, jkt=jkt, roles=named
            )
            return self._recorded(transaction, "client.registered", made)

    def rotate(self, client: str, cert_sha256: str, jkt: str) -> Client:
        """Give a client new keys; the old ones end. Raises OfficersAwaited, ClientUnknown, ClientInactive, RowChanged."""
        before = self._known(client)
        wanted = replace(before, cert_sha256=cert_sha256, jkt=jkt)
        with self._approved(wanted, "rotate", wanted.roles), durable(self._database) as transaction:
            self._require_unchanged(transaction, before)
            changed = self._registry.rotate_client(transaction, client, cert_sha256=cert_sha256, jkt=jkt)
            return self._recorded(transaction, "client.rotated", changed)

    def change_roles(self, client: str, roles: Sequence[str]) -> Client:
        """Give a client other roles. What widens them may need officers; what narrows them never does.

        Raises OfficersAwaited, ClientUnknown, ClientInactive, RowChanged, and BrowserRolesRefused for what no browser may have.
        """
        named, before = [Role(role) for role in roles], self._known(client)
        if before.cert_sha256 == key_alone(before.jkt):
            forbidden = not set(named) <= set(BROWSER_ROLES) or (Role.SPEAKER in named and before.voice_id is None)
            if forbidden or (self._officers is not None and self._officers.marked & set(roles)):
                raise BrowserRolesRefused
        wanted = replace(before, roles=tuple(named))
        with self._approved(wanted, "roles", set(wanted.roles) - set(before.roles)), durable(self._database) as transaction:
            self._require_unchanged(transaction, before)
            changed = self._registry.change_roles(transaction, client, named)
            return self._recorded(transaction, "client.roles_changed", changed)

    @contextmanager
    def _approved(self, client: Client, act: str, new: Collection[str]) -> Iterator[None]:
        """Officers approved this where they must; after the block it is used up."""
        operation = self._officers.require(client, act, new) if self._officers else None
        yield
        if self._officers:
            self._officers.done(operation)

    def _known(self, client: str) -> Client:
        with durable(self._database) as transaction:
            found = self._store.client(transaction, client)
        if found is None:
            raise ClientUnknown
        return found

    def _require_unchanged(self, transaction: Transaction, before: Client) -> None:
        """What officers approved, or did not need to, is about this very row, which is then swapped. Raises RowChanged."""
        if self._store.client(transaction, before.client_id) != before:
            raise RowChanged("client: changed meanwhile")

    def revoke(self, client: str) -> tuple[Client, bool]:
        """End a client for good; the second value is False if it was revoked before. Raises ClientUnknown, RowChanged."""
        with durable(self._database) as transaction:
            found = self._store.client(transaction, client)
            if found is not None and found.state is ClientState.REVOKED:
                return found, False
            revoked = self._registry.revoke_client(transaction, client)
            return self._recorded(transaction, "client.revoked", revoked), True

    def invite(self, client: str, tenant: str, roles: Sequence[str], voice: UUID | None, lifetime_s: int) -> Invited:
        """A one-time code with which a browser registers its key as this client.

        Raises BrowserRolesRefused, also for roles that need officers: they would have to sign a key that is not there yet.
        Raises VoiceUnknown, and RowChanged if the name is taken.
        """
        if self._officers is not None and self._officers.marked & set(roles):
            raise BrowserRolesRefused("officers marked one of them")
        named = [Role(role) for role in roles]
        terms: dict[str, Any] = {"client_id": client, "tenant": tenant, "roles": named, "voice": voice}
        with durable(self._database) as transaction:
            made = invite(self._store, transaction, **terms, now=time.time(), lifetime_s=lifetime_s)
            facts: Facts = {"roles": " ".join(sorted(roles)), "expires_at": made.expires_at.isoformat()}
            self._audit.append(transaction, Intent("client.invited", "allowed", tenant, client, voice, "clients", facts))
            return made

    def quota(self, scope: Scope, name: str, changes: Mapping[str, int] | None) -> Limits:
        """The limits of a client or voice by its own row, else everyone's, else those of the start; with `changes`, set first.

        Raises ClientUnknown, VoiceUnknown, RowChanged.
        """
        with durable(self._database) as transaction:
            rows = (self._store.quota(transaction, scope, known) for known in (name, EVERYONE))
            limits = next((row.limits for row in rows if row is not None), Limits())
            if changes is None:
                return limits
            limits = replace(limits, **changes)
            self._registry.set_quota(transaction, scope, name, limits)
            facts: Facts = {"scope": scope.value, "name": name, **asdict(limits)}
            self._audit.append(transaction, Intent("quota.set", "allowed", _OPERATOR, _OPERATOR, None, "clients", facts))
            return limits

    def limit(self, client: str, hours: Hours | None) -> Client:
        """Limit a client to hours, or to none. Raises ClientUnknown, ClientInactive, RowChanged."""
        with durable(self._database) as transaction:
            limited = self._registry.limit_client(transaction, client, hours)
            return self._recorded(transaction, "client.hours_set", limited, hours=limited.hours or "always")

    def hours(self, client: str) -> Client:
        """The client's row as it is. Raises ClientUnknown."""
        return self._known(client)

    def authority(self, action: str, name: str, sha256: str) -> None:
        """Record that certificates of a customer's authority are taken, or no longer."""
        facts: Facts = {"name": name, "sha256": sha256}
        with durable(self._database) as transaction:
            self._audit.append(transaction, Intent(action, "allowed", _OPERATOR, _OPERATOR, None, "clients", facts))

    def clients(self) -> tuple[Client, ...]:
        """Every client, by name; that they were read is recorded."""
        with durable(self._database) as transaction:
            found = self._store.clients(transaction)
            facts: Facts = {"clients": len(found)}
            self._audit.append(transaction, Intent("client.listed", "allowed", _OPERATOR, _OPERATOR, None, "clients", facts))
            return found

    def _recorded(self, transaction: Transaction, action: str, client: Client, **more: str) -> Client:
        """The intent of a change, from the row as it was written."""
        facts: Facts = {"certificate": client.cert_sha256, "jkt": client.jkt, "roles": " ".join(sorted(client.roles)), **more}
        self._audit.append(transaction, Intent(action, "allowed", client.tenant, client.client_id, None, "clients", facts))
        return client
