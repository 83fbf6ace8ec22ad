"""What is done in a process and under a user of its own: ceremonies, the authority, the schema, clients' registration.

`python -m service.steps` reads one JSON request on standard input and writes one JSON answer as its last line. PINs travel
on that pipe, never in arguments or variables. `service.step.call` is the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from keyvault import ceremony, softhsm
from keyvault.breaker import unheard
from keyvault.errors import PromiseBroken
from keyvault.guarded_hsm import GuardedHsm
from keyvault.hsm import Hsm, KeyName, RingMaster
from keyvault.key_uses import Place
from keyvault.locked import LockedBuffer
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import Module, Token, TokenConfig
from keyvault.quirks import chosen
from keyvault.refusals import answers_to_unwraps
from policies.audit.errors import AuditTampered
from service import certificates
from service.authority_key import TokenPrivateKey
from service.holding import held
from service.isolation import Account, harden_process
from service.logs import configure_logging
from service.secrets import Secret
from service.settings import Settings
from service.site import ROTATION, Site, facts_json, holds_masters_twice, module, token_config, token_facts

Answer = dict[str, Any]


def make_token(settings: Settings, *, name: str, folder: str, so_pin: str, user_pin: str) -> Answer:
    """Make the token `name` in `folder`, ready to be renamed to its place: PIN file, keys, and its public facts beside them."""
    made, place, library = Path(folder), settings.token_dir(name), module(settings)
    Account.current().file(made / "pin", user_pin + "\n")
    serial = softhsm.make_token(library, made, f"glottis-{name}", so_pin, user_pin)
    config = TokenConfig(library, f"glottis-{name}", serial, made)
    if name == "serving":
        # Where several tokens are to hold it, they get the first master together, in a ceremony of its own.
        alone = settings.sites == 1 and not holds_masters_twice(settings)
        facts = ceremony.serving_token(config, so_pin, user_pin, ring="main" if alone else None)
    elif name == ROTATION:
        facts = ceremony.TokenFacts(config.label, serial)  # its masters come by the ceremony
    elif name == "log":
        facts = ceremony.log_token(config, user_pin)
    else:
        facts = ceremony.officer_token(config, user_pin)
    conf = made / "softhsm2.conf"
    conf.write_text(conf.read_text().replace(str(made), str(place)))
    (made / "token.json").write_text(json.dumps(facts_json(facts)) + "\n")
    os.sync()  # the module does not: a key that the database knows must outlive a power cut
    return {}


def make_authority(settings: Settings, *, installation: str) -> Answer:
    """The certificate of the officer token's authority."""
    with _officer(settings) as hsm:
        key = TokenPrivateKey(hsm, KeyName.CERTIFICATE_AUTHORITY)
        return {"pem": _pem(certificates.make_authority(key, installation))}


def issue(settings: Settings, *, request: str, client: str | None = None, hosts: Sequence[str] = ()) -> Answer:
    """A certificate for a client's name or for a server's hosts."""
    authority = x509.load_pem_x509_certificate((settings.officer_dir / "ca.pem").read_bytes())
    with _officer(settings) as hsm:
        key = TokenPrivateKey(hsm, KeyName.CERTIFICATE_AUTHORITY)
        if client is not None:
            return {"pem": _pem(certificates.issue_client(key, authority, request.encode(), client))}
        return {"pem": _pem(certificates.issue_server(key, authority, request.encode(), hosts))}


def issue_site(settings: Settings, *, request: str, name: str) -> Answer:
    """A certificate for one end of the link between the sites."""
    authority = x509.load_pem_x509_certificate((settings.officer_dir / "ca.pem").read_bytes())
    with _officer(settings) as hsm:
        key = TokenPrivateKey(hsm, KeyName.CERTIFICATE_AUTHORITY)
        return {"pem": _pem(certificates.issue_site(key, authority, request.encode(), name))}


def prepare_site(settings: Settings) -> Answer:
    """Everything in the second site's folder that needs neither the first site nor a database; its introduction."""
    from service import bringup, sites  # they call steps themselves

    with held(settings):
        made = bringup.prepare_files(settings)
        return sites.introduce(settings, made.isolation, made.site).to_json()


def prepare_schema(_: Settings, *, admin_url: str | None, owner_url: str, passwords: Mapping[str, str]) -> Answer:
    """Make roles and database where passwords are given, then migrate."""
    from service import schema  # only this step pays for alembic

    if passwords:
        schema.provision(admin_url, owner_url, passwords)
    schema.migrate(owner_url)
    return {}


def voices(settings: Settings, *, call: str, request: Mapping[str, Any]) -> Answer:
    """One of the operator's calls on voices; a new key is the only one that opens any."""
    from service import voices as known

    return known.run(settings, call, request)


