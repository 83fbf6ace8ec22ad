"""One client's row and the log entry that says so, in one transaction, written with the serving token's MAC key."""

from __future__ import annotations

import time
from collections.abc import Sequence

from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.records import RecordMac
from policies.audit.store import AuditStore
from policies.authority import Role
from policies.intents import Intent
from policies.registry import Registry
from policies.store import PolicyStore, durable
from service.schema import opened
from service.settings import Settings
from service.site import Site, token_config


def register(
    settings: Settings, client: str, tenant: str, roles: Sequence[str], cert_sha256: str, jkt: str, *, replace: bool
) -> None:
    """Register `client`, or with `replace` end its old keys for these. Raises RowChanged if it exists, ClientUnknown if not."""
    site = Site.load(settings.site_file)
    config = token_config(settings, "serving", site.tokens["serving"])
    hsm = Pkcs11Hsm.open(config, settings.serving_pin.read(), expected_masters=site.masters)
    try:
        with opened(settings.role_url("vault")) as database:
            registry, audit = Registry(PolicyStore(RecordMac(hsm)), time.time), AuditStore(database, hsm)
            with durable(database) as transaction:
                if replace:
                    registry.rotate_client(transaction, client, cert_sha256=cert_sha256, jkt=jkt)
                else:
                    named = [Role(role) for role in roles]
                    registry.register_client(
                        transaction, client_id=client, tenant=tenant, cert_sha256=cert_sha256, jkt=jkt, roles=named
                    )
                facts: dict[str, str | int | None] = {"certificate": cert_sha256, "jkt": jkt, "roles": " ".join(sorted(roles))}
                action = "client.rotated" if replace else "client.registered"
                audit.append(transaction, Intent(action, "allowed", tenant, client, None, "clients", facts))
    finally:
        hsm.close()
