"""The site process's commands on clients: who may call, with which keys and roles, and how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from policies.authority import Client
from policies.hours import Hours
from policies.quotas import Scope
from service.client_approvals import OfficersAwaited
from service.registration import Registration
from service.sync.arguments import Call

Facts = dict[str, Any]


@dataclass(frozen=True)
class ClientCommands:
    """The commands about clients of one site process, as functions from JSON to JSON."""

    registration: Callable[[], Registration]
    """Asked anew for each command, as the roster in force may have changed."""
    origins: tuple[str, ...] = ()
    """Of pages whose browsers may call this site."""

    def calls(self) -> Mapping[str, Call]:
        """Every command by its name."""
        change = (
            self.register_client,
            self.rotate_client,
            self.change_client_roles,
            self.revoke_client,
            self.invite_browser,
            self.client_hours,
        )
        return {call.__name__: call for call in (*change, self.quota, self.record_authority, self.list_clients)}

    def register_client(self, client: str, tenant: str, roles: Sequence[str], cert_sha256: str, jkt: str) -> Facts:
        """Register a client, together with the log entry that says so."""
        return _or_awaited(lambda: self.registration().register(client, tenant, roles, cert_sha256, jkt))

    def rotate_client(self, client: str, cert_sha256: str, jkt: str) -> Facts:
        """Give a client new keys; tenant and roles stay."""
        return _or_awaited(lambda: self.registration().rotate(client, cert_sha256, jkt))

    def change_client_roles(self, client: str, roles: Sequence[str]) -> Facts:
        """Give a client other roles."""
        return _or_awaited(lambda: self.registration().change_roles(client, roles))

    def revoke_client(self, client: str) -> Facts:
        """End a client for good."""
        revoked, changed = self.registration().revoke(client)
        return _client(revoked) | {"changed": changed}

    def invite_browser(self, client: str, tenant: str, roles: Sequence[str], voice: str | None, lifetime_s: int) -> Facts:
        """A one-time code for a browser that is to become this client, and the origins of the pages that may use it."""
        made = self.registration().invite(client, tenant, roles, UUID(voice) if voice else None, lifetime_s)
        return {"code": made.code, "expires_at": made.expires_at.isoformat(timespec="seconds"), "origins": list(self.origins)}

    def client_hours(self, client: str, change: bool, hours: str | None) -> Facts:
        """In which hours a client may call, set first where `change` says so; null is always."""
        known = self.registration()
        return _client(known.limit(client, Hours.parse(hours) if hours else None) if change else known.hours(client))

    def quota(self, scope: str, name: str, changes: Mapping[str, int] | None) -> Facts:
        """The limits of a client or voice, set first where changes are given."""
        return asdict(self.registration().quota(Scope(scope), name, changes))

    def record_authority(self, action: str, name: str, sha256: str) -> Facts:
        """Write down that a customer's authority is trusted, or no longer."""
        self.registration().authority(action, name, sha256)
        return {}

    def list_clients(self) -> Facts:
        """Every client, each row with its MAC checked."""
        return {"clients": [_client(client) for client in self.registration().clients()]}


def _or_awaited(change: Callable[[], Client]) -> Facts:
    """The client's row, or the request that officers must approve first."""
    try:
        return _client(change())
    except OfficersAwaited as waits:
        return {"request": waits.request, "needed": waits.needed}


def _client(client: Client) -> Facts:
    """A client's row for people: thumbprints, no keys."""
    return {
        "client": client.client_id,
        "tenant": client.tenant,
        "roles": list(client.roles),
        "state": client.state.value,
        "certificate": client.cert_sha256,
        "jkt": client.jkt,
        "voice": None if client.voice_id is None else str(client.voice_id),
        "hours": client.hours,
    }
