"""Policies in Cedar: load, validate, decide. Whatever goes wrong while deciding is a denial.

Cedar skips a policy that fails to evaluate, even a prohibition, and may then allow; so an answer that comes with any
diagnostic error counts for nothing here.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import cedarpy

from policies import approval_errors, errors
from policies.authority import Client, ClientState, Voice, VoiceState, VoiceTerm
from policies.consent import Consent, ConsentState
from policies.errors import Denied, PolicySetInvalid
from policies.grants import ON_A_VOICE, OPENING, UNDER_CONSENT, Binding, Purpose
from policies.hours import within
from policies.quotas import Left

if TYPE_CHECKING:  # who only decides need not load the database's library
    from keyvault.database import Transaction

SHIPPED = Path(__file__).parent
"""The folder of the set that comes with this package: `schema.cedarschema`, `*.cedar`, `cases/*.json`."""
NO_PERMIT = "no-permit"
"""Stands for the deciding policy where nothing permitted."""
NOT_DECIDABLE = "not-decidable"
"""Stands for the deciding policy where the question did not fit the schema or a policy failed."""

_ENTITIES = 1024
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*', re.DOTALL)
"""Strings and comments, in which brackets and semicolons mean nothing."""
_BRACKETS = re.compile(r"[(){}\[\]]")
_MAX_NESTING, _MAX_POLICY = 64, 8192
_INTRODUCED = re.compile(r'(?P<comment>(?:^//[^\n]*\n)+)@id\("(?P<id>[^"]+)"\)', re.MULTILINE)
_REFUSALS: dict[str, type[Denied]] = {
    "base.tenant-isolation": errors.ForeignVoice,
    "base.client-active": errors.ClientInactive,
    "browser.own-voice": errors.ForeignVoice,
    "consent.tenant": errors.ForeignConsent,
    "base.voice-active": errors.VoiceSuspended,
    "consent.active": errors.ConsentWithdrawn,
    "consent.unexpired": errors.ConsentExpired,
    "consent.purpose": errors.ConsentPurpose,
    "consent.territory": errors.ConsentTerritory,
    "liveness.purpose": errors.ConsentPurpose,
    "dual-control.purpose": errors.ConsentPurpose,
    "hours.client": errors.OutsideHours,
    "hours.voice": errors.OutsideHours,
    "binding.voice": errors.ProofRequired,
    "binding.elsewhere": errors.ProofRequired,
    "break-glass.proof": errors.ProofRequired,
    "liveness.demanded": errors.LivenessRequired,
    "dual-control.own": approval_errors.ApprovalOwn,
    "dual-control.another": approval_errors.ApprovalOwn,
    "dual-control.approver": approval_errors.ApproverRefused,
    "dual-control.demanded": approval_errors.ApprovalRequired,
    "quota.attempts": errors.RateLimited,
    "quota.requests": errors.RateLimited,
    "quota.characters": errors.QuotaExhausted,
    "quota.seconds": errors.QuotaExhausted,
}
"""What the caller is told, by deciding policy; the first that holds speaks, so that isolation hides everything behind it."""


@dataclass(frozen=True)
class Question:
    """May this client do this now? `territory` is where this installation is; `voice` and `consent` as the purpose needs.

    `bound`: what the token is, or would be, bound to. `live`: the voice's speaker answered a nonce that the token names.
    `approver`: the second client whose word the token names; `beneficiary`: the client for which this one gives its word.
    `broken_glass`: what officers let this site do at the moment, as `break_glass.cedar` names it.
    """

    purpose: Purpose
    client: Client
    voice: Voice | None
    consent: Consent | None
    territory: str
    now: float
    left: Left
    bound: Binding = Binding.BOTH
    live: bool = False
    approver: Client | None = None
    beneficiary: str | None = None
    broken_glass: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """The answer, and the ids of the policies that gave it."""

    allowed: bool
    decided_by: tuple[str, ...]

    def require(self) -> tuple[str, ...]:
        """The deciding policies, if it is allowed. Raises Denied, or the kind of it that fits the deciding policy."""
        if self.allowed:
            return self.decided_by
        for policy, refusal in _REFUSALS.items():
            if policy in self.decided_by:
                raise refusal(self.decided_by)
        raise Denied(self.decided_by)


@dataclass(frozen=True)
class Policy:
    """One policy: its @id, `permit` or `forbid`, and the comment before it, which says in a sentence what it is for."""

    id: str
    effect: str
    sentence: str


class Policies(Protocol):
    """Whoever knows the set to decide by."""

    def at(self, version: int, transaction: Transaction) -> PolicyEngine:
        """The engine of the set that officers activated as `version` (0: the set that ships), read in `transaction` if need be."""


class PolicyEngine:
    """One validated set of policies. Safe to ask from several threads."""

    def __init__(self, schema: str, policies: str) -> None:
        """Parse and validate. Raises PolicySetInvalid, with the reason as its detail."""
        _require_shallow(policies)
        try:
            self._schema = cedarpy.Schema.from_str(schema)
            self._policies = cedarpy.PolicySet.from_str(policies)
        except ValueError as problem:
            raise PolicySetInvalid(str(problem)) from None
        outcome = cedarpy.validate_policies(policies, self._schema)
        if not outcome.validation_passed:
            raise PolicySetInvalid("; ".join(str(error) for error in outcome.errors))
        self._source = policies
        self._ids, self.policies = _described(policies)
        # The same rows are the same entities: those in use are read and checked against the schema once.
        self._entities = lru_cache(_ENTITIES)(partial(_entities, self._schema))

    @classmethod
    def shipped(cls) -> PolicyEngine:
        """The set that comes with this package. Raises PolicySetInvalid."""
        return cls.of_folder(SHIPPED)

    @classmethod
    def of_folder(cls, folder: Path) -> PolicyEngine:
        """The set in `folder`: its `schema.cedarschema` and every `*.cedar`. Raises PolicySetInvalid."""
        try:
            sources = [source.read_text() for source in sorted(folder.glob("*.cedar"))]
            return cls((folder / "schema.cedarschema").read_text(), "\n".join(sources))
        except (OSError, UnicodeDecodeError) as problem:
            raise PolicySetInvalid(f"{folder}: {problem}") from None

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all policies in the set, in order."""
        return tuple(policy.id for policy in self.policies)

    def at(self, _version: int, _transaction: Transaction) -> PolicyEngine:
        """Itself: one set, whatever officers activate (`policies.sets.active.ActivePolicies` follows them)."""
        return self

    def text_of(self, policy: str) -> str:
        """What one policy says, by its id, however it is laid out. Raises KeyError."""
        static = json.loads(cedarpy.policies_to_json_str(self._source))["staticPolicies"]
        said = {self._ids[name]: body for name, body in static.items()}
        return json.dumps(said[policy], sort_keys=True)

    def decide(self, question: Question) -> Decision:
        """The set's answer. Never raises for what the question holds: a question that does not fit is denied."""
        try:
            entities = self._entities(question.client, question.voice, question.consent and question.consent.tenant)
        except ValueError:
            return Decision(False, (NOT_DECIDABLE,))
        answer = cedarpy.is_authorized(_request(question), self._policies, entities, self._schema)
        if answer.diagnostics.errors or answer.decision is cedarpy.Decision.NoDecision:
            return Decision(False, (NOT_DECIDABLE,))
        reasons = tuple(sorted(self._ids[reason] for reason in answer.diagnostics.reasons))
        return Decision(answer.decision is cedarpy.Decision.Allow, reasons or (NO_PERMIT,))


