"""`glottis policy`: is the set valid, does it decide as its tables say, and why does it decide as it does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from policies import cases
from policies.authority import Client, ClientState, Role, Voice, VoiceState, VoiceTerm
from policies.consent import CONSENT_PURPOSES, EVERYWHERE, Consent, ConsentState
from policies.engine import SHIPPED, PolicyEngine, Question
from policies.errors import HoursInvalid, PolicySetInvalid
from policies.explanation import Explanation, explain
from policies.grants import Purpose
from policies.hours import Hours
from service.cli.loading import loading
from service.cli.output import json_option, say
from service.exits import Ended, Exit
from service.settings import Settings

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_folder = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=SHIPPED,
    help="A set of your own: schema.cedarschema, *.cedar, cases/*.json. Default: the set that ships, which the vault uses.",
)


_SETS: Mapping[str, tuple[str, str]] = {
    name: ("service.cli.policy_sets", said)
    for name, said in {
        "propose": "Check a set of your own and ask officers to activate it.",
        "activate": "Make an approved set the active one, at every worker of this site.",
        "reset": "Ask officers to go back to the set that ships.",
        "list": "Show every activation at this site.",
    }.items()
}


@click.group(cls=loading(_SETS))
def policy() -> None:
    """Check, test, explain and show policies; propose and activate a set of your own.

    `check`, `test`, `explain` and `show` read a folder and need nothing that runs; the others ask the running site.
    """


@policy.command()
@_folder
@json_option
def check(folder: Path, as_json: bool) -> None:
    """Validate every policy against the schema. Ends with 3 where the set would not be loaded."""
    with _told():
        engine = _engine(folder)
    facts = {"valid": True, "policies": len(engine.policies)}
    say(facts, [f"{len(engine.policies)} policies fit their schema"], as_json=as_json)


@policy.command()
@_folder
@json_option
def test(folder: Path, as_json: bool) -> None:
    """Run the tables of cases. Ends with 3 if a row comes out otherwise, or if no row tells that a policy is there."""
    with _told():
        engine, rows = _engine(folder), cases.tables(folder)
    failed, uncovered = cases.failures(engine, rows), cases.uncovered(engine, rows)
    facts = {
        "rows": len(rows),
        "failed": [{"row": str(f.case), "expected": asdict(f.case.expected), "found": asdict(f.found)} for f in failed],
        "uncovered": uncovered,
    }
    lines = [f"FAILS  {f.case}: expected {_short(f.case.expected)}, found {_short(f.found)}" for f in failed]
    lines += [f"FAILS  {name}: no row expects it to decide" for name in uncovered]
    say(facts, [*lines, f"{len(rows) - len(failed)} of {len(rows)} rows hold"], as_json=as_json)
    if failed or uncovered:
        raise Ended(Exit.INTEGRITY)


@policy.command()
@_folder
@click.option("--active", is_flag=True, help="The set that decides at the running site, instead of a folder's.")
@json_option
def show(folder: Path, active: bool, as_json: bool) -> None:
    """List the policies: id, whether it permits or forbids, and its sentence."""
    said: dict[str, Any] = {}
    with _told():
        engine, said = _active() if active else (_engine(folder), said)
    width = max(len(found.id) for found in engine.policies)
    lines = [f"{found.id.ljust(width)}  {found.effect.ljust(6)}  {found.sentence}" for found in engine.policies]
    head = [f"version {said['version']}, set {said['set']}"] if active else []
    say(said | {"policies": [asdict(found) for found in engine.policies]}, head + lines, as_json=as_json)


def _choice(kind: Any) -> click.Choice[str]:
    return click.Choice([value.value for value in kind])


@policy.command("explain")
@click.argument("purpose", type=_choice(Purpose))
@click.option("--role", "roles", type=_choice(Role), multiple=True, help="The client's role; may be repeated. Default: every role.")
@click.option("--no-role", is_flag=True, help="The client has no role.")
@click.option("--client-state", type=_choice(ClientState), default="active", show_default=True)
@click.option("--voice-state", type=_choice(VoiceState), default="active", show_default=True)
@click.option("--voice-term", "terms", type=_choice(VoiceTerm), multiple=True, help="What differs for the voice; may be repeated.")
@click.option("--live", is_flag=True, help="The voice's speaker just answered a liveness nonce.")
@click.option("--approved", is_flag=True, help="A second client approved what is to be spoken.")
@click.option("--approver-state", type=_choice(ClientState), default="active", show_default=True, help="With --approved.")
@click.option("--for-self", is_flag=True, help="For `approve`: the client approves for itself.")
@click.option("--client-hours", help="The client is limited to: 'mon,tue 08:00-18:00 Europe/Zurich'.")
@click.option("--voice-hours", help="The voice is limited to such hours.")
@click.option("--broken-glass", multiple=True, help="What officers let the site do: stale-peer, compromised-key; may be repeated.")
@click.option("--no-voice", is_flag=True, help="There is no such voice.")
@click.option(
    "--consent-purpose", "purposes", type=click.Choice(sorted(CONSENT_PURPOSES)), multiple=True, help="Default: every one."
)
@click.option("--consent-state", type=_choice(ConsentState), default="active", show_default=True)
@click.option(
    "--consent-expires", default="1d", show_default=True, help="From now: 90s, 5m, 2h, 30d; -1d is a day ago. Or an ISO time."
)
@click.option("--consent-territory", "covered", multiple=True, help="ISO 3166, or *; may be repeated. Default: *.")
@click.option("--no-consent", is_flag=True, help="There is no consent.")
@click.option("--territory", default=cases.TERRITORY, show_default=True, help="Where the installation is.")
@click.option("--tenant", default=cases.TENANT, show_default=True, help="The client's.")
@click.option("--voice-tenant", help="Default: the client's.")
@click.option("--consent-tenant", help="Default: the client's.")
@_folder
@json_option
def explain_(folder: Path, as_json: bool, **said: Any) -> None:
    """Which policy decides a question, and what would have to change for the other answer.

    The question is an honest request for PURPOSE, except for what the options say. The data of an installation is not read.

    \b
    glottis policy explain speak --consent-purpose compare
    glottis policy explain speak --role reader --consent-expires -1d --json
    """
    with _told():
        engine = _engine(folder)
    honest, question = _questions(said, datetime.now(UTC))
    found = explain(engine, question, honest)
    facts = asdict(found.decision) | {
        "code": found.code,
        "reasons": [asdict(reason) for reason in found.reasons],
        "would_change": [list(way) for way in found.changes],
    }
    say(facts, list(_lines(found)), as_json=as_json)


def _questions(said: dict[str, Any], now: datetime) -> tuple[Question, Question]:
    """The honest question of the client's tenant, and the one that was asked."""
    tenant = said["tenant"]
    client, voice, consent = cases.HONEST.client, cases.HONEST.voice, cases.HONEST.consent
    assert voice is not None
    assert consent is not None
    client = replace(client, tenant=tenant)
    voice = replace(voice, tenant=tenant)
    consent = replace(consent, tenant=tenant, expires_at=now + timedelta(days=1), purposes=tuple(sorted(CONSENT_PURPOSES)))
    purpose = Purpose(said["purpose"])
    beneficiary = "another client" if purpose is Purpose.APPROVE else None
    row = (purpose, client, voice, consent, said["territory"], now.timestamp(), cases.HONEST.left)
    honest = Question(*row, beneficiary=beneficiary)
    asked = replace(
        honest,
        client=_client(client, said),
        voice=None if said["no_voice"] else _voice(voice, said),
        consent=None if said["no_consent"] else _consent(consent, said, now),
        live=said["live"],
        approver=_approver(tenant, said) if said["approved"] else None,
        beneficiary=client.client_id if said["for_self"] else beneficiary,
        broken_glass=frozenset(said["broken_glass"]),
    )
    return honest, asked