def check_audit(settings: Settings) -> Answer:
    """Every audit record's MAC, counter and leaf: the number of `rows`, or the first bad one under `tampered`."""
    from service.audit_records import check_records

    try:
        return {"rows": check_records(settings)}
    except AuditTampered as found:
        return {"tampered": found.detail}


def make_checkpoint_key(settings: Settings) -> Answer:
    """Make the next version of the log's checkpoint key, which the running log takes up; its number."""
    from service.log.keys import make_next

    site = Site.load(settings.site_file)
    token = Pkcs11Hsm.open(token_config(settings, "log", site.tokens["log"]), settings.log_pin.read(), expected_masters=())
    hsm = GuardedHsm(token, Place.LOG_KEY, unheard)
    try:
        return {"version": make_next(hsm)}
    finally:
        hsm.close()


def probe_token(settings: Settings, *, name: str) -> Answer:
    """Open a token as its process would: audit, refusal probes, and for the serving token a real seal, unwrap and open."""
    site = Site.load(settings.site_file)
    pin = {"serving": settings.serving_pin, "log": settings.log_pin}.get(name) or Secret(settings.pin_file(name))
    config, allowed = token_config(settings, name, site.tokens[name]), site.tokens[name].masters
    token = Pkcs11Hsm.open(config, pin.read(), expected_masters=allowed, required_masters=())
    hsm = GuardedHsm(token, Place.PROBE, unheard)
    try:
        for master in hsm.masters() if name == "serving" else ():
            _seal_and_open(hsm, master)
        return {"masters": [master.label for master in hsm.masters()], "profile": token.profile.name}
    finally:
        hsm.close()


def _seal_and_open(hsm: Hsm, master: RingMaster) -> None:
    with LockedBuffer(4096) as plain, LockedBuffer(4096) as opened:
        plain.view(0, 32)[:] = 7
        with hsm.new_dek(master) as dek:
            sealed = dek.seal(plain, 32, b"glottis doctor")
            wrapped = dek.wrapped
        with hsm.open_dek(master, wrapped) as dek:
            length = dek.open_into(sealed, b"glottis doctor", opened)
        if length != 32 or bytes(opened.view(0, 32)) != bytes([7]) * 32:
            raise PromiseBroken(f"{master.label} does not open what it sealed")


def try_unwraps(settings: Settings) -> Answer:
    """With the serving PIN, straight at the token: what it answers to the right unwrap and to weaker ones."""
    site = Site.load(settings.site_file)
    config = token_config(settings, "serving", site.tokens["serving"])
    library = Module(config.module, config.folder)
    try:
        kind = chosen(config.profile, *library.description).masters()
        session = Token(library, config, settings.serving_pin.read()).open_session()
        return dict(answers_to_unwraps(session, site.masters[-1], kind))
    finally:
        library.stop()


def _of(module: str, name: str) -> Callable[..., Answer]:
    """A step that stands in another module, which is loaded when the step is done."""

    def step(settings: Settings, **said: Any) -> Answer:
        answer: Answer = getattr(importlib.import_module(module), name)(settings, **said)
        return answer

    return step


STEPS: Mapping[str, Callable[..., Answer]] = {
    "try_unwraps": try_unwraps,
    "make_token": make_token,
    "make_authority": make_authority,
    "issue": issue,
    "issue_site": issue_site,
    "prepare_site": prepare_site,
    "prepare_schema": prepare_schema,
    "make_checkpoint_key": make_checkpoint_key,
    "probe_token": probe_token,
    "check_audit": check_audit,
    "adoption_request": _of("service.restoring", "adoption_request"),
    "adopt_restored": _of("service.restoring", "adopt_restored"),
    "reanchor_request": _of("service.restoring", "reanchor_request"),
    "reanchor_approved": _of("service.restoring", "reanchor_approved"),
    "log_ends": _of("service.restoring", "log_ends"),
    "move_log": _of("service.log_anchor", "move"),
    "voices": voices,
}


@contextmanager
def _officer(settings: Settings) -> Iterator[Hsm]:
    facts = token_facts(json.loads((settings.token_dir("officer") / "token.json").read_text()))
    pin = Secret(settings.pin_file("officer")).read()
    token = Pkcs11Hsm.open(token_config(settings, "officer", facts), pin, expected_masters=())
    hsm = GuardedHsm(token, Place.AUTHORITY, unheard)
    try:
        yield hsm
    finally:
        hsm.close()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def main() -> None:
    settings = Settings.load(os.environ)
    configure_logging(settings.worker, settings.log_level)
    harden_process()
    request = json.load(sys.stdin)
    answer = STEPS[request.pop("step")](settings, **request)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
