"""What officers can be asked to approve: a closed list, and for each request, what exactly its signatures will cover.

A request travels as its operation, the facts that describe it, and the signatures so far. The subject that is signed is
computed again from the facts wherever somebody reads them, so that nobody signs other than what he is shown; what the
subject does not cover (a reason, a delay) is shown apart, as the requester's words.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any
from uuid import UUID

from keyvault.approval_subjects import SUBJECTS
from keyvault.approvals import Approval, Operation, Quorum
from keyvault.records import canonical
from keyvault.sync.errors import ApprovalInvalid, StatementMalformed
from keyvault.sync.roster import Roster
from keyvault.sync.state import SiteState
from keyvault.sync.statement import DESTROY, Proposal, destruction_subject
from keyvault.sync.steps import ADOPT
from keyvault.sync.wire import Statement, require

Facts = Mapping[str, str | int]


class Kind(StrEnum):
    """Every operation that takes officers' approval."""

    DESTROY = DESTROY
    ROTATE = "keys.rotate"
    REKEY = "voices.rekey"
    ROSTER = "sync.roster"
    REPLACE = "sync.replace"
    END = "sync.end"
    ADOPT_FOR_GOOD = "sync.adopt"
    ADOPT = ADOPT
    BREAK_GLASS = "site.break-glass"
    OPEN_COMPROMISED = "keys.break-glass"
    POLICY = "policy.activate"
    CLIENT = "ca.issue"
    REANCHOR = "log.reanchor"
    DETAILS = "audit.export-details"


@dataclass(frozen=True)
class Meaning:
    """A kind in words. `undone` says what takes it back, if anything does."""

    sentence: str
    undone: str


MEANINGS: Mapping[Kind, Meaning] = {
    Kind.DESTROY: Meaning("Destroy a master version at every site.", "Never: what it still wraps stays shut for good."),
    Kind.ROTATE: Meaning(
        "Hold a ceremony: the ring's next version is due.", "Nothing is done by approving; the ceremony is the answer."
    ),
    Kind.REKEY: Meaning(
        "Give voices new keys: each is opened and sealed again, once, inside the vault.",
        "Never, and nothing is lost: the voices speak on under their new keys.",
    ),
    Kind.ROSTER: Meaning(
        "Change who belongs to the cluster: its sites, the officers and their keys, and how many must approve.",
        "By another roster, which the officers of this one approve.",
    ),
    Kind.REPLACE: Meaning("Put another site in the place of one that is gone.", "Never; it stays marked for ever."),
    Kind.END: Meaning("End a transaction that the other site left in doubt.", "Never; it stays marked for ever."),
    Kind.ADOPT_FOR_GOOD: Meaning(
        "Go on for good from a restored store whose newer history is lost.", "Never; it stays marked for ever."
    ),
    Kind.ADOPT: Meaning("Use a restored database beside this token, or a restored token beside this database.", "Never."),
    Kind.BREAK_GLASS: Meaning(
        "Let a site serve although it heard nothing of the other for too long, until this request expires.",
        "At any time: cancel the request.",
    ),
    Kind.OPEN_COMPROMISED: Meaning(
        "Open voices whose keys lie under a compromised master version, until this request expires.",
        "At any time: cancel the request. What was opened until then was opened.",
    ),
    Kind.POLICY: Meaning(
        "Decide every request by another set of policies, from the next request on.",
        "By another activation: `glottis policy reset` asks for the set that ships.",
    ),
    Kind.CLIENT: Meaning(
        "Let a client in, or give it new keys or more roles, where its roles are marked as needing officers.",
        "`glottis clients revoke` ends the client; what it did until then stays done.",
    ),
    Kind.REANCHOR: Meaning(
        "Let the audit log go on from an older or another end than the one that it signed last.",
        "Never: whoever holds the newer checkpoint sees the fork for ever.",
    ),
    Kind.DETAILS: Meaning(
        "Open the sealed details of audit entries (who, which voice, which hashes), for one recipient's key.",
        "Never: what was read was read.",
    ),
}