def _client(honest: Client, said: dict[str, Any]) -> Client:
    roles = () if said["no_role"] else tuple(said["roles"]) or honest.roles
    return replace(
        honest, roles=roles, state=ClientState(said["client_state"]), hours=_hours(said["client_hours"], "--client-hours")
    )


def _approver(tenant: str, said: dict[str, Any]) -> Client:
    return replace(cases.APPROVER, tenant=tenant, state=ClientState(said["approver_state"]))


def _hours(said: str | None, option: str) -> str | None:
    try:
        return None if said is None else str(Hours.parse(said))
    except HoursInvalid as refusal:
        raise click.BadParameter(refusal.fix, param_hint=option) from None


def _voice(honest: Voice, said: dict[str, Any]) -> Voice:
    tenant, state = said["voice_tenant"] or honest.tenant, VoiceState(said["voice_state"])
    return replace(
        honest, tenant=tenant, state=state, terms=tuple(sorted(said["terms"])), hours=_hours(said["voice_hours"], "--voice-hours")
    )


def _consent(honest: Consent, said: dict[str, Any], now: datetime) -> Consent:
    return replace(
        honest,
        tenant=said["consent_tenant"] or honest.tenant,
        state=ConsentState(said["consent_state"]),
        purposes=tuple(said["purposes"]) or honest.purposes,
        territory=tuple(said["covered"]) or (EVERYWHERE,),
        expires_at=_expiry(said["consent_expires"], now),
    )


def _expiry(said: str, now: datetime) -> datetime:
    relative = re.fullmatch(r"([+-]?\d{1,9})([smhd])", said)
    try:
        if relative:
            return now + timedelta(seconds=int(relative[1]) * _SECONDS[relative[2]])
        moment = datetime.fromisoformat(said)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{said!r} is neither a span such as 30d nor an ISO time", param_hint="--consent-expires"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _engine(folder: Path) -> PolicyEngine:
    """The set of a folder, valid and with a sentence for each policy. Raises PolicySetInvalid."""
    engine = PolicyEngine.of_folder(folder)
    mute = [found.id for found in engine.policies if not found.sentence]
    if mute:
        raise PolicySetInvalid(f"no comment says what {', '.join(mute)} is for")
    return engine


def _active() -> tuple[PolicyEngine, dict[str, Any]]:
    """The engine of the set that decides at the running site. Raises NotRunning, SiteRefused, PolicySetInvalid."""
    from service.cli import policy_sets  # only this asks a site

    found, said = policy_sets.active(Settings.load(os.environ))
    return found.engine(), said


@contextmanager
def _told() -> Iterator[None]:
    """Say what is wrong with a set before the error does: it is the operator's own text."""
    try:
        yield
    except PolicySetInvalid as refusal:
        click.echo(refusal.detail, err=True)
        raise


def _short(decision: Any) -> str:
    return f"{'allowed' if decision.allowed else 'denied'} by {', '.join(decision.decided_by)}"


def _lines(found: Explanation) -> Iterator[str]:
    yield "allowed" if found.decision.allowed else f"denied; a caller reads {found.code}"
    for reason in found.reasons:
        yield f"  {reason.policy}: {reason.sentence}"
    other = "denied" if found.decision.allowed else "allowed"
    if not found.changes:
        yield f"nothing that was tried makes it {other}"
    elif len(found.changes[0]) == 1:
        yield f"it would be {other} if one of these were so:"
        yield from (f"  - {way[0]}" for way in found.changes)
    else:
        yield f"it would be {other} if all of these were so:"
        yield from (f"  - {change}" for change in found.changes[0])
