"""Clients: a certificate from the authority, a registered row, and for development the keys in a folder of their own.

Where a client makes its own keys (as it should), `issue` takes its request and the thumbprint of its DPoP key, and no private
key ever comes near this machine; `renew` does it again. `add` and `rotate` play both sides.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from policies.authority import Role
from policies.errors import ClientUnknown
from policies.hours import Hours
from policies.proofs import certificate_thumbprint, public_jwk
from policies.quotas import EVERYONE
from policies.tokens import jwk_thumbprint
from service import certificates, step
from service.errors import (
    ClientAwaitsOfficers,
    ClientExists,
    ClientMissing,
    ClientNameRefused,
    RequestRefused,
    RequestUnreadable,
    TenantRefused,
)
from service.holding import require_running
from service.isolation import Account, establish
from service.settings import Settings
from service.shapes import tenant_of
from service.sync.admin import SiteRefused, ask

ALL_ROLES = tuple(Role)
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Issued:
    """A client's certificate (PEM), and its row as it was registered."""

    certificate: bytes
    client: Mapping[str, Any]


def add(settings: Settings, name: str, *, tenant: str, roles: Sequence[Role], replace: bool = False) -> Path:
    """Make keys, certificate and row of a development client; returns its folder, `clients/NAME`.

    Glottis must be running. With `replace` it is `rotate`: tenant and roles stay as they were registered.
    Raises ClientNameRefused, TenantRefused, ClientExists, SiteRefused; nothing is left behind then.
    """
    if replace:
        return rotate(settings, name)
    _check(name)
    _check_tenant(tenant)
    if settings.client_dir(name).exists():
        raise ClientExists(f"there is a client {name} already")
    return _with_new_keys(settings, name, lambda request, jkt: issue(settings, request, name, tenant=tenant, roles=roles, jkt=jkt))


def rotate(settings: Settings, name: str) -> Path:
    """Give a development client new keys; its old ones end with the next request. Returns its folder.

    Raises ClientNameRefused, ClientMissing, SiteRefused; the old keys hold then.
    """
    _check(name)
    return _with_new_keys(settings, name, lambda request, jkt: renew(settings, request, name, jkt=jkt))


def finish(settings: Settings, name: str, request: str) -> Path:
    """Register what officers approved in `request`: new keys that `add` or `rotate` made and kept. Returns the client's folder.

    Raises ClientNameRefused, ClientMissing where no keys wait, RequestUnreadable for a request of other keys, and
    ClientAwaitsOfficers while too few have approved.
    """
    _check(name)
    kept = _requested(settings, name)
    if not kept.exists():
        raise ClientMissing(f"no keys of {name} wait for officers")
    facts = _asked(settings, request)
    der = x509.load_pem_x509_certificate((kept / "client.pem").read_bytes()).public_bytes(serialization.Encoding.DER)
    thumbprint_ = certificate_thumbprint(der)
    if (facts.get("client"), facts.get("certificate")) != (name, f"x5t:{thumbprint_}"):
        raise RequestUnreadable("the request is about another client, or about other keys than those that wait")
    keys = {"client": name, "cert_sha256": thumbprint_, "jkt": facts["jkt"]}
    if facts["act"] == "rotate":
        row = _registered(settings, "rotate_client", **keys)
    else:
        row = _registered(settings, "register_client", **keys, tenant=facts["tenant"], roles=str(facts["roles"]).split())
    _in_place(settings, kept, row)
    return settings.client_dir(name)


def change_roles(settings: Settings, name: str, roles: Sequence[Role]) -> dict[str, Any]:
    """Give a client these roles in place of those it has; returns its row.

    Raises ClientNameRefused, ClientMissing, SiteRefused, and ClientAwaitsOfficers: given again once they approved, it is done.
    """
    _check(name)
    return _registered(settings, "change_client_roles", client=name, roles=[role.value for role in roles])


def _asked(settings: Settings, request: str) -> Mapping[str, Any]:
    """The facts of a request about a client, as its signatures cover them."""
    from keyvault.approval_kinds import Kind, Request  # only this reads requests

    found = Request.decode(base64.b64decode(ask(settings, "approval", name=request)["request"], validate=True))
    if found.meaning().kind is not Kind.CLIENT:
        raise RequestUnreadable("this request is about no client")
    return found.facts


