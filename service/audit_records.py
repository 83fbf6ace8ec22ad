"""The audit log's records checked with the serving token, in a process of their own: it may take long."""

from __future__ import annotations

from keyvault.key_uses import Place
from policies.audit.store import AuditStore
from service.masters import serving_token
from service.schema import opened
from service.settings import Settings


def check_records(settings: Settings) -> int:
    """Check every audit record with the serving token (`AuditStore.check_macs`); returns their number. Raises AuditTampered."""
    with opened(settings.role_url("vault")) as database, serving_token(settings, database, Place.AUDIT) as hsm:
        return AuditStore(database, hsm).check_macs()