IN_DEVELOPMENT: Mapping[str, int] = {Kind.POLICY: 1, Kind.CLIENT: 0}
"""How many officers must approve in a cluster of one site, where that is not what its roster says; `glottis doctor` names it."""
_ALWAYS = frozenset({Kind.OPEN_COMPROMISED, Kind.REANCHOR, Kind.DETAILS})
"""What takes one officer at least, also where a development roster asks for none."""


@dataclass(frozen=True)
class Request(Statement):
    """An operation, the facts that describe it as canonical JSON, and the signatures so far: what officers pass around."""

    DOMAIN = "approval-request/1"
    operation: Operation
    description: bytes
    approvals: tuple[Approval, ...] = ()

    def __post_init__(self) -> None:
        names = [(approval.role, approval.person) for approval in self.approvals]
        require(len(names) == len(set(names)), "one person signs once in one role")

    @property
    def facts(self) -> Facts:
        """Raises ApprovalInvalid for a description that `described` did not write."""
        try:
            facts = json.loads(self.description)
        except ValueError as error:
            raise ApprovalInvalid("the request's description cannot be read") from error
        if not isinstance(facts, dict) or described(facts) != self.description:
            raise ApprovalInvalid("the request's description is spelled in another way")
        return facts

    def meaning(self) -> Explanation:
        """What this asks for. Raises ApprovalInvalid unless the operation is about exactly what the facts describe."""
        explanation = explained(self.operation.kind, self.operation.cluster, self.facts)
        if explanation.subject != self.operation.subject:
            raise ApprovalInvalid("the request describes something else than its signatures cover")
        return explanation


@dataclass(frozen=True)
class Explanation:
    """What a request would do. `signed` is covered by the subject; `claims` are the requester's own words.

    `versions` are the masters that it touches, by label, and `voices` the voices.
    """

    kind: Kind
    subject: bytes
    signed: tuple[tuple[str, str], ...]
    claims: tuple[tuple[str, str], ...]
    versions: tuple[str, ...] = ()
    voices: tuple[UUID, ...] = ()


def quorum_for(kind: str, roster: Roster) -> Quorum:
    """Who may approve this kind by this roster, and how many must."""
    quorum = roster.quorum
    if roster.development and kind in IN_DEVELOPMENT:
        return replace(quorum, threshold=IN_DEVELOPMENT[kind])
    return replace(quorum, threshold=max(quorum.threshold, int(kind in _ALWAYS)))