def _require_shallow(policies: str) -> None:
    """Raise PolicySetInvalid for what Cedar's parser, which recurses without a limit, might end the process at."""
    for policy in _QUOTED.sub(" ", policies).split(";"):
        depth = deepest = 0
        for bracket in _BRACKETS.findall(policy):
            depth = max(depth, 0) + (1 if bracket in "([{" else -1)
            deepest = max(deepest, depth)
        if deepest > _MAX_NESTING or len(policy) > _MAX_POLICY:
            raise PolicySetInvalid(f"a policy has at most {_MAX_POLICY} characters, and brackets {_MAX_NESTING} deep")


def _described(policies: str) -> tuple[dict[str, str], tuple[Policy, ...]]:
    """Cedar's own names of the policies, to the ids that we gave them; and what each is.

    Raises PolicySetInvalid without an id, and for a template, which decides nothing and would be shown to nobody.
    """
    try:
        whole = json.loads(cedarpy.policies_to_json_str(policies))
    except RecursionError:
        raise PolicySetInvalid("a policy is nested too deeply") from None
    if whole.get("templates"):
        raise PolicySetInvalid("templates are not used: write each policy out")
    static = whole["staticPolicies"]
    ids = {name: policy.get("annotations", {}).get("id") for name, policy in static.items()}
    if not all(ids.values()) or len(set(ids.values())) != len(ids):
        raise PolicySetInvalid("every policy needs an @id of its own")
    said = {found["id"]: " ".join(found["comment"].replace("//", " ").split()) for found in _INTRODUCED.finditer(policies)}
    described = [Policy(ids[name], static[name]["effect"], said.get(ids[name], "")) for name in static]
    return ids, tuple(sorted(described, key=lambda policy: policy.id))


