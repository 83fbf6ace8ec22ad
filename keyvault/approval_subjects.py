"""What officers sign for acts that no transaction of the two sites holds: policies, clients, the audit log, broken glass.

Each function takes the facts that it covers out of a request, and returns the subject to sign beside the lines that an officer
reads: both come from the same facts, so that nobody signs other than what he is shown. What is left are the requester's words.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from keyvault.hsm import RingMaster
from keyvault.records import canonical

Lines = tuple[tuple[str, str], ...]
POLICY, CLIENT, REANCHOR = "policy.activate", "ca.issue", "log.reanchor"
DETAILS, OPEN_COMPROMISED = "audit.export-details", "keys.break-glass"


def policy_subject(cluster: str, version: int, before: bytes, policies: bytes) -> bytes:
    """Version `version` of the policies is the set with the SHA-256 `policies`, and follows the one with `before`."""
    return sha256(canonical(POLICY, cluster, version, before, policies)).digest()


def client_subject(cluster: str, site: str, client: str, tenant: str, roles: tuple[str, ...], certificate: str, jkt: str) -> bytes:
    """One client of one site: its roles, and both keys. `certificate` is `key:` with the SHA-256 of the public key
    (SubjectPublicKeyInfo, DER) where it is yet to be issued, else `x5t:` with the certificate's thumbprint."""
    return sha256(canonical(CLIENT, cluster, site, client, tenant, tuple(sorted(set(roles))), certificate, jkt)).digest()


def reanchor_subject(cluster: str, site: str, kept: str, database: str) -> bytes:
    """The log of `site` goes on from the checkpoint of its database, in place of the one that was kept; each empty for none."""
    return sha256(canonical(REANCHOR, cluster, site, kept, database)).digest()


def details_subject(cluster: str, site: str, start: int, end: int, tenant: str, recipient: bytes) -> bytes:
    """The details of the entries [start, end) of one site's log, of one tenant or (empty) all, for one public key."""
    return sha256(canonical(DETAILS, cluster, site, start, end, tenant, recipient)).digest()


def open_compromised_subject(cluster: str, site: str, version: str) -> bytes:
    """Keys under this compromised master version open at this site; the operation's expiry ends it."""
    return sha256(canonical(OPEN_COMPROMISED, cluster, site, version)).digest()


def _policy(cluster: str, facts: dict[str, Any]) -> tuple[bytes, Lines]:
    version, before, policies = int(facts.pop("version")), _digest(facts.pop("before")), _digest(facts.pop("policies"))
    lines = (("version", str(version)), ("set (SHA-256)", policies.hex()), ("follows", before.hex()))
    return policy_subject(cluster, version, before, policies), lines


def _client(cluster: str, facts: dict[str, Any]) -> tuple[bytes, Lines]:
    site, client, tenant = str(facts.pop("site")), str(facts.pop("client")), str(facts.pop("tenant"))
    roles, certificate, jkt = tuple(str(facts.pop("roles")).split()), str(facts.pop("certificate")), str(facts.pop("jkt"))
    lines = (
        *(("site", site), ("client", client), ("tenant", tenant), ("roles", ", ".join(sorted(set(roles))))),
        *(("certificate", certificate), ("DPoP key", jkt)),
    )
    return client_subject(cluster, site, client, tenant, roles, certificate, jkt), lines


def _reanchor(cluster: str, facts: dict[str, Any]) -> tuple[bytes, Lines]:
    site, kept, database = str(facts.pop("site")), str(facts.pop("kept")), str(facts.pop("database"))
    lines = (("site", site), ("goes on from", _checkpoint(database)), ("given up", _checkpoint(kept)))
    return reanchor_subject(cluster, site, kept, database), lines


def _details(cluster: str, facts: dict[str, Any]) -> tuple[bytes, Lines]:
    site, start, end = str(facts.pop("site")), int(facts.pop("start")), int(facts.pop("end"))
    tenant, recipient = str(facts.pop("tenant")), base64.b64decode(facts.pop("recipient"), validate=True)
    if not 0 <= start < end or not recipient:
        raise ValueError("an export names entries and a key")
    lines = (
        *(("site", site), ("entries", f"{start} to {end - 1}"), ("tenant", tenant or "every tenant")),
        ("recipient's key", sha256(recipient).hexdigest()),
    )
    return details_subject(cluster, site, start, end, tenant, recipient), lines


def _open_compromised(cluster: str, facts: dict[str, Any]) -> tuple[bytes, Lines]:
    site, version = str(facts.pop("site")), RingMaster.named(str(facts.pop("version"))).label
    return open_compromised_subject(cluster, site, version), (("site", site), ("opens under", version))


def _digest(content: str) -> bytes:
    return sha256(base64.b64decode(content, validate=True)).digest()


def _checkpoint(note: str) -> str:
    """Size and root of a signed note, as C2SP's tlog-checkpoint has them. Raises ValueError."""
    if not note:
        return "nothing: no checkpoint is there"
    _, size, root = note.split("\n")[:3]
    return f"{int(size)} entries, root {base64.b64decode(root, validate=True).hex()}"


SUBJECTS: Mapping[str, Callable[[str, dict[str, Any]], tuple[bytes, Lines]]] = {
    POLICY: _policy,
    CLIENT: _client,
    REANCHOR: _reanchor,
    DETAILS: _details,
    OPEN_COMPROMISED: _open_compromised,
}
