"""A set of policies as one value with exact bytes: what officers sign, and what every worker decides by.

A set replaces the permissions that ship (`roles.cedar`) and adds policies of its own. Every prohibition that ships, and the
schema, are loaded from the package beside any set, so that no set can unload them. A set without files is the one that ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from policies import cases, jws
from policies.authority import Role
from policies.engine import SHIPPED, Policy, PolicyEngine
from policies.errors import PolicySetInvalid

PERMISSIONS = "roles.cedar"
"""The one shipped file of policies that a set replaces."""
APPROVED_ROLES = "officers.json"
"""In a set's folder: `{"client_roles": […]}`, the roles that a client gets only with officers' approval (`ca.issue`)."""
MAX_BYTES = 1 << 19
_FORMAT = 1
_SCHEMA = "schema.cedarschema"


@dataclass(frozen=True)
class PolicySet:
    """The files of a set by name, sorted: `*.cedar`, `cases/*.json` and `officers.json`; empty for the set that ships."""

    files: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read a folder: the files that ship may stand in it unchanged and are left out. Raises PolicySetInvalid."""
        try:
            found = {path.relative_to(folder).as_posix(): path.read_text() for path in _sources(folder)}
        except (OSError, UnicodeDecodeError) as problem:
            raise PolicySetInvalid(f"{folder}: {problem}") from None
        for name in found.keys() & _base().keys():
            if found.pop(name) != _base()[name]:
                raise PolicySetInvalid(
                    f"{name} ships with Glottis and cannot be changed: put policies of your own into another file"
                )
        if not any(name.endswith(".cedar") for name in found):
            raise PolicySetInvalid(f"{folder} holds no policy beside those that ship")
        return cls._checked(found)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The set of these bytes, exactly as `encode` writes them. Raises PolicySetInvalid."""
        try:
            said = json.loads(data)
            found = cls._checked({str(name): str(text) for name, text in said["files"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            raise PolicySetInvalid(f"the bytes are no set of policies: {type(problem).__name__}") from None
        if found.encode() != data:
            raise PolicySetInvalid("the set is spelled in another way")
        return found

    @classmethod
    def _checked(cls, files: Mapping[str, str]) -> Self:
        for name in files:
            if name in _base() or not _is_name(name):
                raise PolicySetInvalid(f"a set has no file {name!a}")
        found = cls(tuple(sorted(files.items())))
        if len(found.encode()) > MAX_BYTES:
            raise PolicySetInvalid(f"a set has at most {MAX_BYTES} bytes")
        return found

    def encode(self) -> bytes:
        """JSON with sorted names and no spaces: what is hashed, signed and stored."""
        said = {"files": dict(self.files), "format": _FORMAT}
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the exact bytes: the set's name."""
        return sha256(self.encode()).digest()

    @property
    def shipped(self) -> bool:
        """Whether this is the set that comes with the package, whatever that is in the version that runs."""
        return not self.files

    @cached_property
    def approved_roles(self) -> frozenset[str]:
        """The roles that a client gets only with officers' approval; none in the set that ships. Raises PolicySetInvalid."""
        text = dict(self.files).get(APPROVED_ROLES)
        if text is None:
            return frozenset()
        try:
            said = jws.strict_json(text.encode())
            [name] = said
            return frozenset(Role(role).value for role in said[name]) if name == "client_roles" else _unknown(name)
        except (TypeError, ValueError) as problem:
            raise PolicySetInvalid(f"{APPROVED_ROLES}: {problem}") from None

    def engine(self) -> PolicyEngine:
        """The set beside every prohibition that ships, validated against the schema that ships. Raises PolicySetInvalid."""
        if self.shipped:
            return PolicyEngine.shipped()
        base = {name: text for name, text in _base().items() if name.endswith(".cedar")}
        own = {name: text for name, text in self.files if name.endswith(".cedar")}
        _ = self.approved_roles
        return PolicyEngine(_base()[_SCHEMA], "\n".join([*base.values(), *own.values()]))

    def check(self) -> PolicyEngine:
        """The engine, once every policy has its sentence and every table of cases holds. Raises PolicySetInvalid."""
        engine = self.engine()
        if mute := [found.id for found in engine.policies if not found.sentence]:
            raise PolicySetInvalid(f"no comment says what {', '.join(mute)} is for")
        if self.shipped:
            return engine
        rows = [row for name, text in self.files if name.startswith("cases/") for row in cases.parsed(name, text)]
        if failed := cases.failures(engine, rows):
            raise PolicySetInvalid("; ".join(f"{failure.case} comes out otherwise" for failure in failed))
        shipped = _forbidden()
        if permitted := [str(row) for row in shipped if engine.decide(row.question).allowed]:
            raise PolicySetInvalid(f"what ships as forbidden is allowed: {'; '.join(permitted)}")
        holding = [row for row in cases.tables() if engine.decide(row.question) == row.expected]
        if alone := cases.uncovered(engine, [*rows, *holding]):
            raise PolicySetInvalid(f"no row expects {', '.join(alone)} to decide")
        return engine


@dataclass(frozen=True)
class Change:
    """One policy that two sets do not have alike. `how`: `adds`, `takes away` or `changes`."""

    how: str
    policy: Policy


def changes(before: PolicySet, after: PolicySet) -> list[Change]:
    """What `after` decides by and `before` did not, or the other way round, by id. Raises PolicySetInvalid."""
    old, new = _by_id(before), _by_id(after)
    found = [Change("takes away", old[name][0]) for name in sorted(old.keys() - new.keys())]
    found += [Change("adds", new[name][0]) for name in sorted(new.keys() - old.keys())]
    return found + [Change("changes", new[name][0]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]


def _by_id(policies: PolicySet) -> dict[str, tuple[Policy, str]]:
    engine = policies.engine()
    return {policy.id: (policy, engine.text_of(policy.id)) for policy in engine.policies}


def _base() -> Mapping[str, str]:
    """What no set replaces, by name: the schema and every shipped file of policies but the permissions."""
    sources = [SHIPPED / _SCHEMA, *sorted(SHIPPED.glob("*.cedar"))]
    return {source.name: source.read_text() for source in sources if source.name != PERMISSIONS}


def _sources(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.cedar"))
    yield from sorted((folder / "cases").glob("*.json"))
    yield from (path for path in (folder / _SCHEMA, folder / APPROVED_ROLES) if path.exists())


def _is_name(name: str) -> bool:
    stem = name.removeprefix("cases/").removesuffix(".json" if name.startswith("cases/") else ".cedar")
    return name == APPROVED_ROLES or (name != stem and stem.replace("-", "").replace("_", "").isalnum())


def _forbidden() -> list[cases.Case]:
    """The shipped rows that a prohibition decides: they come out as denied whatever else is loaded."""
    prohibitions = {policy.id for policy in PolicyEngine.shipped().policies if policy.effect == "forbid"}
    return [row for row in cases.tables() if prohibitions >= set(row.expected.decided_by)]


def _unknown(name: Any) -> frozenset[str]:
    raise ValueError(f"no member {name!a} is known")