def _reference(kind: str, name: object) -> dict[str, str]:
    return {"type": kind, "id": str(name)}


def _tenant(name: str) -> dict[str, Any]:
    return {"__entity": _reference("Tenant", name)}


def _resource(question: Question) -> dict[str, str]:
    if question.purpose in ON_A_VOICE:
        return _reference("Voice", question.voice.voice_id if question.voice else "none")
    return _reference("Tenant", question.client.tenant)


def _request(question: Question) -> dict[str, Any]:
    context: dict[str, Any] = {"purpose": question.purpose.value, "now": int(question.now), "left": asdict(question.left)}
    context["proved"] = question.bound is not Binding.CERTIFICATE
    context["client_hours"] = within(question.client.hours, question.now)
    if question.purpose in OPENING:
        context["live"] = question.live
        context["voice_hours"] = within(question.voice.hours if question.voice else None, question.now)
        context["broken_glass"] = sorted(question.broken_glass)
    if question.purpose is Purpose.SPEAK and question.approver is not None:
        context["approver"] = _approver(question.approver, question.client)
    if question.beneficiary is not None:
        context["beneficiary"] = {"__entity": _reference("Client", question.beneficiary)}
    if question.purpose in UNDER_CONSENT and question.consent is not None:
        consent = question.consent
        context["consent"] = {
            "tenant": _tenant(consent.tenant),
            "active": consent.state is ConsentState.ACTIVE,
            "purposes": list(consent.purposes),
            "covers_here": consent.covers(question.territory),
            "expires": int(consent.expires_at.timestamp()),
        }
    return {
        "principal": _reference("Client", question.client.client_id),
        "action": _reference("Action", question.purpose.value),
        "resource": _resource(question),
        "context": context,
    }


def _approver(approver: Client, caller: Client) -> dict[str, Any]:
    return {
        "client": {"__entity": _reference("Client", approver.client_id)},
        "tenant": _tenant(approver.tenant),
        "active": approver.state is ClientState.ACTIVE,
        "roles": list(approver.roles),
        "own_keys": approver.cert_sha256 != caller.cert_sha256 and approver.jkt != caller.jkt,
    }


def _entities(schema: cedarpy.Schema, client: Client, voice: Voice | None, consents: str | None) -> cedarpy.Entities:
    """What a decision may speak of: the client, the voice, their tenants and the consent's. Raises ValueError."""
    tenants = {tenant for tenant in (client.tenant, voice and voice.tenant, consents) if tenant is not None}
    entities: list[dict[str, Any]] = [{"uid": _reference("Tenant", name), "attrs": {}, "parents": []} for name in tenants]
    attributes = {
        "tenant": _tenant(client.tenant),
        "active": client.state is ClientState.ACTIVE,
        "roles": list(client.roles),
        "browser": client.browser,
    }
    if client.voice_id is not None:
        attributes["voice"] = {"__entity": _reference("Voice", client.voice_id)}
    entities.append(_entity("Client", client.client_id, attributes, client.tenant))
    if voice is not None:
        attributes = {"active": voice.state is VoiceState.ACTIVE, "bearer": VoiceTerm.BEARER in voice.terms}
        attributes |= {"liveness": VoiceTerm.LIVENESS in voice.terms, "dual_control": VoiceTerm.DUAL_CONTROL in voice.terms}
        entities.append(_entity("Voice", voice.voice_id, attributes, voice.tenant))
    return cedarpy.Entities.from_json_str(json.dumps(entities), schema)


def _entity(kind: str, name: object, attributes: dict[str, Any], tenant: str) -> dict[str, Any]:
    return {"uid": _reference(kind, name), "attrs": attributes, "parents": [_reference("Tenant", tenant)]}
