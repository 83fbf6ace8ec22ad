"""Clients: a certificate from the authority, a registered row, and for development the keys in a folder of their own.

Where a client makes its own keys (as it should), `issue` takes its request and the thumbprint of its DPoP key, and no private
key ever comes near this machine. `add` plays both sides.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from policies.authority import Role
from policies.proofs import certificate_thumbprint, public_jwk
from policies.tokens import jwk_thumbprint
from service import certificates, steps
from service.bringup import require_running
from service.errors import ClientExists, ClientNameRefused
from service.isolation import Account, establish
from service.settings import Settings

ALL_ROLES = tuple(Role)
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def add(settings: Settings, name: str, *, tenant: str, roles: Sequence[Role], replace: bool = False) -> Path:
    """Make keys, certificate and row of a development client; returns its folder, `clients/NAME`.

    Glottis must be running. With `replace`, a client that exists gets new keys and its old ones end.
    Raises ClientNameRefused, ClientExists, StepFailed; nothing is left behind then.
    """
    _check(name)
    require_running(settings)
    folder = settings.client_dir(name)
    if folder.exists() and not replace:
        raise ClientExists(f"there is a client {name} already")
    private, request = certificates.new_request()
    dpop = ec.generate_private_key(ec.SECP256R1())
    me, unfinished = Account.current(), folder.with_name(f".{name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    me.folder(unfinished)
    try:
        certificate = issue(settings, request, name, tenant=tenant, roles=roles, jkt=thumbprint(dpop), replace=replace)
        known = {"client_id": name, "tenant": tenant, "roles": [role.value for role in roles], "base_url": settings.public_base_url}
        me.file(unfinished / "client.key", private)
        me.file(unfinished / "client.pem", certificate)
        me.file(unfinished / "dpop.key", certificates.private_pem(dpop))
        me.file(unfinished / "ca.pem", (settings.officer_dir / "ca.pem").read_bytes())
        me.file(unfinished / "client.json", json.dumps(known, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def issue(
    settings: Settings, request: bytes, name: str, *, tenant: str, roles: Sequence[Role], jkt: str, replace: bool = False
) -> bytes:
    """The certificate (PEM) for a client's request, registered with its DPoP key's thumbprint, tenant and roles."""
    _check(name)
    isolation = establish(settings.state_dir)
    answer = steps.call(settings, isolation.officer, "issue", request=request.decode(errors="replace"), client=name)
    der = x509.load_pem_x509_certificate(answer["pem"].encode()).public_bytes(serialization.Encoding.DER)
    steps.call(
        settings,
        isolation.vault,
        "register_client",
        groups=isolation.database_groups(embedded=settings.embedded),
        client=name,
        tenant=tenant,
        roles=[role.value for role in roles],
        cert_sha256=certificate_thumbprint(der),
        jkt=jkt,
        replace=replace,
    )
    return str(answer["pem"]).encode()


def thumbprint(key: ec.EllipticCurvePrivateKey) -> str:
    """RFC 7638 thumbprint of a DPoP key's public half."""
    return jwk_thumbprint(public_jwk(key.public_key()))


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ClientNameRefused(f"{name!r} is no client name")
