"""Broken glass through the running system: filed, signed by two officers, used by the vault, over: a stale peer, and a version
that may be known to others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hsm_fixtures import in_own_process
from installation import Installation
from sqlalchemy import text

from keyvault.key_uses import Place, acting
from keyvault.records import RecordMac
from keyvault.sync.store import SyncStore, lasting
from policies.engine import SHIPPED
from policies.sets.policy_set import APPROVED_ROLES, PERMISSIONS
from service import clients
from service.audit_bundles import verify_bundle
from service.bringup import embedded_postgres, superuser_password
from service.cli.main import cli
from service.client import Refused, VoiceClient
from service.errors import ClientAwaitsOfficers
from service.holding import held
from service.isolation import establish
from service.masters import connect, serving_token
from service.schema import opened
from service.settings import Settings
from service.site import Site
from service.sync.admin import ask

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
SPAN_S = 45.0


def glottis(settings: Settings, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, arguments, env=settings.environ(), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def approve(settings: Settings, request: str, *numbers: int) -> None:
    for number in numbers:
        glottis(settings, "approvals", "approve", request, "--key", str(settings.officer_dir / f"officer-{number}.pem"), "--yes")


def said_of(site: Installation, voice: str) -> str:
    try:
        site.client("studio").speak(voice, "The quick brown fox.")
    except Refused as refused:
        return refused.code
    return "speaks"


def until(site: Installation, voice: str, wanted: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while (said := said_of(site, voice)) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    assert said == wanted


def recorded(settings: Settings, action: str) -> int:
    with opened(settings.role_url("owner")) as database, database.connect() as connection:
        bodies = [bytes(row.body) for row in connection.execute(text("SELECT body FROM intent"))]
    return sum(json.loads(body)["action"] == action for body in bodies)


def never_heard_for(environ: dict[str, str], hours: float) -> None:
    """What this site heard of the other last, as it would lie there after so many hours of silence."""
    settings = Settings.load(environ)
    database = connect(settings.role_url("vault"))
    with acting(Place.SITE), serving_token(settings, database, Place.SITE) as hsm, lasting(database) as transaction:
        store = SyncStore(RecordMac(hsm))
        heard = store.heard(transaction)
        assert heard is not None
        store.keep_heard(transaction, heard[0], datetime.now(UTC) - timedelta(hours=hours))


@contextmanager
def glass(site: Installation, voice: str, refusal: str, filed: Callable[[float], str]) -> Iterator[None]:
    """Two officers are needed, a cancelled request is over, and so is one whose time has come; the block runs while it holds."""
    settings = site.settings
    assert said_of(site, voice) == refusal
    first = filed(0.5)
    approve(settings, first, 1)
    assert said_of(site, voice) == refusal, "one officer is not enough"
    approve(settings, first, 2)
    assert said_of(site, voice) == "speaks"
    yield
    glottis(settings, "approvals", "cancel", first, "--yes")
    assert said_of(site, voice) == refusal, "it was cancelled"
    second, ends = filed(SPAN_S / 3600), time.monotonic() + SPAN_S
    assert second != first
    approve(settings, second, 2, 3)
    assert said_of(site, voice) == "speaks"
    time.sleep(max(0.0, ends - time.monotonic()) + 0.5)
    assert said_of(site, voice) == refusal, "its time is over"


def marked_clients_and_details(site: Installation, folder: Path) -> None:
    """By the command line at two sites: a marked role, new keys that wait for officers, and details for one recipient."""
    settings, own = site.settings, folder / "set"
    (own / "cases").mkdir(parents=True)
    for name in (PERMISSIONS, "cases/roles.json"):
        (own / name).write_text((SHIPPED / name).read_text())
    (own / APPROVED_ROLES).write_text('{"client_roles": ["enroller"]}')
    filed = json.loads(glottis(settings, "policy", "propose", str(own), "--json", code=75))
    assert filed["needed"] == 2
    approve(settings, filed["request"], 1, 3)
    glottis(settings, "policy", "activate", filed["request"], "--yes")
    with pytest.raises(ClientAwaitsOfficers) as waits:
        clients.add(settings, "late", tenant="acceptance", roles=[clients.Role.ENROLLER, clients.Role.READER])
    with pytest.raises(ClientAwaitsOfficers):
        clients.finish(settings, "late", waits.value.request)
    assert not settings.client_dir("late").exists()
    approve(settings, waits.value.request, 1, 2)
    glottis(settings, "clients", "add", "late", "--request", waits.value.request)
    with VoiceClient.from_folder(settings.client_dir("late")) as late:
        late.voices()

    key, public, sealed, bundle = (folder / name for name in ("key", "public", "sealed", "bundle"))
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    asked = ask(settings, "details_request", start=0, end=5, tenant="", recipient=public.read_text(), reason="a drill")
    approve(settings, asked["request"], 1, 2)
    glottis(settings, "audit", "export-details", "--request", asked["request"], "--out", str(sealed))
    glottis(settings, "audit", "open-details", str(sealed), "--key", str(key), "--out", str(bundle))
    assert verify_bundle(bundle, Site.load(settings.site_file).audit_key.fingerprint).holds
    assert "disclosed" in bundle.read_text()


def test_officers_break_the_glass_and_it_closes_again(new_installation: Callable[..., Installation], tmp_path: Path) -> None:
    site = new_installation(GLOTTIS_SITES="2", GLOTTIS_VAULT_WORKERS="1", GLOTTIS_PEER_AGE_HOURS="1")
    site.start()
    settings = site.settings
    voice = site.voice()
    until(site, voice, "speaks")
    second = site.voice("2414")
    until(site, second, "speaks")
    marked_clients_and_details(site, tmp_path)

    site.stop()
    postgres = embedded_postgres(settings, establish(settings.state_dir, settings.site))
    assert postgres is not None
    with held(settings), postgres.serving(superuser_password(settings)):
        in_own_process(never_heard_for, settings.environ(), 2.0)
    site.settings = replace(settings, peer="external")  # alone: the other site is not started
    site.start()
    with glass(site, voice, "stale_epoch", lambda hours: str(ask(settings, "break_glass", hours=hours, reason="flood")["request"])):
        shown = glottis(settings, "approvals", "list")
        assert "site.break-glass" in shown

    site.stop()
    site.settings = settings
    site.start()
    until(site, voice, "speaks")
    glottis(settings, "keys", "ceremony", "rehearse")
    glottis(settings, "keys", "rotate", "--yes")
    glottis(settings, "keys", "compromise", "main/1", "--reason", "seen in a dump", "--yes")

    def open_compromised(hours: float) -> str:
        return str(ask(settings, "break_glass", hours=hours, reason="a last message", version="ring/main/1")["request"])

    with glass(site, voice, "key_compromised", open_compromised):
        newer = site.voice("2033")
        until(site, newer, "speaks")
        asked = json.loads(glottis(settings, "voices", "rekey", second, "--yes", "--json", code=75))["request"]
        approve(settings, asked, 1, 2)
        glottis(settings, "voices", "rekey", second, "--yes")
        until(site, second, "speaks")
    assert recorded(settings, "key.glass_broken") == 3
    assert said_of(site, second) == "speaks", "its new key lies under the version that serves"
    assert said_of(site, newer) == "speaks", "what lies under another version needs no glass"
    glottis(settings, "audit", "check")
