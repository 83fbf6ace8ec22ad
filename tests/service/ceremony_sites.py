"""Two sites' state folders with real SoftHSM tokens that hold every key but a master, two officers' keys, and their roster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hsm_fixtures import SO_PIN, USER_PIN, in_own_process

from keyvault import ceremony, softhsm
from keyvault.approvals import Officer
from keyvault.ceremony import TokenFacts
from keyvault.hsm import KeyName
from keyvault.pkcs11_start import TokenConfig
from keyvault.sync.roster import Roster, SiteKey
from service.ceremonies import Desk, TokenPins
from service.officers import OfficerKey, new_key
from service.settings import Settings
from service.site import Site

PEOPLE = ("ada", "bo", "cy")


@dataclass(frozen=True)
class CeremonySites:
    a: Settings
    b: Settings
    roster: Roster
    keys: dict[str, OfficerKey]
    folder: Path

    def desk(self, site: str, person: str, so_pin: str = SO_PIN) -> Desk:
        settings = self.a if site == "a" else self.b
        return Desk(settings, self.roster, self.keys[person], TokenPins(lambda: so_pin, lambda: USER_PIN))


def serving_token(folder: Path) -> TokenFacts:
    module = softhsm.find_module()
    folder.parent.mkdir(parents=True)
    serial = softhsm.make_token(module, folder, "glottis-serving", SO_PIN, USER_PIN)
    return ceremony.serving_token(TokenConfig(module, "glottis-serving", serial, folder), SO_PIN, USER_PIN, ring=None)


def make_sites(folder: Path) -> CeremonySites:
    cluster, found = uuid4(), {}
    first = Settings.load({"GLOTTIS_STATE_DIR": str(folder / "a")})
    for name, settings in (("a", first), ("b", first.of_site_b())):
        facts = in_own_process(serving_token, settings.token_dir("serving"))
        settings.pin_file("serving").write_text(USER_PIN + "\n")
        settings.pin_file("serving").chmod(0o600)
        settings.officer_dir.mkdir(mode=0o700)
        (settings.officer_dir / "serving.so-pin").write_text(SO_PIN + "\n")
        (settings.officer_dir / "serving.so-pin").chmod(0o600)
        checkpoint = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        log = TokenFacts("glottis-log", "0", (), {KeyName.CHECKPOINT_SIGNER: checkpoint})
        settings.site_file.write_text(Site(cluster, {"serving": facts, "log": log}, name).to_json())
        found[name] = (settings, SiteKey(name, facts.serial, facts.public_keys[KeyName.SITE_IDENTITY]))
    keys = {person: new_key(folder / f"{person}.pem", None) for person in PEOPLE}
    officers = tuple(Officer(person, (key.public,)) for person, key in keys.items())
    roster = Roster(str(cluster), 1, tuple(key for _, key in found.values()), officers, 2)
    (folder / "roster").write_bytes(roster.encode())
    return CeremonySites(found["a"][0], found["b"][0], roster, keys, folder)