def revoke(settings: Settings, name: str) -> dict[str, Any]:
    """End a client for good: from the next request on it is refused by every worker, also with tokens in hand.

    Returns its row, and `changed`: False if it was revoked before. Raises ClientNameRefused, ClientMissing, SiteRefused.
    """
    _check(name)
    return _registered(settings, "revoke_client", client=name)


def invite(
    settings: Settings, name: str, *, tenant: str, roles: Sequence[Role], voice: UUID | None, lifetime_s: int
) -> dict[str, Any]:
    """A one-time `code`, and when it ends, for a browser that is to become the client `name`.

    Raises ClientNameRefused, TenantRefused, SiteRefused.
    """
    _check(name)
    _check_tenant(tenant)
    named, own = [role.value for role in roles], None if voice is None else str(voice)
    return _registered(settings, "invite_browser", client=name, tenant=tenant, roles=named, voice=own, lifetime_s=lifetime_s)


def limit(settings: Settings, name: str, *, change: bool, hours: Hours | None) -> dict[str, Any]:
    """In which `hours` a client may call (None: always); with `change` they are set first. Returns its row.

    Raises ClientNameRefused, ClientMissing, SiteRefused.
    """
    _check(name)
    return _registered(settings, "client_hours", client=name, change=change, hours=None if hours is None else str(hours))


def listed(settings: Settings) -> list[dict[str, Any]]:
    """Every registered client by name: tenant, roles, state and thumbprints. Raises SiteRefused."""
    return list(_registered(settings, "list_clients")["clients"])


