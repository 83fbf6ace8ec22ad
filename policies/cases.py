"""Tables of cases beside the policies: what each policy must decide, as rows that people read and `glottis policy test` runs.

A row names what differs from an honest request: `{"name", "action", "client", "voice", "consent", "territory", "left",
"bound", "live", "approver", "for", "broken_glass", "at", "allowed", "decided_by"}`, of which all but `name`, `action`, `allowed`
and `decided_by` may be left out. Null: there is no such row. A client may be a `browser`, and be limited to the voice that is
asked for (`own_voice`). `approver`: how a second client, which approved, differs from an honest one. `at`: an ISO time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from policies.authority import Client, ClientState, Role, Voice, VoiceState, key_alone
from policies.consent import EVERYWHERE, Consent, ConsentState
from policies.engine import SHIPPED, Decision, PolicyEngine, Question
from policies.errors import PolicySetInvalid
from policies.grants import Binding, Purpose
from policies.quotas import Left

TENANT = "acme"
TERRITORY = "DE"
NOW = datetime(2026, 5, 1, tzinfo=UTC)
_CLIENT = Client("app", TENANT, "A" * 43, "B" * 43, tuple(Role), ClientState.ACTIVE, 1)
APPROVER = Client("second", TENANT, "C" * 43, "D" * 43, (Role.APPROVER,), ClientState.ACTIVE, 1)
_CONSENT = Consent(
    consent_id=UUID(int=1),
    tenant=TENANT,
    subject="One",
    purposes=("speak", "compare"),
    territory=(EVERYWHERE,),
    expires_at=NOW + timedelta(days=1),
    evidence_sha256="0" * 64,
    state=ConsentState.ACTIVE,
    created_at=NOW,
    row_version=1,
)
_VOICE = Voice(UUID(int=2), TENANT, "One", _CONSENT.consent_id, VoiceState.ACTIVE, UUID(int=3), 1, NOW, 1)
_LEFT = Left(requests=100, characters=100, seconds=100, attempts=100)
HONEST = Question(Purpose.SPEAK, _CLIENT, _VOICE, _CONSENT, TERRITORY, NOW.timestamp(), _LEFT)
"""A request that nothing speaks against: a client with every role, its own voice, a consent for everywhere."""

_STATES = {Client: ClientState, Voice: VoiceState, Consent: ConsentState}
_MEMBERS = frozenset(
    {
        *("name", "action", "allowed", "decided_by", "client", "voice", "consent", "territory", "left", "bound", "live"),
        *("approver", "for", "broken_glass", "at"),
    }
)
_NEEDED = frozenset({"name", "action", "allowed", "decided_by"})
RowValue = TypeVar("RowValue", Client, Voice, Consent)


@dataclass(frozen=True)
class Case:
    """One row: the question, and what must come out."""

    table: str
    name: str
    question: Question
    expected: Decision

    def __str__(self) -> str:
        return f"{self.table}: {self.name}"


@dataclass(frozen=True)
class Failure:
    """A row that came out otherwise."""

    case: Case
    found: Decision


def question(row: Mapping[str, Any]) -> Question:
    """The honest request with what `row` says differs. Raises KeyError, TypeError or ValueError for what does not fit."""
    return replace(
        HONEST,
        purpose=Purpose(row["action"]),
        client=_changed(_CLIENT, row.get("client", {})),
        voice=None if row.get("voice", {}) is None else _changed(_VOICE, row.get("voice", {})),
        consent=None if row.get("consent", {}) is None else _changed(_CONSENT, row.get("consent", {})),
        territory=row.get("territory", TERRITORY),
        left=replace(_LEFT, **row.get("left", {})),
        bound=Binding(row.get("bound", Binding.BOTH)),
        live=row.get("live", False),
        approver=None if row.get("approver") is None else _changed(APPROVER, row["approver"]),
        beneficiary=row.get("for", "app2") if row["action"] == Purpose.APPROVE else None,
        broken_glass=frozenset(row.get("broken_glass", ())),
        now=datetime.fromisoformat(row["at"]).timestamp() if "at" in row else HONEST.now,
    )


def tables(folder: Path = SHIPPED) -> tuple[Case, ...]:
    """Every row of `cases/*.json` in the folder of a set. Raises PolicySetInvalid for a table that cannot be read."""
    return tuple(case for file in sorted((folder / "cases").glob("*.json")) for case in parsed(file.name, file.read_text()))


def failures(engine: PolicyEngine, cases: Iterable[Case]) -> list[Failure]:
    """The rows whose decision, or whose deciding policies, are not those expected."""
    decided = ((case, engine.decide(case.question)) for case in cases)
    return [Failure(case, found) for case, found in decided if found != case.expected]


def uncovered(engine: PolicyEngine, cases: Iterable[Case]) -> list[str]:
    """Ids of policies that no row expects to decide: nothing would notice if they were lost."""
    return sorted(set(engine.ids) - {name for case in cases for name in case.expected.decided_by})


def parsed(name: str, text: str) -> Iterator[Case]:
    """The rows of one table, from its file's name and content. Raises PolicySetInvalid."""
    try:
        for row in json.loads(text)["cases"]:
            if not _NEEDED <= row.keys() <= _MEMBERS:
                raise ValueError(f"members of {row.get('name')!r}")
            yield Case(Path(name).stem, str(row["name"]), question(row), Decision(row["allowed"], tuple(row["decided_by"])))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise PolicySetInvalid(f"{Path(name).name}: {problem}") from None


def _changed(honest: RowValue, row: Mapping[str, Any]) -> RowValue:
    change: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    if change.pop("browser", False):
        change["cert_sha256"] = key_alone(_CLIENT.jkt)
    if change.pop("own_voice", False):
        change["voice_id"] = _VOICE.voice_id
    if "state" in change:
        change["state"] = _STATES[type(honest)](change["state"])
    if "expires_in" in change:
        change["expires_at"] = NOW + timedelta(seconds=change.pop("expires_in"))
    return replace(honest, **change)
