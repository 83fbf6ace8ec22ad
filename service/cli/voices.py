"""`glottis voices`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from keyvault.errors import KeyCompromised
from policies.authority import VoiceState, VoiceTerm
from service import step
from service.cli.asking import confirmed
from service.cli.hours import hours_asked, hours_options, hours_said
from service.cli.loading import Listing
from service.cli.main import say_json
from service.cli.output import json_option, say, say_awaiting
from service.exits import Ended, Exit
from service.holding import require_running
from service.isolation import establish
from service.officers import read_roster
from service.settings import Settings
from voiceprints import erasure_certificate

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_dry = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")

MOST_REKEYED = 1000


@click.group(cls=Listing)
def voices() -> None:
    """Voices, whoever's they are: list, erase, give a new key, certify. Glottis must be running here. All of it is recorded."""


@voices.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="At most so many, newest first.")
@json_option
def list_(tenant: str | None, limit: int, as_json: bool) -> None:
    """Show which voices there are. Each row's MAC is checked; one that was changed outside is named."""
    found = _ask(_settings(), "list", tenant=tenant, limit=limit)
    lines = [f"{voice['voice']}  {voice['tenant']}  {voice['state']}  {voice['name']}" for voice in found["voices"]]
    lines += [f"{voice}  its row does not carry its MAC" for voice in found["tampered"]]
    lines += ["there are more: give --tenant, or a higher --limit"] if found["more"] else []
    say(found, lines or ["there is no voice"], as_json=as_json)
    if found["tampered"]:
        raise Ended(Exit.INTEGRITY)


@voices.command()
@click.argument("voice", type=click.UUID)
@json_option
def show(voice: UUID, as_json: bool) -> None:
    """Show what there is of one voice, what it demands of who uses it, and how far its erasure is."""
    found = _ask(_settings(), "show", voice=str(voice))
    say(found, [*_shown(found), *_demanded(found)], as_json=as_json)


