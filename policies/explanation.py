"""Why a question is decided as it is: the policies that decided, and what would have to change for the other answer.

What would have to change is not derived but tried: each change below is made to the question, and the set is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime, timedelta

from policies.authority import Authority, ClientState, Role, VoiceState, VoiceTerm
from policies.cases import APPROVER
from policies.consent import CONSENT_PURPOSES, ConsentState
from policies.engine import NO_PERMIT, NOT_DECIDABLE, Decision, PolicyEngine, Question
from policies.errors import PolicyError
from policies.gate import require_rows
from policies.grants import Binding, Purpose
from policies.hours import DAYS, within

_NO_POLICY = {
    NO_PERMIT: "No policy permits it, and what is not permitted is denied.",
    NOT_DECIDABLE: "The question does not fit the schema, or a policy failed: a voice or a consent is missing, for example.",
}
_SERVED = {Purpose.LIVENESS: {"speak", "compare"}, Purpose.APPROVE: {"speak"}}
"""What a consent must name, where it is not the purpose itself: one of these."""
_ELSEWHERE = "ZZ"
"""User-assigned in ISO 3166: no territory of any installation."""


@dataclass(frozen=True)
class Change:
    """One thing that could be otherwise, and the question if it were. `mends`: it makes the request more honest."""

    said: str
    make: Callable[[Question], Question]
    mends: bool


@dataclass(frozen=True)
class Reason:
    """A policy that decided, and its sentence."""

    policy: str
    sentence: str


@dataclass(frozen=True)
class Explanation:
    """The decision, and ways to the other one.

    `code`: what a caller is told where it is denied. `changes`: each inner tuple is one way; several where single changes
    suffice, else one way in which no change can be left out, else none.
    """

    decision: Decision
    reasons: tuple[Reason, ...]
    code: str | None
    changes: tuple[tuple[str, ...], ...]


def explain(engine: PolicyEngine, question: Question, honest: Question) -> Explanation:
    """Decide and explain. `honest`: where the changes take a voice or consent from, if the question has none."""
    decision = engine.decide(question)
    said = {policy.id: policy.sentence for policy in engine.policies} | _NO_POLICY
    reasons = tuple(Reason(policy, said[policy]) for policy in decision.decided_by)
    possible = list(_changes(question, honest))

    def flips(changes: Sequence[Change]) -> bool:
        asked = question
        for change in changes:
            asked = change.make(asked)
        return engine.decide(asked).allowed is not decision.allowed

    single = [(change,) for change in possible if flips((change,))]
    ways = single or _fewest([change for change in possible if change.mends], flips)
    return Explanation(decision, reasons, _code(question, decision), tuple(tuple(c.said for c in way) for way in ways))


def _fewest(possible: list[Change], flips: Callable[[Sequence[Change]], bool]) -> list[tuple[Change, ...]]:
    """All changes together, less each that is not needed; nothing if all together do not do it."""
    if not flips(possible):
        return []
    kept = possible
    for change in possible:
        without = [other for other in kept if other is not change]
        if flips(without):
            kept = without
    return [tuple(kept)]


def _code(question: Question, decision: Decision) -> str | None:
    """As the gate answers: rows that are missing first."""
    try:
        require_rows(question.purpose, Authority(question.client, question.voice, question.consent))
        decision.require()
    except PolicyError as refusal:
        return refusal.code
    return None


def _changes(question: Question, honest: Question) -> Iterator[Change]:
    """Every change that makes this question another one; those that mend come in the order in which one would try them."""
    if question.voice is None:
        yield Change("there is such a voice", lambda asked: replace(asked, voice=honest.voice), mends=True)
    else:
        yield from _voice_changes(question)
    if question.consent is None:
        yield Change("there is a consent", lambda asked: replace(asked, consent=honest.consent), mends=True)
    else:
        yield from _consent_changes(question)
    yield from _client_changes(question)
    if question.client.browser:
        yield from _browser_changes(question, honest)
    if question.bound is Binding.BOTH:
        yield _bound("the token is bound to the certificate alone", Binding.CERTIFICATE, mends=False)
    elif question.bound is Binding.CERTIFICATE:
        yield _bound("the token is bound to a DPoP key too", Binding.BOTH, mends=True)
    if not question.live:
        yield Change("the speaker answered a liveness nonce", lambda asked: replace(asked, live=True), mends=True)
    elif question.voice is not None and VoiceTerm.LIVENESS in question.voice.terms:
        yield Change("no liveness nonce was answered", lambda asked: replace(asked, live=False), mends=False)
    yield from _hours_changes(question)
    yield from _approval_changes(question)
    if question.broken_glass:
        yield Change(
            "officers let nothing open in an emergency", lambda asked: replace(asked, broken_glass=frozenset()), mends=True
        )
    if min(astuple(question.left)) <= 0:
        yield Change("enough is left of the quotas", lambda asked: replace(asked, left=honest.left), mends=True)


def _hours_changes(question: Question) -> Iterator[Change]:
    """The row's hours stand for the time: another time would make an expiry another one too."""
    elsewhen = DAYS[(datetime.fromtimestamp(question.now, UTC).weekday() + 3) % 7]
    never = f"{elsewhen} 00:00-00:01 UTC"  # no zone is three days away
    for said, whose, change in (("the client's", question.client, _client), ("the voice's", question.voice, _voice)):
        if whose is None:
            continue
        if within(whose.hours, question.now):
            yield change(f"the time is outside {said} hours", hours=never)
        else:
            yield change(f"the time is in {said} hours", mends=True, hours=None)


