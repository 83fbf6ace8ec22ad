"""A welcome is read whole before anything of it is written, and one that is malformed anywhere is refused as such."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from keyvault.approvals import Officer
from keyvault.ceremony import TokenFacts
from keyvault.hsm import KeyName
from keyvault.sync.roster import Roster, SiteKey
from service import sites
from service.certificates import make_authority
from service.errors import IntroductionRefused
from service.isolation import Account
from service.settings import Settings
from service.site import Site

CLUSTER = UUID(int=7)
HERE = Account.current()
ALONE: Any = SimpleNamespace(vault=HERE, edge=HERE, officer=HERE)


def spki(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path / "state")})
    found.state_dir.mkdir()
    for folder in (found.link_dir, found.tls_dir):
        folder.mkdir()
    return found


@pytest.fixture
def welcome() -> dict[str, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    people = tuple(Officer(name, (spki(ec.generate_private_key(ec.SECP256R1())),)) for name in ("ada", "bo"))
    members = tuple(SiteKey(name, name, spki(ec.generate_private_key(ec.SECP256R1()))) for name in ("a", "b"))
    roster = Roster(str(CLUSTER), 1, members, people, 2)
    certificate = make_authority(key, "x").public_bytes(Encoding.PEM).decode()
    named = dict.fromkeys(("authority", "link", "edge"), certificate)
    return {**named, "roster": base64.b64encode(roster.encode()).decode(), "history": []}


def own() -> Site:
    signer = {KeyName.CHECKPOINT_SIGNER: spki(Ed25519PrivateKey.generate())}
    return replace(Site(UUID(int=1), {"log": TokenFacts("log", "1", (), signer)}), name="b")


ODD = [*((name, None) for name in ("roster", "link", "edge", "authority"))]
ODD += [(name, odd) for name in ("roster", "link", "edge", "authority") for odd in (7, "", "AAAA")]
ODD += [("history", 7), ("history", ["AAAA"]), ("history", ["é"]), ("history", [None])]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_malformed_welcome_is_refused_and_writes_nothing(
    settings: Settings, welcome: dict[str, Any], name: str, value: object
) -> None:
    given = {key: said for key, said in welcome.items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(IntroductionRefused):
        sites.enter(settings, ALONE, own(), json.loads(json.dumps(given)))
    assert [path for path in settings.state_dir.rglob("*") if path.is_file()] == []


def test_a_whole_one_is_taken(settings: Settings, welcome: dict[str, Any]) -> None:
    assert sites.enter(settings, ALONE, own(), welcome).cluster == CLUSTER
    assert settings.roster_file.exists()
    assert Site.load(settings.site_file).cluster == CLUSTER