@voices.command()
@click.argument("voice", type=click.UUID, required=False)
@click.option("--consent", type=click.UUID, help="The speaker withdrew this consent: end it, and erase every voice under it.")
@_dry
@_yes
@json_option
def erase(voice: UUID | None, consent: UUID | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Erase one voice, or with --consent every voice of a consent that was withdrawn. This cannot be undone.

    \b
    What goes, in one transaction: the sealed voiceprint, every version of its key, its row with its name, and
    the sealed details of the audit entries about it. What stays: a tombstone, and the consent as evidence.
    An old copy of the database opens the voice until it is shredded, that is, until every master version that
    ever wrapped its key is destroyed. The answer says when that will be.

    A row that was changed or is missing is named and stops nothing. A second erasure says so and ends with 0.
    """
    if (voice is None) == (consent is None):
        raise click.UsageError("Name one voice, or a consent with --consent.")
    settings = _settings()
    call, named = ("erase", {"voice": str(voice)}) if voice else ("withdraw", {"consent": str(consent)})
    found = _ask(settings, call, **named, dry_run=True) if dry_run or not yes else {}
    if dry_run:
        say(found, _would_go(found), as_json=as_json)
        return
    if not yes:
        for line in _would_go(found):
            click.echo(line, err=True)
        confirmed("Erase? This cannot be undone.")
    done = _ask(settings, call, **named, dry_run=False)
    erased = [done] if voice else done["voices"]
    lines = [line for one in erased for line in _erased(one)]
    say(done, lines if voice else [f"the consent {consent} has ended", *lines], as_json=as_json)


@voices.command()
@click.argument("voice", type=click.UUID)
@click.option("--off", is_flag=True, help="Demand a DPoP key again, from the next request on.")
@_dry
@_yes
@json_option
def bearer(voice: UUID, off: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let VOICE speak and be compared for tokens that are bound to a client's certificate alone (Bearer, or xi-api-key).

    Weaker than the default: the client signs nothing for a request, so that the edge's or the proxy's word about its certificate
    is all there is. Use it for clients that cannot make DPoP proofs. It reaches the other site by itself. With --off,
    tokens in hand are refused too.
    """
    words = "opens for tokens bound to a DPoP key too, and no other" if off else "opens for tokens bound to a certificate alone"
    _set_term("bearer", voice, {"allowed": not off}, words, asks=not off and not yes, dry_run=dry_run, as_json=as_json)


@voices.command()
@click.argument("voice", type=click.UUID)
@click.option("--off", is_flag=True, help="Demand nothing any more, from the next request on.")
@_dry
@_yes
@json_option
def liveness(voice: UUID, off: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let VOICE speak and be compared only after its speaker has just said six random digits (POST /v1/liveness).

    It holds from the next request on, also for tokens in hand, and reaches the other site by itself.
    What it does not stop, docs/threat-model.md says: speech that is relayed, converted or synthesised while it is asked for.
    """
    words = "opens without its speaker" if off else "opens only after its speaker said digits"
    _set_term("liveness", voice, {"demanded": not off}, words, asks=off and not yes, dry_run=dry_run, as_json=as_json)


@voices.command("dual-control")
@click.argument("voice", type=click.UUID)
@click.option("--off", is_flag=True, help="Demand nothing any more, from the next request on.")
@_dry
@_yes
@json_option
def dual_control(voice: UUID, off: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let VOICE say only what a second client of its tenant, with the role approver, has approved (POST /v1/approvals).

    It holds from the next request on, also for tokens in hand. The approver is another client than the one that speaks, with a
    certificate and a DPoP key of its own; each approval is for one text and one client, and works once.
    """
    words = "says what one client asks for" if off else "says only what a second client approved"
    _set_term("dual-control", voice, {"demanded": not off}, words, asks=off and not yes, dry_run=dry_run, as_json=as_json)


def _set_term(call: str, voice: UUID, term: Mapping[str, bool], words: str, *, asks: bool, dry_run: bool, as_json: bool) -> None:
    """Change one term of a voice, and say so in `words`. `asks`: what weakens it is asked first."""
    settings = _settings()
    if asks and not dry_run:
        confirmed(f"{voice} {words}?")
    done = _ask(settings, call, voice=str(voice), **term, dry_run=dry_run)
    say(done, [f"{voice} {words}" if not dry_run else f"from then on {voice} {words}"], as_json=as_json)


@voices.command("hours")
@click.argument("voice", type=click.UUID)
@hours_options
@json_option
def hours_(voice: UUID, as_json: bool, **said: Any) -> None:
    """Show in which hours VOICE speaks and is compared, or set them: --days mon-fri --from 08:00 --to 18:00 --zone Europe/Zurich.

    It holds from the next request on. A span whose end is before its beginning ends the day after. It can be erased at any time.
    """
    change, hours = hours_asked(**said)
    found = _ask(_settings(), "hours", voice=str(voice), change=change, hours=None if hours is None else str(hours))
    say(found, [f"{voice} opens {hours_said(found['hours'])}"], as_json=as_json)


@voices.command()
@click.argument("voices_", metavar="VOICE...", type=click.UUID, nargs=-1, required=True)
@_dry
@_yes
@json_option
def rekey(voices_: tuple[UUID, ...], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Give voices new keys: each is opened and sealed again inside one locked buffer, and its old key is destroyed.

    With two sites officers approve exactly these voices: the first call files their request (`glottis approvals`), the same
    call after that does it; it ends with 75 until then. In a development installation of one site whoever runs this command
    is enough.

    A voice under a compromised version keeps its key until it was moved (`glottis keys rewrap`) or while officers break the glass
    for that version (`glottis keys break-glass`): then the same call does it in one step.

    Tokens for the old key are refused with voice_key_changed. With two sites a voice waits for the other one's receipt before
    it speaks again.
    """
    if len(voices_) > MOST_REKEYED:
        raise click.UsageError(f"Name at most {MOST_REKEYED} voices at a time.")
    settings = _settings()
    if dry_run:
        found = [_ask(settings, "show", voice=str(voice)) for voice in voices_]
        say({"changed": False, "voices": found}, [f"{one['voice']} would get a new key" for one in found], as_json=as_json)
        return
    if not yes:
        confirmed(f"Give {len(voices_)} voices new keys? Their old keys are destroyed.")
    done = _ask(settings, "rekey", voices=[str(voice) for voice in voices_])
    if done["request"]:
        say_awaiting(done, ["the keys stay until officers approved and this is given again"], done["request"], as_json=as_json)
    say(done, [_rekeyed(one) for one in done["voices"]], as_json=as_json)
    if any(one["code"] for one in done["voices"]):
        raise Ended(Exit.PARTIAL)


@voices.command()
@click.argument("voice", type=click.UUID, required=False)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the certificate here.  [default: print it]")
@click.option("--countersign", type=_FILE, help="The other site's certificate: add this site's signature to it.")
@click.option("--verify", "verified", type=_FILE, help="Check this certificate instead, offline, with public keys alone.")
@click.option("--roster", type=_FILE, help="With --verify: the roster that the cluster began with.")
@click.option(
    "--certificates", "folder", type=_FOLDER, help="With --verify: the sites' history (`glottis site verify --save DIR`)."
)
@click.option("--json", "as_json", is_flag=True, help="With --verify: print what holds as JSON.")
def certificate(
    voice: UUID | None,
    out: Path | None,
    countersign: Path | None,
    verified: Path | None,
    roster: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Certify the erasure of VOICE, signed by this site's HSM; or check a certificate with --verify FILE --roster FILE.

    The certificate names the voice, its keys, the master versions that covered them and where each was destroyed, both times,
    and what it does not cover. --verify needs no HSM and no database, and names the field that does not hold (exit 3).
    """
    if (voice is None) == (verified is None):
        raise click.UsageError("Name a voice, or a certificate with --verify.")
    if verified is not None:
        if roster is None:
            raise click.UsageError("--verify needs --roster: whose keys count.")
        _verify(verified, roster, folder, as_json=as_json)
        return
    given = countersign.read_text() if countersign else None
    document = _ask(_settings(), "certificate", voice=str(voice), document=given)
    if out is None:
        say_json(document)
    else:
        out.write_text(json.dumps(document, indent=2) + "\n")
        click.echo(f"the certificate is in {out}", err=True)


def _verify(path: Path, roster: Path, folder: Path | None, *, as_json: bool) -> None:
    from service.cli.verify import in_order

    found = erasure_certificate.verify(path.read_bytes(), read_roster(roster), in_order(folder) if folder else ())
    lines = [f"{found['voice']} of {found['tenant']}: {found['stage']}", f"  signed by {', '.join(found['signed_by'])}"]
    lines += [f"  erased {found['erased_at']}, at the other site {found['peer_erased_at'] or 'not yet'}"]
    lines += [f"  {one['name']}: {one['state']}{_where(one)}" for one in found["ring_versions"]]
    lines += [f"  not covered: {line}" for line in found["not_covered"]]
    say({"holds": True, **found}, lines, as_json=as_json)


def _where(version: Mapping[str, Any]) -> str:
    return f" at {version.get('destroyed_at', 'a time unknown')}, epoch {version['epoch']}" if "epoch" in version else ""


def _ask(settings: Settings, call: str, **request: Any) -> dict[str, Any]:
    """One call in a step process under the vault's user."""
    require_running(settings)
    isolation = establish(settings.state_dir, settings.site)
    groups = isolation.database_groups(embedded=settings.embedded)
    return step.call(settings, isolation.vault, "voices", groups=groups, call=call, request=request)


def _settings() -> Settings:
    return Settings.load(os.environ)


def _shown(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['voice']} of {found['tenant'] or 'an unknown tenant'}: {found['stage']}"]
    lines += [f"  name: {found['name'] or 'not readable'}"] if found["name"] is not None else []
    lines += [f"  {found['keys']} key versions, {found['sealed_rows']} sealed rows"]
    return lines + [f"  {finding}" for finding in found["findings"]] + _shredding(found)


_SAID = {
    VoiceTerm.BEARER: "takes tokens bound to a certificate alone",
    VoiceTerm.LIVENESS: "demands that its speaker has just said digits (POST /v1/liveness)",
    VoiceTerm.DUAL_CONTROL: "demands that a second client approved the text (POST /v1/approvals)",
}


def _demanded(found: Mapping[str, Any]) -> list[str]:
    """What differs for the voice, in sentences; nothing where it has no row that could be believed."""
    if found["state"] is None:
        return []
    lines = [] if found["state"] == VoiceState.ACTIVE.value else [f"  {found['state']}: it neither speaks nor is compared"]
    terms = [VoiceTerm(term) for term in found["terms"]]
    lines += [f"  {_SAID[term]}" for term in terms]
    lines += [] if VoiceTerm.BEARER in terms else ["  demands a proof by the client's own key with each token"]
    return [*lines, f"  opens {hours_said(found['hours'])}"]


def _would_go(found: Mapping[str, Any]) -> list[str]:
    if "consent" in found:
        return [f"the consent {found['consent']} would end", *(f"  {voice} would be erased" for voice in found["voices"])]
    if found["stage"] != "stored" and not found["keys"] and not found["sealed_rows"] and found["name"] is None:
        return [f"{found['voice']} was erased before, at {found['erased_at']}", *_shredding(found)]
    return [*_shown(found), "  these would go, and the details of the log's entries about the voice"]


def _erased(done: Mapping[str, Any]) -> list[str]:
    if not done["changed"]:
        return [f"{done['voice']} was erased before, at {done['erased_at']}", *_shredding(done)]
    lines = [
        f"{done['voice']} is erased: {done['keys']} key versions, {done['sealed_rows']} sealed rows, {done['log_details']} details"
    ]
    lines += [f"  found on the way: {finding}" for finding in done["findings"]]
    lines += [] if done["peer_erased_at"] else ["  the other site drops its copies as soon as it hears of it"]
    return lines + _shredding(done)


def _shredding(found: Mapping[str, Any]) -> list[str]:
    """When old copies stay shut, in a sentence."""
    if "shredding" not in found:
        return []
    told = found["shredding"]
    if told is None:
        return ["  when it will be shredded cannot be told: the ring's rows do not carry their MACs"]
    if told["by"] == "done":
        return [f"  shredded at {told['at']}: no old copy opens it"]
    waits = f"  an old copy opens it until {_listed(told['waits_for'])} destroyed"
    if told["by"] == "pending destruction":
        return [f"{waits}: at {told['at']}, unless that is cancelled"]
    if told["by"] == "schedule":
        return [f"{waits}: by schedule at {told['at']} at the earliest, once officers have agreed"]
    now = " and ".join(f"glottis keys destroy {name}" for name in told["waits_for"])
    return [
        f"{waits}; nothing is planned that leads there",
        f"  to shred it now: glottis keys ceremony, rotate and rewrap, then {now}",
        "  to have it done: glottis keys schedule set NAME --action destroy --after-days DAYS",
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _rekeyed(one: Mapping[str, Any]) -> str:
    if one["code"] == KeyCompromised.code:
        return f"{one['voice']} kept its key: {KeyCompromised.__doc__} {KeyCompromised.fix}"
    if one["code"]:
        return f"{one['voice']} kept its key: {one['code']}"
    return f"{one['voice']} has key version {one['key_version']}"
