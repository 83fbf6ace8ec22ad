"""The public facts of one site: which tokens it has, what they must hold, and who signs its audit log. Nothing is secret."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from keyvault.errors import HsmUnavailable
from keyvault.hsm import KeyName, RingMaster
from policies.audit.checkpoint import verifier_key
from policies.audit.verify import VerifierKey
from service.errors import HalfMade
from service.isolation import Isolation
from service.settings import Settings

if TYPE_CHECKING:  # most commands only read facts: they need not load the HSM's libraries
    from keyvault.ceremony import TokenFacts
    from keyvault.pkcs11_start import TokenConfig

_FORMAT = 1
ROTATION = "rotation"
"""The token that re-wraps, by its folder's name."""


@dataclass(frozen=True)
class Site:
    """`tokens` by their folder's name: `serving`, `log`, `officer` at the first site alone, and `rotation` where masters are
    not TRUSTED. `name` as in the roster."""

    cluster: UUID
    tokens: Mapping[str, TokenFacts] = field(repr=False)
    name: str = "a"

    @property
    def origin(self) -> str:
        """The audit log's name in its checkpoints: each site keeps a log of its own."""
        return f"glottis.{self.cluster}/audit" + ("" if self.name == "a" else f"-{self.name}")

    @property
    def audit_key(self) -> VerifierKey:
        """Who signs the audit log; its `fingerprint` is what an auditor pins."""
        return verifier_key(self.origin, self.tokens["log"].public_keys[KeyName.CHECKPOINT_SIGNER])

    @property
    def split(self) -> bool:
        """Whether each master is in two tokens, because none is TRUSTED: then a token with a PIN of its own re-wraps."""
        return ROTATION in self.tokens

    @property
    def masters(self) -> tuple[RingMaster, ...]:
        """The ring masters that the serving token must hold."""
        return self.tokens["serving"].masters

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `site.json`. Raises HalfMade where it is missing or not whole."""
        try:
            facts = json.loads(path.read_text())
            if facts["format"] != _FORMAT:
                raise HalfMade(f"{path} has the format {facts['format']}", fix="Use the Glottis version that wrote it.")
            tokens = {name: token_facts(found) for name, found in facts["tokens"].items()}
            return cls(UUID(facts["cluster"]), tokens, str(facts.get("site", "a")))
        except FileNotFoundError:
            mend = "Start it once: glottis up. If it runs elsewhere, name its folder in GLOTTIS_STATE_DIR in this terminal too."
            raise HalfMade(f"{path} is missing: this state folder was never started", fix=mend) from None
        except (KeyError, TypeError, ValueError) as error:
            raise HalfMade(f"{path} cannot be read", fix=f"Delete {path} and start again: it is written anew.") from error

    def to_json(self) -> str:
        """The file's content. The audit key stands there for people to read; it is taken from the token's facts."""
        tokens = {name: facts_json(facts) for name, facts in self.tokens.items()}
        audit = {"origin": self.origin, "key": self.audit_key.text, "fingerprint": self.audit_key.fingerprint}
        facts = {"format": _FORMAT, "cluster": str(self.cluster), "site": self.name, "tokens": tokens, "audit": audit}
        return json.dumps(facts, indent=2) + "\n"


def announce(settings: Settings, isolation: Isolation, master: RingMaster) -> None:
    """Name a master as one that the serving token may hold: before that, every process refuses a token that does. Idempotent."""
    site = Site.load(settings.site_file)
    for name in ("serving", ROTATION) if site.split else ("serving",):
        site = _with_masters(settings, isolation, site, name, {*site.tokens[name].masters, master})


def forget(settings: Settings, isolation: Isolation, master: RingMaster) -> None:
    """Name a master as one that the rotation token holds no more. Idempotent."""
    site = Site.load(settings.site_file)
    _with_masters(settings, isolation, site, ROTATION, {*site.tokens[ROTATION].masters} - {master})


def rotation_holds(settings: Settings, master: RingMaster) -> bool:
    """Whether this site's rotation token, if there is one, holds the master as far as anybody said (`forget`)."""
    site = Site.load(settings.site_file)
    return site.split and master in site.tokens[ROTATION].masters


def _with_masters(settings: Settings, isolation: Isolation, site: Site, name: str, masters: Set[RingMaster]) -> Site:
    if masters == {*site.tokens[name].masters}:
        return site
    known = replace(site.tokens[name], masters=tuple(sorted(masters)))
    isolation.owner(name).file(settings.token_dir(name) / "token.json", json.dumps(facts_json(known)) + "\n")
    told = replace(site, tokens={**site.tokens, name: known})
    isolation.officer.file(settings.site_file, told.to_json(), mode=0o644)
    return told


def facts_json(facts: TokenFacts) -> dict[str, Any]:
    """A token's facts as JSON."""
    return {
        "label": facts.label,
        "serial": facts.serial,
        "masters": [{"ring": master.ring, "version": master.version} for master in facts.masters],
        "public_keys": {name.value: base64.b64encode(key).decode() for name, key in facts.public_keys.items()},
    }


def token_facts(found: Mapping[str, Any]) -> TokenFacts:
    """The same, read back. Raises KeyError, TypeError or ValueError."""
    from keyvault.ceremony import TokenFacts

    return TokenFacts(
        str(found["label"]),
        str(found["serial"]),
        tuple(RingMaster(str(master["ring"]), int(master["version"])) for master in found["masters"]),
        {KeyName(name): base64.b64decode(key, validate=True) for name, key in found["public_keys"].items()},
    )


def module(settings: Settings) -> Path:
    """The PKCS#11 module: the one that the settings name and no other, or the SoftHSM found. Raises HsmUnavailable."""
    named = settings.pkcs11_module
    if named is None:
        from keyvault.softhsm import find_module

        return find_module()
    if not named.is_file():
        raise HsmUnavailable(f"GLOTTIS_PKCS11_MODULE names {named}, which does not exist")
    return named


def token_config(settings: Settings, name: str, facts: TokenFacts) -> TokenConfig:
    """Where one of this site's tokens is."""
    from keyvault.pkcs11_start import TokenConfig

    place, profile = settings.token_dir(name), settings.pkcs11_profile
    return TokenConfig(module(settings), facts.label, facts.serial, place, profile=profile, rotation=name == ROTATION)


def holds_masters_twice(settings: Settings) -> bool:
    """Whether these settings name a profile whose masters are not TRUSTED. Raises ModuleRefused for a profile that is none."""
    if settings.pkcs11_profile is None:
        return False
    from keyvault.quirks import chosen

    return not chosen(settings.pkcs11_profile).trusted_masters