def _approval_changes(question: Question) -> Iterator[Change]:
    voice, client = question.voice, question.client
    if question.purpose is Purpose.APPROVE:
        named = question.beneficiary
        if named in (None, client.client_id):
            said = "it is approved for another client than who approves"
            yield Change(said, lambda asked: replace(asked, beneficiary=f"not {client.client_id}"), mends=True)
        else:
            yield Change("who approves is to speak", lambda asked: replace(asked, beneficiary=client.client_id), mends=False)
    if question.purpose is not Purpose.SPEAK:
        return
    second = replace(APPROVER, tenant=client.tenant)
    if question.approver != second:
        said = "a second client of the tenant, an active approver with keys of its own, approved it"
        yield Change(said, lambda asked: replace(asked, approver=second), mends=True)
    elif voice is not None and VoiceTerm.DUAL_CONTROL in voice.terms:
        yield Change("no second client approved it", lambda asked: replace(asked, approver=None), mends=False)


def _bound(said: str, binding: Binding, *, mends: bool) -> Change:
    return Change(said, lambda asked: replace(asked, bound=binding), mends)


def _client_changes(question: Question) -> Iterator[Change]:
    client = question.client
    for role in Role:
        if role.value in client.roles:
            yield _client(f"the client does not have the role {role}", roles=tuple(r for r in client.roles if r != role.value))
        else:
            yield _client(f"the client has the role {role}", roles=(role.value,), mends=True)
    if client.state is ClientState.ACTIVE:
        yield _client("the client is revoked", state=ClientState.REVOKED)
    else:
        yield _client("the client is another one, that is not revoked", state=ClientState.ACTIVE, mends=True)


def _browser_changes(question: Question, honest: Question) -> Iterator[Change]:
    voice = question.voice
    if voice is not None and question.client.voice_id != voice.voice_id:
        own = voice.voice_id
        said = "the browser's key was invited for this voice"
        yield Change(said, lambda asked: replace(asked, client=replace(asked.client, voice_id=own)), mends=True)
    certificate = honest.client.cert_sha256
    said = "the client is one with a certificate, and no browser"
    yield Change(said, lambda asked: replace(asked, client=replace(asked.client, cert_sha256=certificate)), mends=True)


def _client(said: str, *, mends: bool = False, roles: tuple[str, ...] | None = None, **values: object) -> Change:
    """Roles that mend come to those there are; others are all that stay."""

    def make(asked: Question) -> Question:
        old = asked.client
        named = old.roles if roles is None else (*old.roles, *roles) if mends else roles
        return replace(asked, client=replace(old, roles=named, **values))  # type: ignore[arg-type]

    return Change(said, make, mends)


def _voice_changes(question: Question) -> Iterator[Change]:
    voice, tenant = question.voice, question.client.tenant
    assert voice is not None
    if voice.tenant == tenant:
        yield _voice("the voice is another tenant's", tenant=_other(tenant))
    else:
        yield _voice("the voice is one of the client's own tenant", tenant=tenant, mends=True)
    if voice.state is VoiceState.ACTIVE:
        yield _voice("the voice is suspended", state=VoiceState.SUSPENDED)
    else:
        yield _voice("the voice is not suspended", state=VoiceState.ACTIVE, mends=True)


def _voice(said: str, *, mends: bool = False, **values: object) -> Change:
    def make(asked: Question) -> Question:
        return asked if asked.voice is None else replace(asked, voice=replace(asked.voice, **values))  # type: ignore[arg-type]

    return Change(said, make, mends)


def _consent_changes(question: Question) -> Iterator[Change]:
    consent, tenant = question.consent, question.client.tenant
    assert consent is not None
    if consent.tenant == tenant:
        yield _consent("the consent was given to another tenant", tenant=_other(tenant))
    else:
        yield _consent("the consent was given to the client's own tenant", tenant=tenant, mends=True)
    if consent.state is ConsentState.ACTIVE:
        yield _consent("the consent is withdrawn", state=ConsentState.WITHDRAWN)
    else:
        yield _consent("there is a new consent, that is not withdrawn", state=ConsentState.ACTIVE, mends=True)
    now = datetime.fromtimestamp(question.now, UTC)
    if consent.expires_at > now:
        yield _consent("the consent has expired", expires_at=now)
    else:
        yield _consent("there is a new consent, that has not expired", expires_at=now + timedelta(days=1), mends=True)
    served = _SERVED.get(question.purpose, {question.purpose.value})
    for purpose in sorted(CONSENT_PURPOSES & served):
        if purpose in consent.purposes:
            fewer = tuple(name for name in consent.purposes if name != purpose)
            yield _consent(f"the consent does not name the purpose {purpose}", purposes=fewer)
        else:
            yield _consent(f"the consent names the purpose {purpose}", purposes=(*consent.purposes, purpose), mends=True)
    if consent.covers(question.territory):
        yield _consent(f"the consent does not cover {question.territory}", territory=(_ELSEWHERE,))
    else:
        yield _consent(f"the consent covers {question.territory}", territory=(*consent.territory, question.territory), mends=True)


def _consent(said: str, *, mends: bool = False, **values: object) -> Change:
    def make(asked: Question) -> Question:
        return asked if asked.consent is None else replace(asked, consent=replace(asked.consent, **values))  # type: ignore[arg-type]

    return Change(said, make, mends)


def _other(tenant: str) -> str:
    return f"not {tenant}"