def quota(settings: Settings, name: str, *, voice: bool = False, changes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What a client (or, with `voice`, the voice of this id) may use: see `policies.quotas.Limits`. `*` is everyone.

    Limits given in `changes` are set first. Raises ClientNameRefused, ClientMissing, SiteRefused.
    """
    if voice and name != EVERYONE:
        try:
            name = str(UUID(name))
        except ValueError:
            raise ClientNameRefused(f"{name!a} is no voice's id", fix="A voice's id is what its enrolment answered.") from None
    elif name != EVERYONE:
        _check(name)
    return _registered(settings, "quota", scope="voice" if voice else "client", name=name, changes=changes)


def issue(settings: Settings, request: bytes, name: str, *, tenant: str, roles: Sequence[Role], jkt: str) -> Issued:
    """The certificate for a client's request (PEM), registered with its DPoP key's thumbprint, tenant and roles."""
    _check_tenant(tenant)
    pem, thumbprint = _certificate(settings, request, name)
    named = [role.value for role in roles]
    facts = {"client": name, "tenant": tenant, "roles": named, "cert_sha256": thumbprint, "jkt": jkt}
    return Issued(pem, _issued(pem, settings, "register_client", **facts))


def renew(settings: Settings, request: bytes, name: str, *, jkt: str) -> Issued:
    """The same for a client that is registered: its old certificate and DPoP key end. Raises ClientMissing, SiteRefused."""
    pem, thumbprint = _certificate(settings, request, name)
    return Issued(pem, _issued(pem, settings, "rotate_client", client=name, cert_sha256=thumbprint, jkt=jkt))


def accept(settings: Settings, name: str, certificate: bytes, *, tenant: str, roles: Sequence[Role], jkt: str) -> Mapping[str, Any]:
    """Register a client by a certificate (PEM) of its own: one that another site of this cluster issued, or an authority that is
    trusted here (`service.authorities`); returns its row.

    The other site hears of it by itself, as of every client. Raises RequestRefused for a certificate that the edge would not
    take, ClientNameRefused, TenantRefused, SiteRefused.
    """
    from service.edge.authorities import Authorities, CertificateRefused  # only this asks what the edge asks

    _check(name)
    _check_tenant(tenant)
    try:
        given = x509.load_pem_x509_certificate(certificate)
        known = Authorities(settings.tls_dir)
        known.verify(given.public_bytes(serialization.Encoding.DER))
        known.require_unrevoked(given.public_bytes(serialization.Encoding.DER))
    except (ValueError, CertificateRefused):
        mend = "Use a client's certificate (clientAuth) in its time; `glottis clients trust-ca` takes one more authority."
        raise RequestRefused("this is no client's certificate of an authority that is trusted here", fix=mend) from None
    named, der = [role.value for role in roles], given.public_bytes(serialization.Encoding.DER)
    facts = {"client": name, "tenant": tenant, "roles": named, "cert_sha256": certificate_thumbprint(der), "jkt": jkt}
    return _registered(settings, "register_client", **facts)


def thumbprint(key: ec.EllipticCurvePrivateKey) -> str:
    """RFC 7638 thumbprint of a DPoP key's public half."""
    return jwk_thumbprint(public_jwk(key.public_key()))


def _with_new_keys(settings: Settings, name: str, registered: Callable[[bytes, str], Issued]) -> Path:
    """New keys in the client's folder, once `registered` took their request and thumbprint; else all is as before."""
    require_running(settings)  # before anything is made
    folder = settings.client_dir(name)
    private, request = certificates.new_request()
    dpop = ec.generate_private_key(ec.SECP256R1())
    me, unfinished = Account.current(), folder.with_name(f".{name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    me.folder(unfinished)
    try:
        me.file(unfinished / "client.key", private)
        me.file(unfinished / "dpop.key", certificates.private_pem(dpop))
        me.file(unfinished / "ca.pem", (settings.officer_dir / "ca.pem").read_bytes())
        try:
            issued = registered(request, thumbprint(dpop))
        except ClientAwaitsOfficers as waits:
            me.file(unfinished / "client.pem", waits.certificate)
            shutil.rmtree(_requested(settings, name), ignore_errors=True)
            unfinished.rename(_requested(settings, name))
            raise
        me.file(unfinished / "client.pem", issued.certificate)
        _in_place(settings, unfinished, issued.client)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _in_place(settings: Settings, unfinished: Path, client: Mapping[str, Any]) -> None:
    """The keys of a client that is registered, where it finds them."""
    known = {"client_id": client["client"], "tenant": client["tenant"], "roles": client["roles"]}
    facts = json.dumps(known | {"base_url": settings.public_base_url}, indent=2) + "\n"
    Account.current().file(unfinished / "client.json", facts)
    folder = settings.client_dir(str(client["client"]))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _requested(settings: Settings, name: str) -> Path:
    """Where a development client's new keys wait for officers."""
    folder = settings.client_dir(name)
    return folder.with_name(f".{name}.requested")


def _issued(pem: bytes, settings: Settings, registering: str, **facts: Any) -> dict[str, Any]:
    """`_registered` for a certificate that was just issued; it goes along where officers are awaited."""
    try:
        return _registered(settings, registering, **facts)
    except ClientAwaitsOfficers as waits:
        waits.certificate = pem
        raise


def _certificate(settings: Settings, request: bytes, name: str) -> tuple[bytes, str]:
    """The certificate (PEM) for a request, and its x5t#S256."""
    _check(name)
    officer = establish(settings.state_dir, settings.site).officer
    pem = str(step.call(settings, officer, "issue", request=request.decode(errors="replace"), client=name)["pem"]).encode()
    return pem, certificate_thumbprint(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER))


def _registered(settings: Settings, registering: str, **facts: Any) -> dict[str, Any]:
    """One command of the site process, which holds the keys that rows are written with."""
    require_running(settings)
    try:
        answer = ask(settings, registering, **facts)
    except SiteRefused as refused:
        if refused.code == ClientUnknown.code:
            raise ClientMissing(f"there is no client {facts.get('client', facts.get('name'))}") from refused
        raise
    if "request" in answer:
        raise ClientAwaitsOfficers(str(answer["request"]), int(answer["needed"]))
    return answer


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ClientNameRefused(f"{name!a} is no client name")


def _check_tenant(tenant: str) -> None:
    if tenant_of(tenant) is None:
        raise TenantRefused(f"{tenant!a} is no tenant's name")