def described(facts: Facts) -> bytes:
    """Facts as canonical JSON: sorted, no spaces, UTF-8."""
    return json.dumps(dict(facts), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def statement_fact(statement: Statement) -> str:
    """How a statement stands among facts."""
    return base64.b64encode(statement.encode()).decode()


def explained(kind: str, cluster: str, facts: Facts) -> Explanation:
    """What these facts of this kind would do, and the subject to sign. Raises ApprovalInvalid for an unknown kind or facts."""
    try:
        known = Kind(kind)
    except ValueError as error:
        raise ApprovalInvalid(f"nothing here executes the operation {kind!r}") from error
    try:
        return _EXPLAIN[known](known, cluster, dict(facts))
    except (KeyError, TypeError, ValueError, StatementMalformed) as error:
        raise ApprovalInvalid(f"these facts do not describe a {kind}") from error


def _destruction(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    versions = tuple(sorted(set(str(facts.pop("versions")).split())))
    if not versions:
        raise ApprovalInvalid("a destruction names a version")
    signed = (("destroys", ", ".join(versions)),)
    return Explanation(kind, destruction_subject(cluster, versions), signed, _claims(facts), versions)


def _rotation(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    version = str(facts.pop("version"))
    subject = sha256(canonical(kind.value, cluster, version)).digest()
    return Explanation(kind, subject, (("follows", version),), _claims(facts))


def _rekeying(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    voices = tuple(sorted({UUID(voice) for voice in str(facts.pop("voices")).split()}))
    subject = sha256(canonical(kind.value, cluster, *voices)).digest()
    signed = (("voices", ", ".join(map(str, voices))),)
    return Explanation(kind, subject, signed, _claims(facts), voices=voices)


def _transaction(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    proposal = Proposal.decode(base64.b64decode(facts.pop("proposal"), validate=True))
    manifest, old = proposal.manifest, facts.pop("old_roster", None)
    if (f"sync.{manifest.op}", manifest.cluster) != (kind, cluster):
        raise ApprovalInvalid("the proposal is for another purpose or cluster")
    signed = [("epoch", str(manifest.epoch)), ("versions", ", ".join(f"{one.name} {one.state}" for one in proposal.records))]
    if manifest.survivor:
        signed += [("surviving site", manifest.survivor), ("reason", manifest.reason)]
    if proposal.new_roster:
        before = Roster.decode(base64.b64decode(old, validate=True)) if old else None
        signed += _roster_lines(proposal.new_roster, before)
    names = tuple(record.name for record in proposal.records)
    return Explanation(kind, manifest.digest, tuple(signed), _claims(facts), names if manifest.op.by_officers else ())


def _adoption(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    state = SiteState.decode(base64.b64decode(facts.pop("state"), validate=True))
    if state.ledger.roster.cluster != cluster or state.recovering is None:
        raise ApprovalInvalid("the adoption is of another cluster, or of nothing")
    signed = (
        ("site", state.site),
        ("store's epoch", str(state.ledger.epoch)),
        ("token's epoch", str(state.recovering.epoch)),
    )
    return Explanation(kind, state.digest, signed, _claims(facts), tuple(record.name for record in state.ledger.records))


def break_glass_subject(cluster: str, site: str) -> bytes:
    """What officers approve so that `site` serves by an old word of the other; the operation's expiry ends it."""
    return sha256(canonical(Kind.BREAK_GLASS.value, cluster, site)).digest()


def _breaking_glass(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    site = str(facts.pop("site"))
    return Explanation(kind, break_glass_subject(cluster, site), (("site", site),), _claims(facts))


def _governed(kind: Kind, cluster: str, facts: dict[str, Any]) -> Explanation:
    subject, signed = SUBJECTS[kind](cluster, facts)
    touched = tuple(said for name, said in signed if name == "opens under")
    return Explanation(kind, subject, signed, _claims(facts), touched)


def _roster_lines(new: Roster, old: Roster | None) -> list[tuple[str, str]]:
    """The new roster, and what it takes away from the one before or adds, where that is known."""
    lines = [
        ("sites", ", ".join(f"{site.name} (token {site.token_serial})" for site in new.sites)),
        ("officers", ", ".join(officer.person for officer in new.officers)),
        ("must approve", str(new.threshold)),
    ]
    if old is not None:
        now, before = _members(new), _members(old)
        lines += [("adds", one) for one in sorted(now - before)] + [("takes away", one) for one in sorted(before - now)]
    return lines


def _members(roster: Roster) -> set[str]:
    sites = {f"site {site.name} with token {site.token_serial}" for site in roster.sites}
    keys = {f"a key of {officer.person}: {sha256(key).hexdigest()[:16]}" for officer in roster.officers for key in officer.keys}
    return sites | keys | {f"a threshold of {roster.threshold}"}


def _claims(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((str(name).replace("_", " "), str(value)) for name, value in sorted(facts.items()))


_EXPLAIN: Mapping[Kind, Callable[[Kind, str, dict[str, Any]], Explanation]] = {
    Kind.DESTROY: _destruction,
    Kind.ROTATE: _rotation,
    Kind.REKEY: _rekeying,
    Kind.ROSTER: _transaction,
    Kind.REPLACE: _transaction,
    Kind.END: _transaction,
    Kind.ADOPT_FOR_GOOD: _transaction,
    Kind.ADOPT: _adoption,
    Kind.BREAK_GLASS: _breaking_glass,
    **dict.fromkeys(map(Kind, SUBJECTS), _governed),
}
